"""Ids of a table, checked and converted to the 64 bits of the wire. Pure; numpy alone.

Covers: which arrays are valid ids, the mapping of uint64, the messages of IdError.
Does not: hash or deduplicate (ps.tables.routing).      Threads: none.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ps.errors import IdError

Array = np.ndarray[Any, Any]


class IdRange(Protocol):
    """The ids that a table accepts: a TableSpec, or the record of an exported table."""

    @property
    def name(self) -> str:
        """The table's name, for messages."""

    @property
    def id_kind(self) -> str:
        """int64 or uint64."""

    @property
    def max_id(self) -> int | None:
        """The largest id, if the table names one."""

    @property
    def largest_id(self) -> int:
        """The largest id in any case."""


MAX_IDS = 1 << 24
"""Ids of one table in one request: 128 MiB of them."""


def as_bits(spec: IdRange, ids: ArrayLike) -> Array:
    """Return ids as int64 in the same shape; of a table of uint64 ids the same bits.

    No id is rounded, wrapped or truncated: a value that is no integer of the table's range is
    refused.

    Args:
        spec: the table.
        ids: integers of any shape.

    Raises:
        IdError: not integers (also floats without fraction, and bools), or one out of range; the
            message names table, value and position in the flattened array.
    """
    array = _as_array(spec, ids)
    if array.dtype == object:
        return _bits_of_objects(spec, array)
    if array.dtype.kind not in "iu":
        raise _not_integers(spec, array)
    _check_range(spec, array)
    return array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64, copy=False)


def check_one_request(spec: IdRange, bits: Array) -> None:
    """Refuse ids that one request does not bring.

    Args:
        spec: the table.
        bits: the ids as int64, any shape.
    """
    if bits.size > MAX_IDS:
        raise IdError(
            f"table {spec.name!r}: {bits.size} ids in one call, the limit is {MAX_IDS}; call more "
            "often with fewer, such as smaller batches",
            {"table": spec.name},
        )


def from_bits(spec: IdRange, bits: Array) -> Array:
    """Return ids as users see them: int64 or uint64, in the same shape.

    Args:
        spec: the table.
        bits: ids as int64, any shape.
    """
    return bits.view(np.uint64) if spec.id_kind == "uint64" else bits


def _as_array(spec: IdRange, ids: ArrayLike) -> Array:
    if isinstance(ids, np.ndarray):
        return ids
    try:
        array = np.asarray(ids)
        if array.dtype.kind == "f":  # numpy rounds lists of integers on both sides of 2^63
            array = np.array(ids, object)
    except ValueError as error:
        raise IdError(f"table {spec.name!r}: ids need one shape: {error}") from error
    return array if array.size else array.astype(np.int64)


def _bits_of_objects(spec: IdRange, array: Array) -> Array:
    """Convert Python's integers, which may exceed numpy's range."""
    values = array.reshape(-1).tolist()
    for place, value in enumerate(values):
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise _not_integers(spec, array, place)
        if not 0 <= value <= spec.largest_id:
            raise _out_of_range(spec, int(value), place)
    return np.array(values, np.uint64).view(np.int64).reshape(array.shape)


def shown(spec: IdRange, bits: np.int64) -> int:
    """Return one id as users see it, for a message.

    Args:
        spec: the table.
        bits: the id as int64.
    """
    return int(bits) % 2**64 if spec.id_kind == "uint64" else int(bits)


def repeated(spec: IdRange, bits: np.int64) -> IdError:
    """Return the refusal of a push that holds an id twice.

    Args:
        spec: the table.
        bits: the id as int64.
    """
    number = shown(spec, bits)
    return IdError(
        f"table {spec.name!r}: id {number} occurs twice in one push; sum the gradients of equal "
        "ids first, as ps.client.tables does",
        {"table": spec.name, "id": str(number)},
    )


def _check_range(spec: IdRange, array: Array) -> None:
    if not array.size:
        return
    # Compared as Python integers: numpy would wrap or round where dtypes differ.
    if int(array.min()) >= 0 and int(array.max()) <= spec.largest_id:
        return
    flat = array.ravel()
    if flat.dtype == np.uint64:
        outside = flat > np.uint64(spec.largest_id)
    else:
        outside = (flat < 0) | (flat > min(spec.largest_id, int(np.iinfo(flat.dtype).max)))
    place = int(np.argmax(outside))
    raise _out_of_range(spec, int(flat[place]), place)


def _out_of_range(spec: IdRange, value: int, place: int) -> IdError:
    hint = ""
    if spec.id_kind == "int64" and spec.max_id is None:
        is_bits = -(1 << 63) <= value < 0
        bits = f", such as {value % 2**64} whose bits these are," if is_bits else ""
        hint = f"; for hashes of 64 bits{bits} declare the table with id_kind='uint64'"
    return IdError(
        f"table {spec.name!r} takes {spec.id_kind} ids 0..{spec.largest_id}, got {value} at "
        f"position {place}{hint}",
        {"table": spec.name, "id": str(value), "position": str(place)},
    )


def _not_integers(spec: IdRange, array: Array, place: int = 0) -> IdError:
    shown = f"{array.reshape(-1)[place]!r} at position {place}" if array.size else "none"
    return IdError(
        f"table {spec.name!r} takes {spec.id_kind} ids, got {shown} in {array.dtype}"
        f"{list(array.shape)}; convert them to integers yourself, so that nothing is rounded in "
        "silence",
        {"table": spec.name, "dtype": str(array.dtype), "position": str(place)},
    )
