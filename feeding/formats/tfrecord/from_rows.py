"""tf.Example encoder for single rows.

Covers: encode_example.
Does not: write files (framing.RecordWriter), encode whole columns (from_arrow).
Threads: any; pure.

Keys are written in sorted order, so equal rows give equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from feeding.columnar.chunk import Array
from feeding.errors import RowError
from feeding.formats.tfrecord.write_kernels import pack_varints

_VARINT_BYTES = 10
_LENGTH_DELIMITED = 2
_WITH_BUFFERS = frozenset([bytearray, memoryview, list, tuple])
"""Types whose values are buffers or may have some. Spark 4.0's bytes are bytearrays."""


def encode_example(row: Mapping[str, Any]) -> bytes:
    """Return the tf.Example of one row.

    Args:
        row: by feature name: numbers, bytes, text (as UTF-8), or arrays and sequences of these, of
            any shape (row-major). Floats become float32, integers and bools int64. None and empty
            lists are left out.

    Raises:
        RowError: names the feature whose value fits none of the three lists.
    """
    entries = []
    for name in sorted(row):
        if row[name] is not None:
            feature = _field(1, name.encode()) + _field(2, _feature(name, row[name]))
            entries.append(_field(1, feature))
    return _field(1, b"".join(entries))


def _feature(name: str, value: Any) -> bytes:
    value = _with_bytes(value)
    if isinstance(value, bytes | str):
        return _field(1, _field(1, _as_bytes(value)))
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise RowError(f"feature {name!r} holds lists of differing lengths: {error}") from None
    if not array.size and not isinstance(value, np.ndarray):
        return b""  # an empty list without a type
    if array.dtype.kind == "f":
        if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
            raise RowError(
                f"feature {name!r} holds integers beyond int64, which no tf.Example takes"
            )
        return _field(2, _field(1, np.ascontiguousarray(array, "<f4").tobytes()))
    if array.dtype.kind in "biu":
        return _field(3, _field(1, _varints(name, array)))
    items = np.asarray(value, object).ravel()  # as objects, a 1 beside b"1" is still a number
    if array.dtype.kind in "SUO" and all(isinstance(item, bytes | str) for item in items):
        return _field(1, b"".join(_field(1, _as_bytes(item)) for item in items))
    raise RowError(
        f"feature {name!r} holds a {type(value).__name__} of {array.dtype}; a tf.Example takes "
        "numbers, bytes, text, and arrays of these"
    )


def _with_bytes(value: Any) -> Any:
    """Return the value with bytes instead of buffers, which numpy takes for arrays of numbers."""
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    # Behind a number numpy refuses a buffer itself, so lists of numbers are not searched.
    if not isinstance(value, list | tuple) or not value or isinstance(value[0], int | float):
        return value
    if _WITH_BUFFERS.isdisjoint(map(type, value)):
        return value
    return [_with_bytes(item) for item in value]


def _varints(name: str, array: Array) -> bytes:
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise RowError(f"feature {name!r} holds {array.max()}, a tf.Example takes int64")
    out = np.empty(array.size * _VARINT_BYTES, np.uint8)
    return out[: pack_varints(array.astype(np.int64).ravel(), out)].tobytes()


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _LENGTH_DELIMITED]) + _length(len(content)) + content


def _length(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
