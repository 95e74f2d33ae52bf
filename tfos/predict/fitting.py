"""Values as a model's input: one rule for what a fit trains on and what a prediction gets.

Covers: which column is which input or output, dtypes, what does not fit, shapes, several columns
as one matrix.
Does not: read columns (tfos.predict.tensors, tfos.keras.data.columns), or raise for a value:
callers know where it comes from.
Threads: any; pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfos.errors import SettingsError
from tfos.predict.signature import TensorInfo

Array = np.ndarray[Any, Any]

MOST_EXACT = 1 << 53
"""Above it, two integers can share one double."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why values do not fit an input."""

    text: str
    place: int = 0
    """Position of the first value that does not fit, along the first dimension."""


def fitted(values: Array, name: str, info: TensorInfo) -> Array | Misfit:
    """Return values in an input's dtype; floats may be rounded, integers may not change.

    A finite number that would become infinite does not fit. Neither does an integer for an input of
    floats, if it shares one double with another integer. Ids of int64 and uint64 are the same 64
    bits.

    Args:
        values: [rows, ...], or the items of ragged rows.
        name: name of the input, for the text.
        info: dtype and shape of the input.
    """
    if (values.dtype == object) != (info.dtype == "object"):
        kind = "text" if values.dtype == object else values.dtype
        return Misfit(f"{kind} does not fit input {name!r}, {info}; cast the column")
    if info.is_id and values.dtype.kind == "f":
        text = f"{values.dtype} numbers, but input {name!r}, {info}, uses them as ids"
        return Misfit(f"{text}: make a long column from the original ids")
    if values.dtype == object or values.dtype.name == info.dtype:
        return values
    if info.is_id and is_wide(values) and info.dtype in ("int64", "uint64"):
        return values.astype(info.dtype)  # the same bits, as tables have them
    try:
        # The processor flags an overflow, so the common case needs no pass over the values.
        with np.errstate(invalid="ignore", over="raise"):
            found = values.astype(info.dtype)
        # The cast to bfloat16 flags nothing just above its range.
        if found.dtype.kind not in "iub" and not is_wide(values) and info.dtype != "bfloat16":
            return found
    except FloatingPointError:
        with np.errstate(invalid="ignore", over="ignore"):
            found = values.astype(info.dtype)
    changed, next_step = _changed(values, found)
    if not changed.any():
        return found
    item = int(np.argmax(changed.reshape(-1)))
    text = f"value {values.reshape(-1)[item]} does not fit input {name!r}, {info}; {next_step}"
    return Misfit(text, item * len(values) // values.size)


def _changed(values: Array, found: Array) -> tuple[Array, str]:
    """Return which values change in another dtype, and what to do.

    Args:
        values: the original values.
        found: the same values, in the dtype of an input.
    """
    if found.dtype.kind not in "iub" and is_wide(values):
        shared = (values > MOST_EXACT) | (values < -MOST_EXACT)
        if shared.any():
            return shared, (
                "integers of this size share one double, such as ids and times in nanoseconds: "
                "declare keras.Input(dtype='int64'), or make the column's numbers smaller"
            )
    if found.dtype.kind not in "iub":
        infinite = np.isinf(found) & np.isfinite(values)
        return infinite, f"no number of {found.dtype} is that large: scale the column"
    changed, next_step = found != values, "cast the column"
    if values.dtype.kind == "f" and not changed.any():
        # From this size on, two integers share one float: the column may have been rounded before.
        changed = np.abs(values) >= 2.0 ** (np.finfo(values.dtype).nmant + 1)
        next_step = f"{values.dtype} rounds integers of this size: make a long column from them"
    return changed, next_step


def is_wide(values: Array) -> bool:
    """Return whether two integers of this dtype can share one double.

    Args:
        values: array of any dtype.
    """
    return values.dtype.kind in "iu" and values.dtype.itemsize == 8


def in_order(
    role: str, columns: Sequence[str], what: str, tensors: Sequence[str], more: str = ""
) -> tuple[str, ...]:
    """Return columns in the model's order: by name if they have all of its names, else by position.

    If the numbers of columns and tensors differ, return them as they are; callers report it.

    Args:
        role: what the caller calls the columns, for the error.
        columns: the columns that the caller named.
        what: "input" or "output", for the error.
        tensors: names of the inputs or outputs, in the model's own order.
        more: another remedy, for the error.

    Raises:
        SettingsError: by position, a column would fill one tensor but has the name of another, in
            any case of letters, which another column would fill.
    """
    if len(columns) != len(tensors):
        return tuple(columns)
    if set(columns) == set(tensors):
        return tuple(tensors)
    for column, tensor in zip(columns, tensors, strict=True):
        if _is_of_other(column, columns, tensors):
            raise SettingsError(
                f"{role}={list(columns)}: by position, column {column!r} would be the {what} "
                f"{tensor!r}, but the model has another {what} of that name. The model's order is "
                f"{list(tensors)}; for a dict, it is the sorted keys. Name the columns in this "
                f"order, or rename {column!r}{more}"
            )
    return tuple(columns)


def _is_of_other(column: str, columns: Sequence[str], tensors: Sequence[str]) -> bool:
    """Say whether a column has the name of a tensor that a column of another name would fill."""
    if column in tensors:
        return columns[tensors.index(column)] != column
    folded = [each.casefold() for each in tensors]  # to Spark, `Item` and `item` are one name
    name = column.casefold()
    return name in folded and columns[folded.index(name)].casefold() != name


def check_columns(what: str, count: int, *, is_ragged: bool) -> None:
    """Refuse several columns if rows are lists of any length.

    Args:
        what: the input, for the text.
        count: columns that fill it.
        is_ragged: whether its rows are such lists.

    Raises:
        SettingsError: rows are such lists, and there are several columns.
    """
    if count > 1 and is_ragged:
        raise SettingsError(
            f"{count} columns are given for {what}, whose rows are lists of any length. Make one "
            "column: F.array(a, b) of numbers or text, F.concat(a, b) of lists"
        )


def in_shape(values: Array, shape: Sequence[int | None]) -> Array | None:
    """Return rows in an input's shape, as a view; None: they do not fit it.

    Args:
        values: [rows, ...].
        shape: shape of the input without the rows; None: any length.
    """
    if values.ndim == len(shape) + 1:
        sides = zip(values.shape[1:], shape, strict=True)
        if all(wanted in (None, side) for side, wanted in sides):
            return values
    else:
        sizes = [-1 if each is None else each for each in shape]
        with contextlib.suppress(ValueError):  # other sizes, or two lengths that are not known
            return values.reshape(len(values), *sizes)
    return None


def side_by_side(parts: Sequence[Array]) -> Array:
    """Return columns of numbers and arrays as one matrix.

    Args:
        parts: [rows, ...] each.

    Returns:
        [rows, all their values].
    """
    return np.column_stack([part.reshape(len(part), -1) for part in parts])
