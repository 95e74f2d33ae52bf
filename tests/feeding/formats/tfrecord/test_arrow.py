"""tf.Example to and from Arrow columns, against the codec of single records."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from feeding.errors import DataError, FeedSettingsError, RowError
from feeding.formats.tfrecord.framing import RecordBlock, RecordReader, RecordWriter
from feeding.formats.tfrecord.from_arrow import ExampleEncoder, framed
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.formats.tfrecord.infer import decode_example, survey
from feeding.formats.tfrecord.to_arrow import ArrowDecoder, records_as_binary
from feeding.reading.bad_records import BadData

pytestmark = pytest.mark.slow  # kernels are compiled at first

SCALARS: dict[Any, Any] = {
    pa.int64(): some.integers(-(2**63), 2**63 - 1),
    pa.int16(): some.integers(-(2**15), 2**15 - 1),
    pa.bool_(): some.booleans(),
    pa.float32(): some.floats(width=32, allow_nan=False),
    pa.float64(): some.floats(width=32, allow_nan=False),
    pa.string(): some.text(max_size=9),
    pa.binary(): some.binary(max_size=9),
}
NAMES = some.text(min_size=1, max_size=140).filter(lambda name: name.isprintable())


def blocks(data: bytes, **options: Any) -> list[RecordBlock]:
    return list(RecordReader(io.BytesIO(data), "a", **options).blocks())


def decoded(data: bytes, schema: pa.Schema, bad: BadData | None = None) -> pa.RecordBatch:
    (block,) = blocks(data)
    rows, columns = ArrowDecoder(schema).decode(block, "a", bad or BadData())
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    batch.validate(full=True)
    assert batch.num_rows == rows
    return batch


def file_of(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    writer = RecordWriter(file)
    for row in rows:
        writer.write(encode_example(row))
    return file.getvalue()


@some.composite
def batches(draw: Any) -> pa.RecordBatch:
    names = draw(some.lists(NAMES, min_size=1, max_size=5, unique=True))
    num_rows = draw(some.integers(1, 12))
    columns, fields = [], []
    for name in names:
        kind = draw(some.sampled_from(list(SCALARS)))
        values = SCALARS[kind]
        if draw(some.booleans()):
            kind, values = pa.list_(kind), some.lists(values, max_size=4)
        column = draw(some.lists(some.none() | values, min_size=num_rows, max_size=num_rows))
        columns.append(pa.array(column, kind))
        fields.append(pa.field(name, kind))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def values_of(value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    return [item.encode() if isinstance(item, str) else item for item in items]


@settings(max_examples=15)
@given(batches(), some.integers(0, 5), some.integers(0, 12))
def test_batches_come_back_and_each_record_holds_its_row(batch, skipped, kept):
    part = batch.slice(min(skipped, batch.num_rows - 1), kept + 1)
    data = ExampleEncoder(batch.schema).encode(part).tobytes()
    assert decoded(data, batch.schema).to_pylist() == part.to_pylist()
    (block,) = blocks(data)
    for record, row in zip(block.records(), part.to_pylist(), strict=True):
        expected = {name: values_of(row[name]) for name in row if row[name] is not None}
        assert decode_example(record) == dict(sorted(expected.items()))


def test_equal_rows_are_the_bytes_that_single_records_are():
    rows = [
        {"b": np.arange(300, dtype=np.float32), "a": index * 1000 - 5, "c": "€" * 200}
        for index in range(20)
    ]
    columns = {
        "a": pa.array([row["a"] for row in rows]),
        "c": pa.array([row["c"] for row in rows]),
        "b": pa.array([row["b"] for row in rows], pa.list_(pa.float32())),
    }
    (batch,) = pa.table(columns).to_batches()
    assert ExampleEncoder(batch.schema).encode(batch).tobytes() == file_of(rows)


def test_what_is_missing_is_null_and_an_empty_list_is_not():
    data = file_of([{"a": 1, "l": [1.5]}, {"s": "x"}, {"l": np.zeros(0, np.float32)}])
    schema = pa.schema({"a": pa.int8(), "l": pa.list_(pa.float64()), "s": pa.string()})
    assert decoded(data, schema).to_pylist() == [
        {"a": 1, "l": [1.5], "s": None},
        {"a": None, "l": None, "s": "x"},
        {"a": None, "l": [], "s": None},
    ]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (pa.field("z", pa.int64(), nullable=False), "lacks feature 'z'.*not nullable"),
        (pa.field("one", pa.float32()), "'one' holds no float list, from which float is read"),
        (pa.field("two", pa.int64()), "2 values of feature 'two', where int64 is one"),
        (pa.field("one", pa.int8()), "'one' holds 400, which int8 cannot"),
        (pa.field("raw", pa.string()), "'raw' holds bytes that are not UTF-8"),
        (pa.field("raws", pa.list_(pa.string())), "'raws' holds bytes that are not UTF-8"),
    ],
)
def test_what_does_not_fit_is_named_or_left_out(field, text):
    good = {"one": 1, "two": 2, "raw": b"x", "raws": [b"x", b"y"], "z": 4}
    if field.name == "one" and field.type == pa.float32():
        good["one"] = 1.0
    wrong = {"one": 400, "two": [1, 2], "raw": b"\xff", "raws": [b"x", b"\xff"]}
    data = file_of([good, good, wrong, good])
    with pytest.raises(DataError, match=rf"^a: record 2 at byte \d+: .*{text}"):
        decoded(data, pa.schema([field]))
    bad = BadData("skip", 5)
    assert decoded(data, pa.schema([field]), bad).num_rows == 3
    assert bad.num_skipped == 1


def test_records_are_framed_and_read_as_they_are():
    records = [b"", b"one", b"x" * 1000]
    data = framed(pa.array([b"cut off", *records], pa.binary()).slice(1)).tobytes()
    (block,) = blocks(data)
    assert records_as_binary(block).to_pylist() == records
    with pytest.raises(RowError, match=r"row 1 .* null"):
        framed(pa.array([b"", None], pa.binary()))


def test_a_null_inside_a_list_is_refused():
    batch = pa.RecordBatch.from_pydict({"l": pa.array([[1], [2, None]])})
    with pytest.raises(RowError, match="'l' has a null inside a list"):
        ExampleEncoder(batch.schema).encode(batch)


@pytest.mark.parametrize("kind", [pa.date32(), pa.list_(pa.list_(pa.int8())), pa.uint8()])
def test_types_that_no_record_holds_are_refused(kind):
    with pytest.raises(FeedSettingsError, match=r"column 'x' is .*; a tf.Example holds"):
        ExampleEncoder(pa.schema({"x": kind}))


def test_a_batch_without_rows_is_no_bytes():
    batch = pa.RecordBatch.from_pydict({"l": pa.array([], pa.int64())})
    assert ExampleEncoder(batch.schema).encode(batch).tobytes() == b""


@pytest.mark.parametrize("tail", [b"\x09\x01", b"\x0d\x01\x02", b"\x0a\x05", b"\x0b"])
def test_a_record_that_is_cut_short_is_not_surveyed_in_part(tail):
    good = encode_example({"a": 1})
    with pytest.raises(DataError, match=r"record 1 is not a tf.Example"):
        survey([good, good + tail, good])
    with pytest.raises(DataError, match=r"record 0 is not a tf.Example"):
        decode_example(good + tail)


@pytest.mark.parametrize("value", [[2**63, 1], [2**63, -1], [2**64], 2**64])
def test_an_integer_beyond_int64_never_becomes_a_float(value):
    with pytest.raises(RowError, match="'x' holds"):
        encode_example({"x": value})


def test_a_survey_tells_kinds_numbers_and_gaps():
    rows: list[dict[str, Any]] = [{"a": 1, "t": "x", "l": [1.0]}, {"t": b"\xff", "l": [1.0, 2.0]}]
    found = survey(map(encode_example, rows))
    seen = {
        name: (each.kind, each.least, each.most, each.is_everywhere, each.is_text)
        for name, each in found.items()
    }
    assert seen == {
        "a": ("int64", 1, 1, False, False),
        "l": ("float32", 1, 2, True, False),
        "t": ("bytes", 1, 1, True, False),
    }
