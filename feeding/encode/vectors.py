"""Vector encoding: lists and tuples of numbers to one contiguous array.

Covers: vectors, ragged vectors, nested rectangular lists.
Does not: decide which values are vectors (values).
Threads: any; pure.

Measured per row of 784 numbers (2-core EPYC, busy): `np.array(rows)` 11-15 µs, `np.fromiter` 11,
`array("d", row)` 11, `struct.pack_into` 5.4 for floats and int64 alike, `bytes(row)` 3.3. So ints
are tried as bytes first (0..255: pixels, one-hot, small counts), then as int64, then as floats; the
next chunk of the column begins with the code that worked last.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from feeding.columnar.builder import Collector, Values, describe, is_number, offsets_of
from feeding.columnar.chunk import Array
from feeding.columnar.schema import ColumnSpec, ValueKind

_BYTE = "B"
_INT = "q"
_FLOAT = "d"
_NEXT = {_BYTE: _INT, _INT: _FLOAT}
_MOST_EXACT = 1 << 53
"""From this float on, an int may have been another one."""


def encode_vectors(out: Collector, category: str, values: Values, name: str) -> None:
    """Add the column for rows that are lists or tuples of numbers, or nested lists of them.

    Args:
        out: collects the columns of the chunk.
        category: "list" or "tuple"; rows get it back.
        values: one per row, at least one.
        name: name of the column.

    Raises:
        RowError: an item is no number, or does not fit the column.
    """
    first = next((value for value in values if len(value)), ())
    kinds = set(map(type, first))
    if kinds == {list}:
        _nested(out, values, name)
        return
    dtype, flat = _flatten(out, values, name, kinds)
    lengths = set(map(len, values))
    value_kind = cast("ValueKind", category)
    if len(lengths) == 1:
        length = lengths.pop()
        spec = ColumnSpec(name, "tensor", value_kind, dtype, (length,))
        out.add(spec, flat.reshape(len(values), length))
    else:
        spec = ColumnSpec(name, "ragged", value_kind, dtype)
        out.add(spec, flat, offsets_of(values))


def _flatten(out: Collector, values: Values, name: str, kinds: set[type]) -> tuple[str, Array]:
    """Return the column's dtype and all numbers joined, [items]."""
    if kinds == {bool}:
        return "bool", _bools(out, values, name)
    if any(issubclass(kind, np.generic) for kind in kinds):
        return _numpy_numbers(out, values, name)
    code = out.number_codes.get(name) or (_FLOAT if float in kinds else _BYTE)
    while True:
        try:
            flat = _READERS[code](values)
        except (ValueError, OverflowError, TypeError, struct.error):
            kinds = _check_numbers(out, values, name)
            if code == _FLOAT:
                _check_held(out, values, name, "float64")
                raise
            if code == _INT and _are_ints(kinds):
                _check_held(out, values, name, "int64")
                return _numpy_numbers(out, values, name)  # numpy's bools, which struct refuses
            code = _NEXT[code]
            continue
        out.number_codes[name] = code
        check_ints(out, flat, values, name)
        return ("float64", flat) if code == _FLOAT else ("int64", _narrow(flat))


def check_ints(out: Collector, array: Array, values: Values, name: str, depth: int = 1) -> None:
    """Raise for an int among floats that was rounded.

    Args:
        out: makes the error.
        array: all numbers.
        values: one per row, as they came; read only where a number is that large.
        name: name of the column.
        depth: lists around each number of a row.

    Raises:
        RowError: an int is not equal to its float.
    """
    # numpy makes float16 and float32 only of ints that they hold.
    if array.dtype != np.float64 or not (is_large := np.abs(array) >= _MOST_EXACT).any():
        return
    items = _items(values, depth)
    for place in np.flatnonzero(is_large).tolist():
        item = items[place]
        if type(item) is float or not isinstance(item, int | np.integer):
            continue
        if int(float(item)) != int(item):
            ends = itertools.accumulate(len(_items([value], depth)) for value in values)
            row = next(row for row, end in enumerate(ends) if place < end)
            text = f"{item} is an int among floats, which would round it: give an id a column of "
            text += "its own, as in (id, [floats]); write float(n) where rounding is right"
            raise out.refuse(name, row, text)


def _read_bytes(values: Values) -> Array:
    return np.frombuffer(b"".join(map(bytes, values)), np.uint8)


def _reader(code: str) -> Callable[[Values], Array]:
    def read(values: Values) -> Array:
        flat = np.empty(sum(map(len, values)), code)
        if not flat.size:
            return flat
        memory = memoryview(flat.data).cast("B")
        at = 0
        for value in values:
            packer = _struct(len(value), code)
            packer.pack_into(memory, at, *value)
            at += packer.size
        return flat

    return read


@functools.lru_cache(maxsize=1024)
def _struct(length: int, code: str) -> struct.Struct:
    return struct.Struct(f"{length}{code}")


_READERS: dict[str, Callable[[Values], Array]] = {
    _BYTE: _read_bytes,
    _INT: _reader(_INT),
    _FLOAT: _reader(_FLOAT),
}


def _narrow(flat: Array) -> Array:
    """Return the ints in the narrowest of uint8, int16, int32, int64 that holds them."""
    if flat.dtype == np.uint8 or not flat.size:
        return flat.astype(np.uint8, copy=False)
    low, high = int(flat.min()), int(flat.max())
    for dtype in (np.uint8, np.int16, np.int32):
        info = np.iinfo(dtype)
        if info.min <= low and high <= info.max:
            return flat.astype(dtype)
    return flat


def _bools(out: Collector, values: Values, name: str) -> Array:
    for row, value in enumerate(values):
        if set(map(type, value)) - {bool}:
            odd = next(item for item in value if type(item) is not bool)
            text = f"{describe(odd)}, but earlier rows hold only bool"
            raise out.refuse(name, row, text)
    return np.frombuffer(b"".join(map(bytes, values)), np.bool_)


def _numpy_numbers(out: Collector, values: Values, name: str) -> tuple[str, Array]:
    kinds = _check_numbers(out, values, name)
    numbers = list(itertools.chain.from_iterable(values))
    flat = np.array(numbers)
    if flat.dtype.kind in "fO" and (dtype := _dtype_for(flat, kinds)):
        _check_held(out, values, name, dtype)
        flat = np.array(numbers, dtype)
    check_ints(out, flat, values, name)
    return flat.dtype.name, flat


def _nested(out: Collector, values: Values, name: str) -> None:
    shape: tuple[int, ...] | None = None
    for row, value in enumerate(values):
        try:
            found = np.shape(value)
        except ValueError:
            raise out.refuse(name, row, "nested lists of differing lengths") from None
        if shape is not None and found != shape:
            text = f"nested lists of shape {found}, but earlier rows have {shape}"
            raise out.refuse(name, row, text)
        shape = found
    stacked = np.array(values)
    if stacked.size and _may_differ(stacked, _items(values[0], stacked.ndim - 2)):
        rows = [_items(value, stacked.ndim - 2) for value in values]
        if dtype := _dtype_for(stacked, _check_numbers(out, rows, name)):
            _check_held(out, rows, name, dtype)
            stacked = np.array(values, dtype)
    check_ints(out, stacked, values, name, stacked.ndim - 1)
    spec = ColumnSpec(name, "tensor", "list", stacked.dtype.name, stacked.shape[1:])
    out.add(spec, _narrow(stacked) if stacked.dtype == np.int64 else stacked)


def _may_differ(stacked: Array, first: Values) -> bool:
    """Return whether numpy may have turned numbers into others, or found what is no number.

    first: numbers of the first row.
    """
    if stacked.dtype.kind not in "biuf":
        return True
    if stacked.dtype.kind == "u":
        return bool(stacked.max() >= 2**63)
    return stacked.dtype.kind == "f" and _are_ints(set(map(type, first)))


def _items(value: Values, depth: int) -> Values:
    """Return the numbers of lists that are nested so deep, in order."""
    for _ in range(depth):
        value = list(itertools.chain.from_iterable(value))
    return value


def _check_numbers(out: Collector, values: Values, name: str) -> set[type]:
    """Return the types of all numbers; raise for the first value that is no number."""
    kinds = set(map(type, itertools.chain.from_iterable(values)))
    if all(map(is_number, kinds)):
        return kinds
    for row, value in enumerate(values):
        for position, item in enumerate(value):
            if not is_number(type(item)):
                text = f"value {position} is {describe(item)}; a vector holds numbers only"
                raise out.refuse(name, row, text)
    return kinds


def _are_ints(kinds: set[type]) -> bool:
    """Return whether all are types of ints or bools."""
    return all(issubclass(kind, int | np.integer | np.bool_) for kind in kinds)


def _dtype_for(array: Array, kinds: set[type]) -> str:
    """Return what numbers become that numpy has made `array` of; empty: they stay as they are."""
    if _are_ints(kinds):  # such as numpy's uint64 beside others
        return "int64"
    return "float64" if array.dtype.kind == "O" else ""  # an int of more than 64 bits beside floats


def _check_held(out: Collector, values: Values, name: str, dtype: str) -> None:
    """Raise for the first number that "int64" or "float64" does not hold."""
    for row, value in enumerate(values):
        for position, item in enumerate(value):
            if not is_held(item, dtype):
                raise out.refuse(name, row, f"value {position} ({item}) does not fit {dtype}")


def is_held(number: Any, dtype: str) -> bool:
    """Return whether "int64" holds an int, or "float64" any number, however rounded.

    Args:
        number: of Python or numpy.
        dtype: "int64" or "float64".
    """
    if dtype == "int64":
        return -(2**63) <= int(number) < 2**63
    try:
        float(number)
    except OverflowError:
        return False
    return True
