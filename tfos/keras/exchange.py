"""One distributed model's traffic with the parameter servers, step by step.

Covers: seeding or adopting the parameters, push_pull around each compiled step, pull, assign,
non-finite steps, membership of the sync barrier, meetings of the workers.
Does not: compute (train_step), hook into Keras (distribute, epochs), retry or reconnect (PSClient).
Threads: the thread that runs the model's `fit`; no locks.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ps.params import Consistency, Hyper, Manifest
from tfos.errors import SettingsError
from tfos.keras import batches, frozen, optimizers, variables
from tfos.keras.errors import NonFiniteGradient, UnsupportedModel
from tfos.keras.train_step import GradientStep, StepOutput
from tfos.keras.worker import WorkerContext

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 600.0
"""For the chief to seed the servers: its imports, its data, its first batch."""
MEETING_TIMEOUT_S = 86_400.0
"""For the slowest worker's epoch. A worker that dies or finishes is not waited for."""

BARRIER_TIMEOUT_S = 600.0
"""Sync, ssp: for the slowest worker's next batch; as long as a feed may stand still."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `distribute` was asked for."""

    consistency: Consistency = "async"
    reduction: Literal["mean", "sum"] = "mean"
    staleness_bound: int | None = None
    """None unless ssp."""
    staleness_aware: bool = False
    on_nonfinite: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        bound = self.staleness_bound
        if (self.consistency == "ssp") != (bound is not None):
            raise SettingsError(
                f"consistency={self.consistency!r} with staleness_bound={bound}: ssp needs the "
                "bound and no other mode has one; write consistency='ssp', staleness_bound=4"
            )
        if bound is not None and (type(bound) is not int or bound < 0):
            raise SettingsError(f"staleness_bound must be an int of at least 0, got {bound!r}")
        if self.staleness_aware and self.consistency == "sync":
            raise SettingsError(
                "staleness_aware=True with consistency='sync': there no gradient is stale; leave "
                "it out, or use consistency='async'"
            )


class Exchange:
    """Keeps one model's variables and the servers' parameters together.

    Attributes:
        steps: steps trained by this worker.
        rows: rows in those steps.
        skipped_steps: steps whose gradient was not finite and was not sent.
        clock: updates of the servers that the local variables contain.
    """

    def __init__(self, model: Any, ctx: WorkerContext, settings: Settings) -> None:
        self.model = model
        self.ctx = ctx
        self.settings = settings
        self.optimizer = model.optimizer
        self.steps = 0
        self.rows = 0
        self.skipped_steps = 0
        self.clock = 0
        self.assigned = False
        self._client = ctx.ps_client()
        self._member = True
        self._build_meetings = 0
        self._asked_this_epoch = False
        self._variables: variables.Variables | None = None
        self._step: GradientStep | None = None
        self._into: dict[str, Array] = {}
        self._adopt_values: Any = None

    @property
    def client(self) -> Any:
        """The process's PSClient."""
        return self._client

    @property
    def attached(self) -> bool:
        """Whether the parameters live on the servers by now."""
        return self._step is not None

    @property
    def sync(self) -> bool:
        """Whether a barrier stands behind every push."""
        return self.settings.consistency == "sync"

    @property
    def waits(self) -> bool:
        """Whether workers wait for each other's pushes."""
        return self.settings.consistency != "async"

    # -- beginning

    def attach(self, *, seeds: bool) -> None:
        """Bind the built model to the servers and take their values.

        Args:
            seeds: whether this worker's values fill empty servers.
        """
        found = variables.collect(self.model, self.optimizer)
        settings = self.settings
        manifest = found.manifest(
            self.optimizer,
            consistency=settings.consistency,
            reduction=settings.reduction,
            staleness_bound=settings.staleness_bound or 0,
            staleness_aware=settings.staleness_aware,
        )
        if seeds:
            self._client.seed(manifest, {group.name: group.values() for group in found.groups})
        adopted = self._client.attach(timeout_s=ATTACH_TIMEOUT_S)
        check_same(manifest, adopted)
        frozen.share(self, found.frozen, seeds=seeds)
        if self.waits:
            self._client.timeout_s = max(self._client.timeout_s, BARRIER_TIMEOUT_S)
        clips_here = not optimizers.server_clips(self.optimizer, settings.consistency)
        self._variables = found
        self._into = {group.name: np.empty(sum(group.sizes), group.dtype) for group in found.groups}
        self._adopt_values = self._compile_adopt(found)
        self._step = GradientStep(self.model, found, clips_here=clips_here)
        self.pull()

    def attach_unbuilt(self, data: Any = None) -> None:
        """Build the model as the workers' first batches ask for, then attach.

        Every unbuilt worker comes here once an epoch until anybody has had a batch: with its first
        batch, or with None at the end of an epoch without one. So all build and attach at the same
        point, and the chief can seed even if it has no rows.
        """
        self._build_meetings += 1
        own = b"" if data is None else batches.describe(data)
        answers = self.meet(f"build/{self._build_meetings}", own)
        described = next((answers[rank] for rank in sorted(answers) if answers[rank]), None)
        if described is not None:
            batches.build(self.model, described)
            self.attach(seeds=self.ctx.is_chief)

    def begin_epoch(self) -> None:
        """Forget that this epoch's question for a batch to build from was asked."""
        self._asked_this_epoch = False

    def attach_without_batch(self) -> None:
        """Attach at the end of an epoch without rows, if any worker had a batch; once an epoch."""
        if not self.attached and not self._asked_this_epoch:
            self._asked_this_epoch = True
            self.attach_unbuilt()

    # -- steps

    def train(self, data: Any) -> Any:
        """Run one step on a batch and exchange its result; returns the step's logs.

        Raises:
            NonFiniteGradient: with on_nonfinite="error"; nothing was sent.
        """
        data = batches.to_tensors(data)
        if self._step is None:
            self.attach_unbuilt(data)
        if self._step is None or self._variables is None:
            raise RuntimeError("attach() left the model without a step")
        self.join()
        output = self._step(data)
        rows = batches.num_rows(data)
        if not bool(output.finite):
            self._refuse(output, rows)
            return output.logs
        pushed = {
            group.name: np.asarray(memoryview(flat))
            for group, flat in zip(
                (*self._variables.trainable, *self._variables.statistics),
                (*output.gradients, *output.statistics),
                strict=True,
            )
        }
        ack = self._client.push_pull(pushed, self._into, hyper=self._hyper(output), rows=rows)
        self._adopt(ack.clock)
        self.steps += 1
        self.rows += rows
        return output.logs

    def pull(self) -> None:
        """Take the servers' newest values."""
        if self._adopt_values is not None:
            self._adopt(self._client.pull(self._into).clock)

    def assign(self) -> None:
        """Put the model's present values on the servers; only the chief's count."""
        if self._variables is not None and self.ctx.is_chief:
            self._client.assign({group.name: group.values() for group in self._variables.groups})
            self.assigned = True

    def check_unchanged(self) -> None:
        """Refuse a model that was compiled again or whose variables changed."""
        if self.model.optimizer is not self.optimizer:
            raise UnsupportedModel(
                "the model was compiled again after ctx.distribute(model), so its optimizer is not "
                "the one whose rule the parameter servers run; compile once, before distributing"
            )
        if self._variables is not None:
            self._variables.check_unchanged(self.model)

    def _hyper(self, output: StepOutput) -> Hyper:
        values = [float(value) for value in output.scalars.numpy()]
        if not self.sync or len(values) == 1 or self._variables is None:
            # async: the servers count each bucket's updates themselves, also those of others
            return Hyper(learning_rate=values[0])
        names = [group.name for group in self._variables.trainable]
        scalars: dict[str, tuple[float, ...]] = {
            name: (alpha,) for name, alpha in zip(names, values[1:], strict=True)
        }
        return Hyper(learning_rate=values[0], scalars=scalars)

    def _adopt(self, clock: int) -> None:
        import tensorflow as tf

        self.clock = clock
        flats = [tf.constant(buffer) for buffer in self._into.values()]
        self._adopt_values(tf.constant(clock, tf.int64), *flats)

    def _compile_adopt(self, found: variables.Variables) -> Any:
        import tensorflow as tf

        iterations = optimizers.unwrap(self.optimizer)._iterations.value

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def adopt(clock: Any, *flats: Any) -> None:
            for group, flat in zip(found.groups, flats, strict=True):
                group.assign(flat)
            iterations.assign(tf.cast(clock, iterations.dtype))

        return adopt

    def _refuse(self, output: StepOutput, rows: int) -> None:
        """Handle a step whose gradient is not finite; nothing of it is sent."""
        expected = self._step is not None and self._step.skips_nonfinite
        if not expected and self.settings.on_nonfinite == "error":
            where = f"worker:{self.ctx.worker_rank}, step {self.steps + 1} of this worker"
            raise NonFiniteGradient(
                f"{self._worst(output)} of a batch of {rows} rows are NaN or infinite ({where}); "
                "nothing was sent. Lower the learning rate, clip, look at that batch, or "
                'distribute with on_nonfinite="skip"'
            )
        self.skipped_steps += 1
        if self.waits:
            self._adopt(self._client.push_null(into=self._into).clock)

    def _worst(self, output: StepOutput) -> str:
        """Name the first tensor with non-finite values, and how many."""
        if self._variables is not None:
            for group, flat in zip(self._variables.trainable, output.gradients, strict=True):
                bad = ~np.isfinite(np.asarray(memoryview(flat)))
                start = 0
                for name, size in zip(group.names, group.sizes, strict=True):
                    if count := int(bad[start : start + size].sum()):
                        return f"{count} of {size} gradient values of {name!r}"
                    start += size
        return "gradient values (before clipping)"

    # -- other workers

    def join(self) -> None:
        """Be waited for by the others' steps."""
        if self.waits and not self._member:
            self._client.join()
        self._member = True

    def leave(self) -> None:
        """Let the others go on without this worker until it trains again."""
        if self.waits and self._member and self.attached:
            self._client.leave()
            self._member = False

    def meet(self, key: str, value: bytes) -> dict[int, bytes]:
        """Exchange small values with all workers that are not done; returns them by rank."""
        if self.ctx.num_workers == 1:
            return {self.ctx.worker_rank: value}
        answers = self._client.rendezvous(key, value, timeout_s=MEETING_TIMEOUT_S)
        return dict(answers)


def check_same(ours: Manifest, servers: Manifest) -> None:
    """Refuse servers that hold another model; names may differ, as Keras numbers layers."""
    for field in ("consistency", "reduction", "staleness_bound", "staleness_aware"):
        if getattr(ours, field) != getattr(servers, field):
            raise UnsupportedModel(
                f"this worker distributes with {field}={getattr(ours, field)!r}, the parameter "
                f"servers run {getattr(servers, field)!r}; use the same on every worker"
            )
    mine = [_summary(group) for group in ours.groups]
    theirs = [_summary(group) for group in servers.groups]
    if mine != theirs:
        differing = next(
            (pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]),
            (f"{len(mine)} groups", f"{len(theirs)} groups"),
        )
        raise UnsupportedModel(
            "the parameter servers already hold another model: this worker has "
            f"{differing[0]}, the servers have {differing[1]}; build and compile the same model on "
            "every worker, one model per cluster"
        )


def _summary(group: Any) -> tuple[Any, ...]:
    return group.name, group.dtype, group.rule, [param.shape for param in group.params]


def weighted_mean(values: list[tuple[float, int]]) -> float:
    """Return the mean of (value, weight) pairs; NaN without weight."""
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else math.nan
