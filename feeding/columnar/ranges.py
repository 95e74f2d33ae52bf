"""Ranges of dtypes: which numbers another dtype does not hold.

Covers: unheld, misfits, rounded.
Does not: decide which kinds of numbers may become which (receiver.batch_reader, arrow.results).
Threads: any; pure.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from feeding.columnar.chunk import Array


def unheld(values: Array, dtype: np.dtype[Any]) -> tuple[float, float] | None:
    """Return the least and the greatest number that a column does not hold; None: it holds all.

    A float column may round floats, but no int: ints may be ids, of which none may become another.

    Args:
        values: array of any shape; bools fit any column.
        dtype: that of the column; a float one where the values are floats.
    """
    is_exact = (
        values.dtype.kind in "iu"
        and dtype.kind == "f"
        and 8 * values.dtype.itemsize > np.finfo(dtype).nmant + 1  # shorter ints are never rounded
    )
    return rounded(values, dtype) if is_exact else misfits(values, dtype)


def misfits(values: Array, dtype: np.dtype[Any]) -> tuple[float, float] | None:
    """Return the least and the greatest of numbers that a dtype does not hold; None: it holds them.

    A float dtype holds any number that does not become infinite: rounded.

    Args:
        values: array of any shape; bools fit any dtype.
        dtype: int or float; of floats, float.
    """
    limits = _limits(values.dtype, dtype)
    if limits is None:
        return None
    if values.dtype.kind == "f":
        values = values[np.isfinite(values)]
    if not values.size:
        return None
    low, high = values.min().item(), values.max().item()
    return (low, high) if low < limits[0] or high > limits[1] else None


def rounded(values: Array, dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """Return the least and the greatest of ints that a float dtype changes; None: it changes none.

    Args:
        values: ints of any shape.
        dtype: float16, float32 or float64.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what is above all ints becomes any int
        cast = values.astype(dtype)
        changed = (cast.astype(values.dtype) != values) | np.isinf(cast)
        odd = values[changed | (cast >= float(np.iinfo(values.dtype).max + 1))]
    return (int(odd.min()), int(odd.max())) if odd.size else None


@functools.cache
def _limits(source: np.dtype[Any], target: np.dtype[Any]) -> tuple[float, float] | None:
    """Return the least and the greatest number that the target holds; None: all of the source."""
    if source == target or source.kind == "b":
        return None
    if target.kind != "f":
        least, most = _span(target)
    else:
        # Half of the last bit above the greatest number still rounds to it.
        most = _span(target)[1] * (1 + float(np.finfo(target).eps) / 4)
        least = -most
    low, high = _span(source)
    return None if least <= low and high <= most else (least, most)


def _span(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the least and the greatest number of a dtype."""
    if dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
