"""Gradient clipping as Keras does it: clipvalue, clipnorm, global_clipnorm; dense and of tables.

    mode              clipvalue       clipnorm, global_clipnorm
    async, ssp        the worker      the worker: norms belong to the gradient of the whole model
    sync, one worker  the server      the worker: its gradient is the mean
    sync, several     the server      the servers: norms of the mean, which no worker has
    hybrid            as sync         as sync

Gradients of a table's rows are clipped by their worker, in every mode, also where those of several
are reduced: most are applied as they arrive. Their norm is that of the dense gradient: ids that the
push does not bring add nothing.

"Squares" are one float64 per parameter of the groups that are clipped by norm, in the manifest's
order. Each server adds up its own elements; the sum over the servers is the whole parameter's.

Covers: the worker's Clipper; sums of squares of a slice and its scaling; clipping of table rows.
Does not: import numba, because workers run this; send squares (ps.client.two_round_push); clip on
servers (ps.dense.shard, ps.server.reduction).
Threads: one `Clipper` per caller; functions stand alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from ps.errors import PSSettingsError
from ps.manifest.manifest import Layout, Manifest
from ps.manifest.rule_spec import Descent, RuleConfig

Array = np.ndarray[Any, Any]
Kind = Literal["clipnorm", "global_clipnorm", "clipvalue"]
_KINDS: tuple[Kind, ...] = ("clipnorm", "global_clipnorm", "clipvalue")
_VALUES_AT_ONCE = 1 << 16


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
    for start in range(0, values.size, _VALUES_AT_ONCE):
        chunk = values[start : start + _VALUES_AT_ONCE].astype(np.float64)
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
            PSSettingsError: another number of them, or one that is negative or NaN.
        """
        if squares.shape != (self.size,) or not (squares >= 0).all():
            raise PSSettingsError(
                f"expected {self.size} sums of squares, one per clipped parameter, got "
                f"{list(squares.shape)} with the least {squares.min(initial=0.0)}"
            )

    def add(self, squares: Array, group: str, start: int, part: Array) -> None:
        """Add the squares of a piece that begins at element `start` of its group.

        Args:
            squares: [num_squares] float64, one per parameter; changed.
            group: name of the group.
            start: the first element of `part` in the group's flat buffer.
            part: [n] of the group's dtype.
        """
        clipped = self._groups.get(group)
        if clipped is not None:
            for place, piece in clipped.segments(start, start + part.size):
                squares[place] += sum_of_squares(part[piece])

    def scale(self, squares: Array, group: str, start: int, part: Array, out: Array) -> None:
        """Write the clipped piece to `out`, which may be `part`; other groups are left alone.

        Args:
            squares: squares of the whole gradient.
            group: name of the piece's group.
            start: its first element there.
            part: the piece.
            out: of the piece's dtype and size.
        """
        clipped = self._groups.get(group)
        if clipped is None:
            return
        # An infinite gradient is scaled by 0; the server refuses the NaN, so numpy need not warn.
        with np.errstate(invalid="ignore"):
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
    """`g * limit / max(|g|, limit)`, in the order of tf.clip_by_norm, unless that overflows.

    Args:
        gradient: [n] floats.
        out: [n] of the same dtype; filled; may be `gradient` itself.
        squares: sum of the squares of the whole gradient.
        limit: largest norm.
    """
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


def servers_take_norms(manifest: Manifest, *, num_workers: int) -> bool:
    """Whether the reduced gradient is clipped by norm, which needs the servers.

    Args:
        manifest: has the rules.
        num_workers: number of workers in the cluster.
    """
    return manifest.has_barrier and num_workers > 1 and Norms(manifest).size > 0


class Clipper:
    """Clips a worker's own gradients before they are pushed.

    Args:
        manifest: what is trained; groups without clipping pass through untouched.
        num_workers: number of workers in the cluster.
    """

    def __init__(self, manifest: Manifest, *, num_workers: int) -> None:
        self._norms = Norms(manifest)
        self._takes_norms = not servers_take_norms(manifest, num_workers=num_workers)
        self._limits: dict[str, float] = {}
        for spec in manifest.groups:
            clip = clip_of(spec.rule)
            if clip is not None and clip[0] == "clipvalue" and not manifest.has_barrier:
                self._limits[spec.name] = clip[1]
        layout = Layout.of(manifest)
        mine = {*self._limits, *(self._norms.groups if self._takes_norms else ())}
        self._out = {
            name: np.empty(layout.group(name).num_elements, layout.group(name).numpy_dtype)
            for name in mine
        }

    @classmethod
    def if_needed(cls, manifest: Manifest, *, num_workers: int) -> Self | None:
        """Return one where this worker clips anything.

        Args:
            manifest: has the rules.
            num_workers: number of workers in the cluster.
        """
        clipper = cls(manifest, num_workers=num_workers)
        return clipper if clipper._out else None

    def clip(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Return the gradients as they are to be pushed.

        Args:
            gradients: by group name; flat, of the group's dtype and size. They are not changed.

        Returns:
            The same arrays for groups that are not clipped; for the others buffers of this object,
            which the next call overwrites.
        """
        clipped = dict(gradients)
        for name, limit in self._limits.items():
            clipped[name] = np.clip(gradients[name], -limit, limit, out=self._out[name])
        if self._takes_norms:
            squares = self._norms.zeros()
            for name in self._norms.groups:
                self._norms.add(squares, name, 0, gradients[name])
            for name in self._norms.groups:
                self._norms.scale(squares, name, 0, gradients[name], self._out[name])
                clipped[name] = self._out[name]
        return clipped


_ROWS_AT_ONCE = 1 << 12


def clipped(rule: RuleConfig, gradients: Array) -> Array:
    """Return the gradients of one push as its table's rule clips them: in every mode, per id.

    Args:
        rule: rule of the table.
        gradients: [distinct ids, dim]; not changed. With NaN or infinity among them they are not
            clipped by norm, so that the server names the id.

    Returns:
        The same array where nothing is to be clipped.
    """
    clip = clip_of(rule)
    if clip is None:
        return gradients
    kind, limit = clip
    if kind == "clipvalue":
        return np.clip(gradients, -limit, limit)
    squares = _squares(gradients)
    if not np.isfinite(squares) and not np.isfinite(gradients).all():
        return gradients
    out = np.empty_like(gradients)
    scale_to_norm(gradients, out, squares, limit)
    return out


def _squares(gradients: Array) -> float:
    """Sum the squares in double precision; the bits do not depend on the order of the rows."""
    rows = np.empty(len(gradients))
    for start in range(0, len(gradients), _ROWS_AT_ONCE):
        chunk = gradients[start : start + _ROWS_AT_ONCE].astype(np.float64)
        np.einsum("ij,ij->i", chunk, chunk, out=rows[start : start + _ROWS_AT_ONCE])
    return float(np.sort(rows).sum())
