"""Feature inference: the features of a sample of tf.Example records; and one record as a dict.

Covers: survey, infer_features, decode_example.
Does not: decode columns (example, to_arrow), choose or read files (source).
Threads: any; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from feeding.columnar.chunk import Array
from feeding.errors import DataError
from feeding.formats.tfrecord import example_kernels as kernels
from feeding.formats.tfrecord.example import BYTES, FLOATS, INTS, Feature, numbers_of, packed_names
from feeding.formats.tfrecord.records import RecordDamage

Kind = Literal["bytes", "float32", "int64"]
_KINDS: dict[int, Kind] = {BYTES: "bytes", FLOATS: "float32", INTS: "int64"}
_VARINT_BYTES = 10
_LENGTH_DELIMITED = 2


@dataclass(frozen=True, slots=True)
class FeatureSurvey:
    """The feature of one name in a sample of records."""

    kind: Kind
    """dtype of its list."""
    least: int
    """Fewest values in one record, of those that have the feature."""
    most: int
    """Most values in one record."""
    is_everywhere: bool
    """Whether every record has it."""
    is_text: bool
    """Whether it is a bytes list and every value in it is UTF-8."""

    def merged(self, other: FeatureSurvey) -> FeatureSurvey:
        """Return the survey of both samples together; their kinds must be the same."""
        return FeatureSurvey(
            self.kind,
            min(self.least, other.least),
            max(self.most, other.most),
            self.is_everywhere and other.is_everywhere,
            self.is_text and other.is_text,
        )


def survey(records: Iterable[bytes]) -> dict[str, FeatureSurvey]:
    """Return the features of a sample of records, by name in sorted order.

    Features that are empty in every record (no list of any kind) are left out.

    Raises:
        DataError: a record is not a tf.Example, or a feature has lists of different kinds.
    """
    sample = list(records)
    names = sorted(
        {name for number, record in enumerate(sample) for name in _names(record, number)}
    )
    if not names:
        return {}
    ends = np.cumsum(list(map(len, sample)))
    starts, lengths = ends - list(map(len, sample)), np.diff(ends, prepend=0)
    buffer = _buffer(b"".join(sample))
    spans = np.empty((len(names), 2, len(sample)), np.int64)
    _locate(buffer, starts, lengths, names, spans)
    found = {name: _found(buffer, name, spans[index]) for index, name in enumerate(names)}
    return {name: feature for name, feature in found.items() if feature is not None}


def infer_features(records: Iterable[bytes]) -> dict[str, Feature]:
    """Return the features of a sample of records, by name in sorted order.

    A feature with the same number of values in every record becomes a tensor: of shape () for one
    value, (n,) for n. Any other feature, also one that some records lack, becomes ragged (shape
    None).

    Raises:
        DataError: a record is not a tf.Example, or a feature has lists of different kinds.
    """
    return {name: Feature(seen.kind, _shape(seen)) for name, seen in survey(records).items()}


def decode_example(record: bytes) -> dict[str, list[Any]]:
    """Return one record's values by feature name in sorted order; features without a list are [].

    Floats are Python floats that a float32 can hold, byte values are bytes.

    Raises:
        DataError: it is not a tf.Example.
    """
    names = sorted(set(_names(record, 0)))
    buffer = _buffer(record)
    spans = np.empty((len(names), 2, 1), np.int64)
    if names:
        whole = np.array([0]), np.array([len(record)])
        _locate(buffer, *whole, names, spans)
    return {name: _values(buffer, name, spans[index]) for index, name in enumerate(names)}


def _buffer(data: bytes) -> Array:
    """Return a writable copy: numba would compile each kernel again for read-only bytes."""
    return np.frombuffer(bytearray(data), np.uint8)


def _locate(
    buffer: Array, starts: Array, lengths: Array, names: Sequence[str], spans: Array
) -> None:
    record = kernels.locate(buffer, starts, lengths, packed_names(names), spans)
    if record >= 0:
        raise DataError(f"record {record} is not a tf.Example: a field is truncated")


def _found(buffer: Array, name: str, spans: Array) -> FeatureSurvey | None:
    kind, counts = _counted(buffer, name, spans)
    has = counts >= 0
    if not has.any():
        return None
    is_text = kind == BYTES and _are_utf8(_byte_values(buffer, spans, counts))
    least, most = int(counts[has].min()), int(counts.max())
    return FeatureSurvey(_KINDS[kind], least, most, bool(has.all()), is_text)


def _counted(buffer: Array, name: str, spans: Array) -> tuple[int, Array]:
    """Return the kind of a feature's lists, and the values of each record, int64[n] (-1: none)."""
    counts = np.empty(spans.shape[1], np.int64)
    for kind in _KINDS:
        record, fault = kernels.count_values(buffer, spans, kind, counts)
        if fault == kernels.MALFORMED:
            raise DataError(f"record {record}: feature {name!r} is not a tf.train.Feature")
        if fault == kernels.OK:
            return kind, counts
    raise DataError(f"feature {name!r} is a list of different kinds in different records")


def _values(buffer: Array, name: str, spans: Array) -> list[Any]:
    kind, counts = _counted(buffer, name, spans)
    if counts[0] <= 0:
        return []
    if kind == BYTES:
        return _byte_values(buffer, spans, counts)
    try:
        numbers = numbers_of(buffer, name, kind, spans, np.array([0, counts[0]]))
    except RecordDamage as damage:
        raise DataError(f"the record: {damage}") from None
    return list(numbers.tolist())


def _byte_values(buffer: Array, spans: Array, counts: Array) -> list[bytes]:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.maximum(counts, 0), out=offsets[1:])
    places = np.empty((2, offsets[-1]), np.int64)
    kernels.find_bytes(buffer, spans, offsets, places)
    return [buffer[start:stop].tobytes() for start, stop in places.T.tolist()]


def _are_utf8(values: Sequence[bytes]) -> bool:
    try:
        for value in values:
            value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shape(seen: FeatureSurvey) -> tuple[int, ...] | None:
    if not seen.is_everywhere or seen.least != seen.most:
        return None
    return () if seen.most == 1 else (seen.most,)


def _names(record: bytes, number: int) -> Iterator[str]:
    try:
        for features in _contents(record):
            for entry in _contents(features):
                yield b"".join(_contents(entry)).decode()
    except (ValueError, IndexError) as error:
        raise DataError(f"record {number} is not a tf.Example: {error}") from None


def _contents(message: bytes) -> Iterator[bytes]:
    """Yield the contents of a message's length-delimited fields of number 1."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        if tag & 7 != _LENGTH_DELIMITED:
            at = _after_scalar(message, at, tag & 7)
            continue
        length, at = _read_varint(message, at)
        if length > len(message) - at:
            raise ValueError(f"a field of {length} bytes, {len(message) - at} are left")
        if tag >> 3 == 1:
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
