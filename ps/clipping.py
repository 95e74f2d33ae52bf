"""Gradient clipping on flat buffers: by value, per parameter's norm, by the global norm.

Covers: what Keras does with clipvalue, clipnorm and global_clipnorm, and who does it here.
Does not: import numba, because workers run this.      Threads: one `Clipper` per caller.

Norms belong to the gradient of the whole model, so the worker takes them, before the push. In sync
mode a clip by value acts on the reduced gradient, so the server does it (ps.dense). Norms in sync
mode with several workers would need the reduced gradient at one place: refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from ps.errors import SettingsError
from ps.params import Descent, GroupLayout, Layout, Manifest, RuleConfig

Array = np.ndarray[Any, Any]
Kind = Literal["clipnorm", "global_clipnorm", "clipvalue"]
_KINDS: tuple[Kind, ...] = ("clipnorm", "global_clipnorm", "clipvalue")
_CHUNK = 1 << 16


def clip_of(config: RuleConfig) -> tuple[Kind, float] | None:
    """Return the clipping that acts and its limit; of several the first of norm, global, value."""
    if not isinstance(config, Descent):
        return None
    for kind in _KINDS:
        limit: float | None = getattr(config, kind)
        if limit:
            return kind, limit
    return None


def sum_of_squares(values: Array) -> float:
    """Return the sum of squares in double precision, without a copy of the whole array."""
    total = 0.0
    for start in range(0, values.size, _CHUNK):
        chunk = values[start : start + _CHUNK].astype(np.float64)
        total += float(chunk @ chunk)
    return total


class Clipper:
    """Clips a worker's own gradients before they are pushed.

    Args:
        manifest: what is trained; groups without clipping pass through untouched.
        num_workers: of the whole cluster.

    Raises:
        SettingsError: clipping by norm asked for sync mode with several workers.
    """

    def __init__(self, manifest: Manifest, *, num_workers: int) -> None:
        is_sync = manifest.consistency == "sync"
        self._layouts: dict[str, GroupLayout] = {}
        self._clips: dict[str, tuple[Kind, float]] = {}
        layout = Layout.of(manifest)
        for spec in manifest.groups:
            clip = clip_of(spec.rule)
            if clip is None or (is_sync and clip[0] == "clipvalue"):
                continue
            if is_sync and num_workers > 1:
                raise SettingsError(
                    f"group {spec.name!r}: {clip[0]}={clip[1]:g} with consistency='sync' and "
                    f"{num_workers} workers would clip each worker's part instead of the mean; "
                    "use clipvalue, or consistency='async'"
                )
            self._clips[spec.name] = clip
            self._layouts[spec.name] = layout.group(spec.name)
        self._out = {
            name: np.empty(group.num_elements, group.numpy_dtype)
            for name, group in self._layouts.items()
        }

    def clip(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Return the gradients as they are to be pushed.

        Args:
            gradients: by group name; flat, of the group's dtype and size. They are not changed.

        Returns:
            The same arrays for groups that are not clipped; for the others buffers of this object,
            which the next call overwrites.
        """
        clipped = dict(gradients)
        squares = sum(
            sum_of_squares(gradients[name])
            for name, (kind, _) in self._clips.items()
            if kind == "global_clipnorm" and name in gradients
        )
        for name, (kind, limit) in self._clips.items():
            if name not in gradients:
                continue
            gradient, out = gradients[name], self._out[name]
            if kind == "clipvalue":
                np.clip(gradient, -limit, limit, out=out)
            elif kind == "global_clipnorm":
                _scale_to_global_norm(gradient, out, squares, limit)
            else:
                offsets = self._layouts[name].offsets
                for start, stop in itertools.pairwise(offsets):
                    _scale_to_norm(gradient[start:stop], out[start:stop], limit)
            clipped[name] = out
        return clipped


def _scale_to_norm(gradient: Array, out: Array, limit: float) -> None:
    """`g * limit / max(|g|, limit)`, in the order of tf.clip_by_norm."""
    number = gradient.dtype.type
    norm = number(np.sqrt(sum_of_squares(gradient)))
    np.multiply(gradient, number(limit), out=out)
    np.divide(out, max(norm, number(limit)), out=out)


def _scale_to_global_norm(gradient: Array, out: Array, squares: float, limit: float) -> None:
    """`g * (limit * min(1 / |all g|, 1 / limit))`, in the order of Keras's function."""
    number = gradient.dtype.type
    norm, one, bound = number(np.sqrt(squares)), number(1), number(limit)
    inverse = one / norm if norm else one / bound  # Keras: 1 / 0 is infinite, the other is less
    np.multiply(gradient, bound * min(inverse, one / bound), out=out)
