"""Digest of a group's rows: shows whether a group has changed since it was trained.

Covers: Arrow tables of any type; the order of rows does not count, since Spark promises none.
Does not: resist a deliberate search for two tables with one digest.
Runs in: Spark's tasks, beside the packing of a group.      Threads: any; pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy
import pyarrow

from ps.sorted_rows.order import hashed as hashed_integers

Array = numpy.ndarray[Any, Any]

_FACTOR = numpy.uint64(0x9E3779B97F4A7C15)
"""Odd, so that no column's hash is lost; a value's hash depends on its column's position."""
_UNSIGNED = {8: pyarrow.uint8(), 16: pyarrow.uint16(), 32: pyarrow.uint32(), 64: pyarrow.uint64()}


def rows_digest(table: pyarrow.Table) -> str:
    """Return a digest: equal for the same rows in any order.

    Columns count by name, type and position; values by their bits. Repeated rows count each time.

    Args:
        table: rows of one group.
    """
    rows = numpy.zeros(table.num_rows, numpy.uint64)
    for column in table.columns:
        found = [_hashed(chunk) for chunk in column.chunks]
        rows = rows * _FACTOR + (numpy.concatenate(found) if found else rows)
    types = [(field.name, str(field.type)) for field in table.schema]
    total = int(hashed_integers(rows).sum(dtype=numpy.uint64))
    return hashlib.sha256(repr((types, table.num_rows, total)).encode()).hexdigest()


def _hashed(array: pyarrow.Array) -> Array:
    """Return a hash of each value, also of nulls; [n] uint64."""
    values = hashed_integers(_integers(array))
    is_there: Array = array.is_valid().to_numpy(zero_copy_only=False)
    return values * _FACTOR + is_there


def _integers(array: pyarrow.Array) -> Array:
    """Return an integer per value: the bits of a number or a time, else a hash."""
    if pyarrow.types.is_boolean(array.type):
        array = array.cast(pyarrow.uint8())
    if pyarrow.types.is_primitive(array.type) and array.type.bit_width in _UNSIGNED:
        bits: Array = array.view(_UNSIGNED[array.type.bit_width]).fill_null(0).to_numpy()
        return bits.astype(numpy.int64)
    if pyarrow.types.is_string(array.type) or pyarrow.types.is_binary(array.type):
        different = array.cast(pyarrow.large_binary()).fill_null(b"").dictionary_encode()
        places: Array = different.indices.to_numpy()
        return _of_bytes(different.dictionary.to_pylist())[places]
    return _of_bytes(repr(value).encode() for value in array.to_pylist())


def _of_bytes(values: Iterable[bytes]) -> Array:
    digests = b"".join(hashlib.blake2b(value, digest_size=8).digest() for value in values)
    return numpy.frombuffer(digests, numpy.int64)
