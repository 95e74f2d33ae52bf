"""Rows → tf.Example records, and what the records of a data set look like.

Covers: encode_example; infer_features from a sample.
Does not: write files (tfrecord.RecordWriter), decode columns (example).      Pure.

Keys are written in sorted order, so equal rows give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from feeding import example_kernels as kernels
from feeding.chunk import Array
from feeding.errors import DataError, RowError
from feeding.example import Feature, packed_names

_VARINT_BYTES = 10
_LENGTH_DELIMITED = 2
_KINDS = {1: "bytes", 2: "float32", 3: "int64"}


def encode_example(row: Mapping[str, Any]) -> bytes:
    """Return the tf.Example of one row.

    Args:
        row: by feature name: numbers, bytes, text (as UTF-8), or arrays and sequences of these, any
            shape (row-major). Floats travel as float32, integers and bools as int64. None and
            empty lists are left out.

    Raises:
        RowError: names the feature whose value fits none of the three lists.
    """
    entries = []
    for name in sorted(row):
        if row[name] is not None:
            feature = _field(1, name.encode()) + _field(2, _feature(name, row[name]))
            entries.append(_field(1, feature))
    return _field(1, b"".join(entries))


def infer_features(records: Iterable[bytes]) -> dict[str, Feature]:
    """Return the features of a sample of records, by name in sorted order.

    A feature that has the same number of values in every record becomes a tensor: of shape () for
    one value, (n,) for n. Any other becomes one of any length (shape None), as do features that
    some records lack.

    Raises:
        DataError: a record is no tf.Example, or a feature has lists of different kinds.
    """
    sample = list(records)
    names = sorted(
        {name for number, record in enumerate(sample) for name in _names(record, number)}
    )
    if not names:
        return {}
    ends = np.cumsum(list(map(len, sample)))
    starts, lengths = ends - list(map(len, sample)), np.diff(ends, prepend=0)
    buffer = np.frombuffer(b"".join(sample), np.uint8)
    spans = np.empty((2, len(names), len(sample)), np.int64)
    kernels.locate(buffer, starts, lengths, packed_names(names), spans)
    found = {name: _found(buffer, name, spans[:, index]) for index, name in enumerate(names)}
    return {name: feature for name, feature in found.items() if feature is not None}


def _found(buffer: Array, name: str, spans: Array) -> Feature | None:
    counts = np.empty(spans.shape[1], np.int64)
    for kind, dtype in _KINDS.items():
        record, fault = kernels.count_values(buffer, spans, kind, counts)
        if fault == kernels.MALFORMED:
            raise DataError(f"record {record}: feature {name!r} is no tf.train.Feature")
        if fault == kernels.OK:
            is_set = counts >= 0
            return Feature(dtype, _shape(counts)) if is_set.any() else None
    raise DataError(f"feature {name!r} is a list of different kinds in different records")


def _shape(counts: Array) -> tuple[int, ...] | None:
    first = int(counts[0])
    if first < 0 or (counts != first).any():
        return None
    return () if first == 1 else (first,)


def _feature(name: str, value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview | str):
        return _field(1, _field(1, _as_bytes(value)))
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise RowError(f"feature {name!r} holds lists of differing lengths: {error}") from None
    if not array.size and not isinstance(value, np.ndarray):
        return b""  # an empty list of nobody knows what
    if array.dtype.kind == "f":
        return _field(2, _field(1, np.ascontiguousarray(array, "<f4").tobytes()))
    if array.dtype.kind in "biu":
        return _field(3, _field(1, _varints(name, array)))
    items = np.asarray(value, object).ravel()  # where 1 beside b"1" is still a number
    if array.dtype.kind in "SUO" and all(isinstance(item, bytes | str) for item in items):
        return _field(1, b"".join(_field(1, _as_bytes(item)) for item in items))
    raise RowError(
        f"feature {name!r} holds a {type(value).__name__} of {array.dtype}; a tf.Example takes "
        "numbers, bytes, text, and arrays of these"
    )


def _varints(name: str, array: Array) -> bytes:
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise RowError(f"feature {name!r} holds {array.max()}, a tf.Example takes int64")
    out = np.empty(array.size * _VARINT_BYTES, np.uint8)
    return out[: kernels.pack_varints(array.astype(np.int64).ravel(), out)].tobytes()


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


def _names(record: bytes, number: int) -> Iterator[str]:
    try:
        for features in _contents(record, 1):
            for entry in _contents(features, 1):
                yield b"".join(_contents(entry, 1)).decode()
    except (ValueError, IndexError) as error:
        raise DataError(f"record {number} is no tf.Example: {error}") from None


def _contents(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the contents of a message's length-delimited fields of one number."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        if tag & 7 != _LENGTH_DELIMITED:
            at = _after_scalar(message, at, tag & 7)
            continue
        length, at = _read_varint(message, at)
        if length > len(message) - at:
            raise ValueError(f"a field of {length} bytes, {len(message) - at} are left")
        if tag >> 3 == number:
            yield message[at : at + length]
        at += length


def _after_scalar(message: bytes, at: int, kind: int) -> int:
    if kind == 0:
        return _read_varint(message, at)[1]
    if kind not in (1, 5):
        raise ValueError(f"a field of type {kind}")
    return at + (8 if kind == 1 else 4)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for _ in range(_VARINT_BYTES):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("a varint of more than 10 bytes")
