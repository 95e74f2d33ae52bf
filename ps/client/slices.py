"""Slices of a client's flat buffers: one per group and server. Pure.

Covers: which elements of which group go to which server; views of arrays without copies; gradients
in several arrays.
Does not: send (ps.client.retry), decide ownership (ps.manifest.sharding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ps.errors import ShapeError
from ps.manifest.manifest import GroupLayout, Layout
from ps.manifest.sharding import deal

Array = np.ndarray[Any, Any]
Gradient = Array | Sequence[Array]
"""Gradient of one group: a flat array [num_elements], or several whose concatenation it is."""


class Slice(msgspec.Struct, frozen=True):
    """Elements [start, stop) of one group's flat buffer: neighbouring buckets of one server."""

    group: str
    start: int
    stop: int


def slice_by_server(layout: Layout, num_servers: int) -> tuple[tuple[Slice, ...], ...]:
    """Return each server's pieces in the order of its buckets; neighbours are merged.

    Args:
        layout: layout of the manifest.
        num_servers: number of servers that share the buckets.
    """
    cut: list[tuple[Slice, ...]] = []
    for owned in deal(layout.bucket_bytes(), num_servers):
        pieces: list[Slice] = []
        for bucket in layout.buckets[owned.start : owned.stop]:
            last = pieces[-1] if pieces else None
            if last is not None and last.group == bucket.group and last.stop == bucket.start:
                pieces[-1] = Slice(last.group, last.start, bucket.stop)
            else:
                pieces.append(Slice(bucket.group, bucket.start, bucket.stop))
        cut.append(tuple(pieces))
    return tuple(cut)


def check_arrays(
    layout: Layout, arrays: Mapping[str, Gradient], what: str, *, writable: bool = False
) -> None:
    """Refuse arrays that are not the manifest's flat buffers.

    Args:
        layout: layout of the manifest.
        arrays: per group the caller's flat buffer, or of a gradient its parts.
        what: names the arrays in messages, for example "grads".
        writable: whether they will be filled.

    Raises:
        ShapeError: a group is missing or unknown, or an array has another dtype or size, is not
            flat and contiguous, or cannot be written where that is needed.
    """
    given: object = arrays
    if not isinstance(given, Mapping) or len(arrays) != len(layout.groups):
        raise _other_groups(layout, arrays, what)
    for group in layout.groups:
        array = arrays.get(group.name)
        if array is None:
            raise _other_groups(layout, arrays, what)
        parts = array if _is_in_parts(array) and not writable else (array,)
        left = group.num_elements
        for part in parts:
            if not isinstance(part, np.ndarray):
                raise _other_array(group, what, type(part).__name__)
            if part.dtype != group.dtype or part.ndim != 1:
                raise _other_array(group, what, f"{part.dtype}{list(part.shape)}; {_EXPECTED}")
            flags = part.flags
            if not flags.c_contiguous or (writable and not flags.writeable):
                kind = "writable and contiguous" if writable else "contiguous"
                raise ShapeError(f"{what}[{group.name!r}] must be {kind}; pass a copy")
            left -= part.size
        if left:
            got = f"{group.dtype}[{group.num_elements - left}]"
            raise _other_array(group, what, f"{got}; {_EXPECTED}")


def _is_in_parts(given: Any) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(each, np.ndarray) for each in given)


_EXPECTED = "the flat buffer holds all parameters of the group in the manifest's order"


def whole(gradients: Mapping[str, Gradient]) -> dict[str, Array]:
    """Return gradients with one flat array per group; parts are copied."""
    return {
        name: each if isinstance(each, np.ndarray) else np.concatenate(each)
        for name, each in gradients.items()
    }


def views_per_server(
    arrays: Mapping[str, Gradient], pieces: Sequence[Sequence[Slice]]
) -> list[list[memoryview]]:
    """Return the bytes of each server's pieces, as views of the arrays.

    Args:
        arrays: per group the flat buffer, or its parts.
        pieces: per server its slices.
    """
    views: list[list[memoryview]] = []
    for owned in pieces:
        own: list[memoryview] = []
        for piece in owned:
            array = arrays[piece.group]
            if isinstance(array, np.ndarray):
                own.append(array[piece.start : piece.stop].data.cast("B"))
            else:
                own += _views_of_parts(array, piece)
        views.append(own)
    return views


def _views_of_parts(parts: Sequence[Array], piece: Slice) -> list[memoryview]:
    views, start = [], 0
    for part in parts:
        own = part[max(0, piece.start - start) : max(0, piece.stop - start)]
        if own.size:
            views.append(own.data.cast("B"))
        start += part.size
    return views


def _other_groups(layout: Layout, arrays: object, what: str) -> ShapeError:
    names = sorted(group.name for group in layout.groups)
    got = sorted(arrays) if isinstance(arrays, Mapping) else type(arrays).__name__
    return ShapeError(
        f"{what} must have the groups {names}, got {got}; pass a dict with one flat array per group"
    )


def _other_array(group: GroupLayout, what: str, got: str) -> ShapeError:
    expected = f"{group.dtype}[{group.num_elements}]"
    return ShapeError(f"{what}[{group.name!r}] must be {expected}, got {got}")
