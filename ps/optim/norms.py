"""Norms of a gradient that lies in pieces on several servers: squares that add up, and the scaling.

Covers: which parameters a piece of a flat buffer touches, their sums of squares, `clipnorm` and
`global_clipnorm` of a piece once all sums are known.
Does not: import numba, because workers run this; decide who clips (ps.optim.clipping).
Pure; no threads.

"Squares" are one float64 per parameter of the groups that are clipped by norm, in the manifest's
order. Each server adds up its own elements; the sum over the servers is the whole parameter's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ps.errors import SettingsError
from ps.manifest.manifest import Layout, Manifest
from ps.manifest.rule_spec import Descent, RuleConfig

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


@dataclass(frozen=True, slots=True)
class _Clipped:
    """One group that is clipped by norm."""

    kind: Kind
    limit: float
    first: int
    """Place of its first parameter in the squares."""
    offsets: tuple[int, ...]

    def segments(self, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        """Give each parameter in [start, stop): its place, and its part of that piece."""
        low = max(0, bisect_right(self.offsets, start) - 1)
        high = bisect_left(self.offsets, stop)
        for place in range(low, high):
            begin = max(start, self.offsets[place])
            end = min(stop, self.offsets[place + 1])
            if begin < end:
                yield self.first + place, slice(begin - start, end - start)


class Norms:
    """The groups of a manifest that are clipped by norm."""

    def __init__(self, manifest: Manifest) -> None:
        layout = Layout.of(manifest)
        self._groups: dict[str, _Clipped] = {}
        self.size = 0
        """Number of squares."""
        for spec in manifest.groups:
            clip = clip_of(spec.rule)
            if clip is not None and clip[0] != "clipvalue":
                offsets = tuple(layout.group(spec.name).offsets)
                self._groups[spec.name] = _Clipped(*clip, self.size, offsets)
                self.size += len(spec.params)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups."""
        return tuple(self._groups)

    def zeros(self) -> Array:
        """Return squares to add to."""
        return np.zeros(self.size, np.float64)

    def check(self, squares: Array) -> None:
        """Refuse squares that no gradient has.

        Raises:
            SettingsError: another number of them, or one that is negative or NaN.
        """
        if squares.shape != (self.size,) or not (squares >= 0).all():
            raise SettingsError(
                f"expected {self.size} sums of squares, one per clipped parameter, got "
                f"{list(squares.shape)} with the least {squares.min(initial=0.0)}"
            )

    def add(self, squares: Array, group: str, start: int, part: Array) -> None:
        """Add the squares of a piece that begins at element `start` of its group."""
        clipped = self._groups.get(group)
        if clipped is not None:
            for place, piece in clipped.segments(start, start + part.size):
                squares[place] += sum_of_squares(part[piece])

    def scale(self, squares: Array, group: str, start: int, part: Array, out: Array) -> None:
        """Write the clipped piece to `out`, which may be `part`; other groups are left alone.

        Args:
            squares: of the whole gradient.
            group: name of the piece's group.
            start: its first element there.
            part: the piece.
            out: of the piece's dtype and size.
        """
        clipped = self._groups.get(group)
        if clipped is None:
            return
        if clipped.kind == "global_clipnorm":
            _scale_to_global_norm(part, out, self._global_squares(squares), clipped.limit)
            return
        for place, piece in clipped.segments(start, start + part.size):
            scale_to_norm(part[piece], out[piece], float(squares[place]), clipped.limit)

    def _global_squares(self, squares: Array) -> float:
        """All groups that are clipped by the global norm have one norm."""
        return sum(
            float(squares[clipped.first : clipped.first + len(clipped.offsets) - 1].sum())
            for clipped in self._groups.values()
            if clipped.kind == "global_clipnorm"
        )


def scale_to_norm(gradient: Array, out: Array, squares: float, limit: float) -> None:
    """`g * limit / max(|g|, limit)`, in the order of tf.clip_by_norm, unless that overflows."""
    number, norm = gradient.dtype.type, float(np.sqrt(squares))
    if norm * limit > float(np.finfo(gradient.dtype).max):  # no element is larger than the norm
        factor = np.float64(limit / max(norm, limit))
        np.multiply(gradient, factor, out=out, casting="same_kind")
        return
    np.multiply(gradient, number(limit), out=out)
    np.divide(out, max(number(norm), number(limit)), out=out)


def _scale_to_global_norm(gradient: Array, out: Array, squares: float, limit: float) -> None:
    """`g * (limit * min(1 / |all g|, 1 / limit))`, in the order of Keras's function."""
    number = gradient.dtype.type
    norm, one, bound = number(np.sqrt(squares)), number(1), number(limit)
    inverse = one / norm if norm else one / bound  # Keras: 1 / 0 is infinite, the other is less
    np.multiply(gradient, bound * min(inverse, one / bound), out=out)
