"""Settings of `ctx.distribute`, and which combinations are refused.

Covers: the checks that need no model.      Does not: know optimizers or models
(tfos.keras.fit.distribute).  Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ps.compression.format import FORMATS, Compression
from ps.manifest.manifest import MAX_LAG, MAX_PERMITS, Consistency
from tfos.errors import SettingsError

_ALLOWED = {
    "consistency": ("async", "sync", "ssp", "hybrid"),
    "reduction": ("mean", "sum"),
    "on_nonfinite": ("error", "skip"),
    "compression": ("none", *FORMATS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Checked arguments of `distribute`."""

    consistency: Consistency = "async"
    reduction: Literal["mean", "sum"] = "mean"
    staleness_bound: int | None = None
    """Bound in steps (ssp) or batches (hybrid); None in other modes."""
    staleness_aware: bool | None = None
    """Whether staleness divides the rate; None: if gradients can be stale and Adagrad's or Ftrl's
    own damping does not apply."""
    on_nonfinite: Literal["error", "skip"] = "error"
    pipeline: int | None = None
    """Number of steps that are computed while a push is in flight."""
    compression: Compression = "none"
    """Format of pushed float32 gradients."""

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise SettingsError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if not isinstance(self.staleness_aware, bool | None):
            raise SettingsError(
                f"staleness_aware must be True, False or None, got {self.staleness_aware!r}"
            )
        self._check_staleness()
        self._check_pipeline()

    @property
    def has_barrier(self) -> bool:
        """Whether the gradients of dense parameters wait for each other."""
        return self.consistency in ("sync", "hybrid")

    def divides_by_staleness(self, *, damps_itself: bool) -> bool:
        """Return whether the servers divide a gradient's rate by its staleness.

        Args:
            damps_itself: whether the optimizer's rate falls with the gradients so far.
        """
        if self.staleness_aware is not None:
            return self.staleness_aware
        return not self.has_barrier and not damps_itself

    def bound_for(self, batches_per_push: int) -> int:
        """Return the manifest's staleness bound; 0 in modes that have none.

        Args:
            batches_per_push: batches that gradient accumulation sums for a push; 1 without it.

        Raises:
            SettingsError: hybrid with fewer batches under way than a push needs.
        """
        if self.consistency != "hybrid":
            return self.staleness_bound or 0
        bound = batches_per_push if self.staleness_bound is None else self.staleness_bound
        if bound < batches_per_push:
            raise SettingsError(
                f"staleness_bound={bound} lets a hybrid worker have {bound} batches of rows in "
                f"progress, but gradient_accumulation_steps={batches_per_push} needs that many "
                "for one push; raise the bound, or leave it out"
            )
        return bound

    def pushes_in_flight(self, *, has_tables: bool, damps_itself: bool) -> int:
        """Return the number of pushes that may be in flight while `fit` computes.

        Args:
            has_tables: whether the model has rows to wait for.
            damps_itself: as for `divides_by_staleness`; other rules pay for older gradients.
        """
        if self.pipeline is not None:
            return self.pipeline
        return int(self.consistency == "async" and has_tables and damps_itself)

    def _check_staleness(self) -> None:
        bound = self.staleness_bound
        if self.consistency == "hybrid":
            if bound is not None and (type(bound) is not int or not 1 <= bound <= MAX_PERMITS):
                raise SettingsError(
                    f"staleness_bound of hybrid is the number of batches of rows that a worker has "
                    f"in progress, an int from 1 to {MAX_PERMITS}, got {bound!r}"
                )
        elif (self.consistency == "ssp") != (bound is not None):
            raise SettingsError(
                f"consistency={self.consistency!r} with staleness_bound={bound}: ssp needs the "
                "bound, hybrid may have one, other modes have none; write consistency='ssp', "
                "staleness_bound=4"
            )
        if bound is not None and (type(bound) is not int or bound < 0):
            raise SettingsError(f"staleness_bound must be an int of at least 0, got {bound!r}")
        if self.staleness_aware and self.has_barrier:
            raise SettingsError(
                f"staleness_aware=True with consistency={self.consistency!r}: no gradient of dense "
                "parameters is stale there; omit it, or use consistency='async'"
            )

    def _check_pipeline(self) -> None:
        if self.pipeline is None:
            return
        if type(self.pipeline) is not int or not 0 <= self.pipeline <= MAX_LAG:
            raise SettingsError(
                f"pipeline must be an int from 0 to {MAX_LAG}, got {self.pipeline!r}"
            )
        if self.pipeline and self.consistency != "async":
            raise SettingsError(
                f"pipeline={self.pipeline} with consistency={self.consistency!r}: each step there "
                "waits for its push; use pipeline=0 or consistency='async'"
            )
