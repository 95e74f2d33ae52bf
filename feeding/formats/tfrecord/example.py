"""tf.Example decoder: records to columns of given features.

Covers: Feature (the spec of a column), ExampleDecoder, reading a column's numbers.
Does not: read files (framing, records), parse protobuf (example_kernels), infer features (infer).
Threads: a decoder has no state; calls may run in parallel, without the GIL.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from feeding.columnar.batch import BatchColumn, Ragged
from feeding.columnar.chunk import Array
from feeding.columnar.ops import row_of
from feeding.columnar.schema import is_shape
from feeding.errors import FeedSettingsError
from feeding.formats.tfrecord import example_kernels as kernels
from feeding.formats.tfrecord.framing import RecordBlock
from feeding.formats.tfrecord.records import RecordDamage, without_damaged
from feeding.reading.bad_records import BadData
from rpc.field_texts import with_field_texts

BYTES, FLOATS, INTS = 1, 2, 3
"""Kinds of lists: their field numbers in a tf.train.Feature."""
_KIND_NAMES = {BYTES: "bytes", FLOATS: "float", INTS: "int64"}
_KINDS = {
    **dict.fromkeys(("float32", "float64", "float16"), FLOATS),
    **dict.fromkeys(("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32"), INTS),
    "bool": INTS,
    "bytes": BYTES,
}
"""By dtype."""


@with_field_texts
@dataclass(frozen=True, slots=True)
class Feature:
    """Spec of one column of tf.Example records.

    Args:
        dtype: "float32", "float64", "float16" (from a FloatList), an integer dtype or "bool" (from
            an Int64List) or "bytes" (from a BytesList).
        shape: of one record's value; () for one number. None: ragged.
        default: value of records without the feature; None: they are damaged (in a ragged
            column it is an empty row).
    """

    dtype: str = "float32"
    shape: tuple[int, ...] | None = ()
    default: Any = None

    def __post_init__(self) -> None:
        if self.dtype not in _KINDS:
            raise FeedSettingsError(f"dtype must be one of {', '.join(_KINDS)}, got {self.dtype!r}")
        if self.shape is None and self.default is not None:
            raise FeedSettingsError("a feature of any length (shape None) has no default")
        shape: object = self.shape
        if shape is not None and not is_shape(shape, least=0):
            raise FeedSettingsError(f"shape must be None or a tuple of ints >= 0, got {shape!r}")
        if self.shape is not None and self.default is not None:
            self._check_default(self.shape)

    def _check_default(self, shape: tuple[int, ...]) -> None:
        refused = f"default {self.default!r} is no {self.dtype} of shape {shape}"
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                value = np.asarray(self.default, object if self.dtype == "bytes" else self.dtype)
            np.broadcast_to(value, shape)
        except (TypeError, ValueError, OverflowError) as error:
            raise FeedSettingsError(f"{refused}: {error}") from None
        if self.dtype != "bytes" and _is_other(np.asarray(self.default, object), value):
            raise FeedSettingsError(f"{refused}: it would be {value.tolist()}")

    @property
    def kind(self) -> int:
        """Field number of its list in a tf.train.Feature."""
        return _KINDS[self.dtype]

    @property
    def num_values(self) -> int:
        """Values in one record; 1 for a ragged column, which has any number."""
        return math.prod(self.shape or ())


def _is_other(given: Array, value: Array) -> bool:
    """Return whether the cast of objects changed a number; rounded floats count as the same."""
    changed = given != value
    return bool((changed & np.isinf(value) if value.dtype.kind == "f" else changed).any())


class ExampleDecoder:
    """Decodes records to columns.

    Args:
        features: the columns, by name; other features of the records are ignored.
    """

    def __init__(self, features: Mapping[str, Feature]) -> None:
        if not features:
            raise FeedSettingsError("no features were requested; name at least one")
        given: Mapping[Any, Any] = features
        for name, feature in given.items():
            if not isinstance(name, str) or not isinstance(feature, Feature):
                raise FeedSettingsError(
                    f"features are Feature objects by name, got {name!r}: {feature!r}; for example "
                    "{'label': Feature('int64')}"
                )
        self.features = dict(features)
        self._names = packed_names(self.features)

    def decode(self, block: RecordBlock, file: str, bad: BadData) -> dict[str, BatchColumn]:
        """Return the columns of a block's records: [n, *shape], object[n] or Ragged, as copies.

        With a policy to skip, every column lacks the damaged records.

        Args:
            block: n records.
            file: their file, for messages.
            bad: policy for records that are no tf.Example or lack a feature.

        Raises:
            DataError: names file, record, byte and feature.
        """
        return without_damaged(
            block, file, bad, lambda starts, lengths: self._columns(block.buffer, starts, lengths)
        )

    def _columns(self, buffer: Array, starts: Array, lengths: Array) -> dict[str, BatchColumn]:
        spans = np.empty((len(self.features), 2, len(starts)), np.int64)
        record = kernels.locate(buffer, starts, lengths, self._names, spans)
        if record >= 0:
            raise RecordDamage(record, "it is not a tf.Example")
        return {
            name: _column(buffer, name, feature, spans[index])
            for index, (name, feature) in enumerate(self.features.items())
        }


def packed_names(names: Iterable[str]) -> tuple[Array, Array]:
    """Return names for the kernels: joined, uint8[bytes], and their offsets, int64[c + 1]."""
    encoded = [name.encode() for name in names]
    bounds = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), bounds


def value_counts(buffer: Array, name: str, kind: int, spans: Array, why: str) -> Array:
    """Return the number of values of a feature in each record, int64[n]; -1 without a list.

    Args:
        buffer: uint8, holds the records.
        name: name of the feature, for messages.
        kind: field number of the list that it must have.
        spans: int64[2, n], start and end of the feature in each record.
        why: end of the message if it has another list.

    Raises:
        RecordDamage: a record's feature is malformed, or has another list.
    """
    counts = np.empty(spans.shape[1], np.int64)
    record, fault = kernels.count_values(buffer, spans, kind, counts)
    if fault == kernels.MALFORMED:
        raise RecordDamage(record, f"its feature {name!r} is not a tf.train.Feature")
    if fault == kernels.WRONG_KIND:
        raise RecordDamage(record, f"its feature {name!r} holds no {_KIND_NAMES[kind]} list, {why}")
    return counts


def single_numbers(buffer: Array, kind: int, spans: Array) -> Array | None:
    """Return one number of each record, float32[n] or int64[n]: the fast path.

    Args:
        buffer: uint8, holds the records.
        kind: FLOATS or INTS.
        spans: int64[2, n], start and end of the feature in each record.

    Returns:
        None if a record has no such list of one value.
    """
    if kind == FLOATS:
        floats = np.empty(spans.shape[1], np.float32)
        return floats if kernels.copy_single_floats(buffer, spans, floats.view(np.uint8)) else None
    ints = np.empty(spans.shape[1], np.int64)
    return ints if kernels.copy_single_ints(buffer, spans, ints) else None


def numbers_of(buffer: Array, name: str, kind: int, spans: Array, offsets: Array) -> Array:
    """Return a feature's numbers of all records in their order, float32[items] or int64[items].

    Args:
        buffer: uint8, holds the records.
        name: name of the feature, for messages.
        kind: FLOATS or INTS.
        spans: int64[2, n], start and end of the feature in each record.
        offsets: int64[n + 1], of the records in the result.

    Raises:
        RecordDamage: an integer has more than 64 bits.
    """
    total = int(offsets[-1])
    if kind == FLOATS:
        floats = np.empty(total, np.float32)
        kernels.copy_floats(buffer, spans, offsets, floats.view(np.uint8))
        return floats
    ints = np.empty(total, np.int64)
    record = kernels.copy_ints(buffer, spans, offsets, ints)
    if record >= 0:
        raise RecordDamage(record, f"its feature {name!r} holds an integer of more than 64 bits")
    return ints


def _column(buffer: Array, name: str, feature: Feature, spans: Array) -> BatchColumn:
    if feature.shape is not None and feature.num_values == 1 and feature.kind != BYTES:
        single = single_numbers(buffer, feature.kind, spans)
        if single is not None:
            return narrowed(name, feature.dtype, single).reshape((-1, *feature.shape))
    why = (
        f"which Feature({feature.dtype!r}) reads; floats are in a float list, integers and bools "
        "in an int64 list, 'bytes' in a bytes list"
    )
    counts = value_counts(buffer, name, feature.kind, spans, why)
    lacking = counts < 0
    if feature.shape is None:
        counts[lacking] = 0
    else:
        _check_counts(name, feature, counts, lacking)
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.maximum(counts, 0), out=offsets[1:])
    values = _values(buffer, name, feature, spans, offsets)
    if feature.shape is None:
        return Ragged(values, offsets)
    if not lacking.any():
        return values.reshape((len(counts), *feature.shape))
    out = np.empty((len(counts), *feature.shape), values.dtype)
    out[~lacking] = values.reshape((-1, *feature.shape))
    out[lacking] = feature.default
    return out


def _check_counts(name: str, feature: Feature, counts: Array, lacking: Array) -> None:
    wrong = counts != feature.num_values
    if feature.default is not None:
        wrong &= ~lacking
    if not wrong.any():
        return
    record = int(wrong.argmax())
    found = "lacks" if lacking[record] else f"has {counts[record]} values of"
    raise RecordDamage(
        record,
        f"it {found} feature {name!r}, asked for {feature.num_values} (shape {feature.shape}); "
        "pass a default, or shape=None for any number",
    )


def _values(buffer: Array, name: str, feature: Feature, spans: Array, offsets: Array) -> Array:
    """Return all values of a column, joined in the order of the records."""
    if feature.kind != BYTES:
        numbers = numbers_of(buffer, name, feature.kind, spans, offsets)
        return narrowed(name, feature.dtype, numbers, offsets)
    total = int(offsets[-1])
    found = np.empty((2, total), np.int64)
    kernels.find_bytes(buffer, spans, offsets, found)
    view = buffer.data
    out = np.empty(total, object)
    out[:] = [view[start:stop].tobytes() for start, stop in found.T.tolist()]
    return out


def narrowed(name: str, dtype: str, values: Array, offsets: Array | None = None) -> Array:
    """Return values converted to a dtype.

    Args:
        name: name of the feature, for messages.
        dtype: dtype of the result.
        values: [items], float32 or int64.
        offsets: int64[n + 1], of the records in `values`; None: one value per record.

    Raises:
        RecordDamage: the dtype cannot hold a value.
    """
    if dtype == values.dtype.name:
        return values
    with np.errstate(over="ignore"):
        out = values.astype(dtype)
    if values.dtype.kind == "f":
        outside = np.isinf(out) & np.isfinite(values)
    else:
        low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        outside = (values < low) | (values > high)
    if outside.any():
        at = int(outside.argmax())
        raise RecordDamage(
            row_of(offsets, at),
            f"its feature {name!r} holds {values[at]}, which {dtype} cannot; ask for "
            f"{values.dtype}",
        )
    return out
