"""Record batches become chunks of the same rows, however they are cut; the oracle is to_pylist."""

from __future__ import annotations

import datetime
import itertools
import math
import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeding.arrow.packer import ArrowPacker
from feeding.columnar.chunk import Chunk, decode, payload_bytes
from feeding.columnar.rows import rows_of
from feeding.config import FeedConfig
from feeding.errors import RowError

VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)
EPOCH = datetime.datetime(1970, 1, 1)
INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32()]


def chunks_of(batches: list[pa.RecordBatch], chunk_bytes: int = 1 << 20, **options: Any):
    config = FeedConfig(chunk_bytes=chunk_bytes, chunk_rows=options.pop("chunk_rows", 256))
    return list(ArrowPacker(config, **options).chunks(iter(batches)))


def travelled(chunk: Chunk) -> Chunk:
    """The chunk as a worker gets it."""
    payload = b"".join(bytes(part) for part in chunk.encode())
    assert len(payload) == payload_bytes(chunk.meta)
    return decode(chunk.meta, memoryview(payload))


def expected(value: Any, kind: pa.DataType) -> Any:
    """What a consumer of rows gets for what Arrow calls this."""
    if pa.types.is_decimal(kind):
        return float(value)
    if pa.types.is_date(kind):
        return (value - EPOCH.date()).days
    if pa.types.is_timestamp(kind):
        return (value.replace(tzinfo=None) - EPOCH) // datetime.timedelta(microseconds=1)
    if kind == VECTOR:
        if value["type"]:
            return value["values"]
        items = dict(zip(value["indices"], value["values"], strict=True))
        return [items.get(place, 0.0) for place in range(value["size"])]
    if pa.types.is_struct(kind):
        return tuple(expected(value[field.name], field.type) for field in kind)
    return value


def found(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return tuple(map(found, value)) if isinstance(value, tuple) else value


@st.composite
def vectors(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.integers(0, 5))
    if draw(st.booleans()):
        return {"type": 1, "values": draw(st.lists(FLOATS, min_size=size, max_size=size))}
    places = sorted(draw(st.sets(st.integers(0, max(0, size - 1)), max_size=size)))
    values = draw(st.lists(FLOATS, min_size=len(places), max_size=len(places)))
    return {"type": 0, "size": size, "indices": places, "values": values}


FLOATS = st.floats(allow_nan=False, width=32)
TIMES = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2100, 1, 1))
LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    *((kind, st.integers(0, 100)) for kind in INTEGERS),
    (pa.bool_(), st.booleans()),
    (pa.float32(), FLOATS),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), st.text(max_size=4)),
    (pa.large_string(), st.text(max_size=4)),
    (pa.binary(), st.binary(max_size=4)),
    (pa.decimal128(9, 3), st.decimals(-99999, 99999, places=3)),
    (pa.decimal128(30, 10), st.decimals(-(10**15), 10**15, places=10)),
    (pa.date32(), TIMES.map(datetime.datetime.date)),
    (pa.timestamp("us"), TIMES),
    (pa.timestamp("us", tz="UTC"), TIMES),
    (pa.list_(pa.int64()), st.lists(st.integers(-9, 9), max_size=3)),
    (pa.list_(pa.float32()), st.lists(FLOATS, min_size=2, max_size=2)),
    (pa.large_list(pa.bool_()), st.lists(st.booleans(), max_size=3)),
    (pa.list_(pa.string()), st.lists(st.text(max_size=4), max_size=3)),
    (pa.large_list(pa.large_string()), st.lists(st.text(max_size=4), max_size=3)),
    (pa.list_(pa.int16(), 3), st.lists(st.integers(-9, 9), min_size=3, max_size=3)),
    (
        pa.list_(pa.list_(pa.int32())),
        st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=2, max_size=2),
    ),
    (VECTOR, vectors()),
]


@st.composite
def columns(draw: st.DrawFn, depth: int = 0) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    if depth < 2 and draw(st.integers(0, 5)) == 0:
        parts = draw(st.lists(columns(depth + 1), min_size=1, max_size=3))
        kind = pa.struct([(f"f{i}", part[0]) for i, part in enumerate(parts)])
        values = {f"f{i}": part[1] for i, part in enumerate(parts)}
        return kind, st.fixed_dictionaries(values)
    return draw(st.sampled_from(LEAVES))


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, list[pa.RecordBatch]]:
    """Some rows, and the same rows in batches that are views into them."""
    num_rows = draw(st.integers(1, 12))
    arrays = {}
    for index in range(draw(st.integers(1, 3))):
        kind, values = draw(columns())
        rows = draw(st.lists(values, min_size=num_rows, max_size=num_rows))
        arrays[f"c{index}"] = pa.array(rows, kind)
    table = pa.table(arrays)
    cuts = sorted(draw(st.lists(st.integers(0, num_rows), max_size=5)))
    whole = table.combine_chunks().to_batches()[0]
    edges = zip([0, *cuts], [*cuts, num_rows], strict=True)
    return table, [whole.slice(low, high - low) for low, high in edges]


@pytest.mark.slow
@settings(max_examples=100)
@given(tables(), st.sampled_from([1, 40, 200, 1 << 20]), st.sampled_from([1, 3, 256]))
def test_chunks_hold_the_rows_of_the_batches(made, chunk_bytes, chunk_rows):
    table, batches = made
    chunks = chunks_of(batches, chunk_bytes, chunk_rows=chunk_rows)
    rows = [row for chunk in chunks for row in rows_of(travelled(chunk))]
    kinds = [field.type for field in table.schema]
    wanted = [
        tuple(expected(row[f"c{i}"], kind) for i, kind in enumerate(kinds))
        for row in table.to_pylist()
    ]
    assert [found(row) for row in rows] == wanted
    assert [chunk.meta.first_row for chunk in chunks] == [
        sum(chunk.num_rows for chunk in chunks[:index]) for index in range(len(chunks))
    ]
    assert [chunk.meta.last_in_partition for chunk in chunks] == [False] * (len(chunks) - 1) + [
        True
    ]


def test_no_rows_make_no_chunk_and_empty_batches_are_skipped():
    batch = pa.record_batch({"a": pa.array([1, 2])})
    assert chunks_of([]) == []
    assert chunks_of([batch.slice(0, 0)]) == []
    packer = ArrowPacker(FeedConfig())
    (chunk,) = packer.chunks(iter([batch.slice(0, 0), batch, batch.slice(2)]))
    assert (chunk.num_rows, packer.rows_read, packer.skip(iter([batch, batch]))) == (2, 2, 4)


def test_chunks_are_views_of_the_batch():
    batch = pa.record_batch({"x": pa.array(np.arange(8000.0)), "s": pa.array(["ab"] * 8000)})
    (low, size) = batch.column("x").buffers()[1].address, 64_000
    chunks = chunks_of([batch])
    assert len(chunks) > 1
    assert sum(chunk.num_rows for chunk in chunks) == 8000
    for chunk in chunks:
        at = chunk.columns[0].values.__array_interface__["data"][0]
        assert low <= at < low + size


def test_chunks_of_large_partitions_grow_to_their_size_and_small_ones_are_spread():
    batch = pa.record_batch({"x": pa.array(np.arange(10_000.0))})
    sizes = [chunk.num_rows for chunk in chunks_of([batch] * 20, chunk_bytes=64_000)]
    assert sum(sizes) == 200_000
    assert sizes[:3] == [257, 257, 257]
    assert 12_000 >= max(sizes) > 6000  # 64,000 bytes, give or take a half
    assert len(sizes) < 80


def test_small_batches_are_joined():
    batch = pa.record_batch({"x": pa.array(np.arange(10.0))})
    chunks = chunks_of([batch] * 100)
    assert max(chunk.num_rows for chunk in chunks) > 120
    assert np.concatenate([c.columns[0].values for c in chunks]).tolist() == [*range(10)] * 100


def test_wide_rows_are_cut_finer_and_one_too_wide_is_refused():
    batch = pa.record_batch({"x": pa.array([[0.0] * 1000] * 16)})
    assert [chunk.num_rows for chunk in chunks_of([batch], chunk_bytes=32_000)] == [4] * 4
    config = FeedConfig(chunk_bytes=100, max_chunk_bytes=1000)
    with pytest.raises(RowError, match="a row may have 1000; split it"):
        list(ArrowPacker(config).chunks(iter([batch])))


def test_rows_that_turn_wide_do_not_wait_for_as_many_as_narrow_ones():
    """A feed task's memory is bounded by bytes."""
    read: list[int] = []

    def batches():
        yield pa.record_batch({"x": pa.array(["y"] * 100_000)})
        for _ in range(40):
            read.append(1 << 20)
            yield pa.record_batch({"x": pa.array(["y" * (1 << 20)])})

    chunks = ArrowPacker(FeedConfig()).chunks(batches())
    ahead = [
        sum(read) - sum(chunk.num_bytes for chunk in left)
        for left in itertools.accumulate(([chunk] for chunk in chunks), list.__add__)
    ]
    assert len(read) == 40
    assert max(ahead) <= 1 << 20


def test_rows_that_wait_to_be_joined_while_rows_turn_wide_are_kept():
    widths = [[1] * 20, [1] * 40 + [9000] * 20, [1] * 20]
    batches = [pa.record_batch({"x": pa.array(["y" * n for n in part])}) for part in widths]
    chunks = chunks_of(batches, chunk_bytes=4096, chunk_rows=64)
    assert [len(row[0]) for chunk in chunks for row in rows_of(chunk)] == [
        n for part in widths for n in part
    ]


def test_a_list_column_stays_ragged_once_it_was():
    rows = [[1], [2, 3], [4], [5], [6], [7]]
    chunks = chunks_of([pa.record_batch({"x": pa.array(rows)})], chunk_rows=2)
    assert [chunk.meta.schema.columns[0].kind for chunk in chunks] == ["ragged"] * 3
    chunks = chunks_of([pa.record_batch({"x": pa.array([[1], [2], [3, 4], [5, 6]])})], chunk_rows=2)
    assert [chunk.meta.schema.columns[0].kind for chunk in chunks] == ["tensor", "ragged"]


NAN = float("nan")
MISSING = [
    (pa.array([1, None, 3]), 7, [1, 7, 3]),
    (pa.array([1.5, None, NAN]), 0.0, [1.5, 0.0, NAN]),
    (pa.array([True, None]), False, [True, False]),
    (pa.array(["a", None]), "", ["a", ""]),
    (pa.array([b"a", None]), b"-", [b"a", b"-"]),
    (pa.array([Decimal("1.1"), None], pa.decimal128(5, 1)), 0.5, [1.1, 0.5]),
    (pa.array([Decimal("1.1"), None], pa.decimal128(20, 1)), 0.5, [1.1, 0.5]),
    (pa.array([EPOCH, None], pa.timestamp("us")), -1, [0, -1]),
    (pa.array([[1, 2], [None, 3]]), 0, [[1, 2], [0, 3]]),
    (pa.array([[1, 2], None]), [8, 9], [[1, 2], [8, 9]]),
    (
        pa.array([[Decimal("1.1")], None], pa.list_(pa.decimal128(5, 2))),
        [0.0, 0.1, -2.5e2],
        [[1.1], [0.0, 0.1, -250.0]],
    ),
    (pa.array([["a", "b"], None]), ["x"], [["a", "b"], ["x"]]),
    (pa.array([[], ["a", None]]), "x", [[], ["a", "x"]]),
    (
        pa.array([None, {"type": 0, "size": 2, "indices": [1], "values": [3.0]}], VECTOR),
        [8.0, 9.0],
        [[8.0, 9.0], [0.0, 3.0]],
    ),
]


@pytest.mark.fault("F46")
@pytest.mark.parametrize(("array", "fill", "wanted"), MISSING)
def test_a_missing_value_is_refused_by_place_or_filled(array, fill, wanted):
    batch = pa.record_batch({"x": array})
    advice = r"null(; F\.coalesce| inside a list; F\.array_compact).*nulls=\{'x': "
    with pytest.raises(RowError, match=rf"partition 3, row [01], column 'x': {advice}"):
        chunks_of([batch], partition=3)
    (chunk,) = chunks_of([batch], fills={"x": fill})
    rows = [found(value) for (value,) in rows_of(chunk)]
    assert all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(rows, wanted, strict=True)
    )


@pytest.mark.parametrize(
    ("vector", "expected"),
    [
        ({"type": 0, "size": 2, "indices": [2], "values": [1.0]}, "an item at 2 of a vector of 2"),
        ({"type": 0, "size": -2, "indices": [], "values": []}, "a vector of -2 items"),
    ],
)
def test_a_vector_that_contradicts_itself_sets_no_item_of_another_one(vector, expected):
    good = {"type": 0, "size": 3, "indices": [1], "values": [1.0]}
    batch = pa.record_batch({"x": pa.array([good, vector, good], VECTOR)})
    with pytest.raises(RowError, match=f"row 1, column 'x': {expected}"):
        chunks_of([batch])


def test_a_fill_that_makes_no_row_of_a_nested_list_is_refused_by_place():
    batch = pa.record_batch({"x": pa.array([[[1]], None])})
    with pytest.raises(RowError, match=r"row 1, column 'x': null, and nulls= \[8\] makes no list<"):
        chunks_of([batch], fills={"x": [8]})


@pytest.mark.parametrize("fill", [0.123, 1e5, math.nan, math.inf])
def test_a_fill_that_is_no_decimal_of_the_items_is_refused_by_place(fill):
    batch = pa.record_batch(
        {"x": pa.array([[Decimal("1.1")], None], pa.list_(pa.decimal128(5, 2)))}
    )
    told = r"row 1, column 'x': null, and nulls= \[.*\] makes no list<.*decimal128\(5, 2\)"
    with pytest.raises(RowError, match=told):
        chunks_of([batch], fills={"x": [fill]})


def test_a_missing_inner_list_is_replaced_by_what_the_refusal_names():
    batch = pa.record_batch({"x": pa.array([[[1, 2], None]])})
    for fills in ({}, {"x": 7}):
        with pytest.raises(RowError, match=r"null inside a list; .* nulls={'x': \[\.\.\]}"):
            chunks_of([batch], fills=fills)
    (chunk,) = chunks_of([batch], fills={"x": [7, 8]})
    assert rows_of(chunk) == [([[1, 2], [7, 8]],)]


def test_a_missing_struct_is_missing_in_each_field():
    kind = pa.struct([("a", pa.int64()), ("b", pa.string())])
    batch = pa.record_batch({"s": pa.array([{"a": 1, "b": "x"}, None], kind)})
    with pytest.raises(RowError, match=r"row 1, column 's\.a': null"):
        chunks_of([batch])
    (chunk,) = chunks_of([batch], fills={"s.a": 0, "s.b": ""})
    assert rows_of(chunk) == [((1, "x"),), ((0, ""),)]


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (pa.array([[[1], [2, 3]]]), r"row 0, column 'x': inner list of 2 items"),
        (pa.array([[[1]], [[1], [2]]]), r"row 1, column 'x': nested list of shape \(2, 1\)"),
        (pa.array([[b"a"]]), "lists of binary; a feed takes lists of numbers, and of texts by"),
        (pa.array([[["a"]]]), "lists of string; a feed takes lists of numbers, and of texts by"),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), "no place for it"),
        (pa.array([None, [[1], None]]).slice(1), r"row 0, column 'x': null inside a list"),
    ],
)
def test_what_a_feed_cannot_carry_is_refused_by_place(array, text):
    with pytest.raises(RowError, match=text):
        chunks_of([pa.record_batch({"x": array})])


@pytest.mark.fault("F46")
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.list_(pa.string())], ids=str)
def test_text_that_is_not_utf8_names_its_row_and_what_to_do(kind):
    values: list[Any] = [b"a", "\u00e9".encode(), b"b", b"a\xff", b"\xfe"]
    if pa.types.is_list(kind):
        texts = pa.array(values, pa.binary()).view(pa.string())
        array: pa.Array = pa.ListArray.from_arrays(pa.array([0, 1, 3, 3, 5], pa.int32()), texts)
        row = 3
    else:
        raw = pa.large_binary() if pa.types.is_large_string(kind) else pa.binary()
        array, row = pa.array(values, raw).view(kind), 3
    batch = pa.record_batch({"s": array})
    expected = rf"partition 7, row {row}, column 's': text that is not UTF-8; read it as binary"
    with pytest.raises(RowError, match=expected):
        chunks_of([batch], partition=7)
    (chunk,) = chunks_of([batch.slice(0, row)])
    assert len(rows_of(travelled(chunk))) == row


def test_lists_are_packed_without_pandas():
    # It is a third of what a new Python process of Spark would import.
    statement = (
        "import sys, numpy as np, pyarrow as pa\n"
        "from feeding.arrow.packer import ArrowPacker\n"
        "from feeding.config import FeedConfig\n"
        "items = pa.Array.from_buffers(pa.float64(), 2, [None, pa.py_buffer(np.ones(2))])\n"
        "bounds = pa.py_buffer(np.array([0, 1, 2], np.int32))\n"
        "lists = pa.Array.from_buffers(pa.list_(items.type), 2, [None, bounds], children=[items])\n"
        "batch = pa.RecordBatch.from_arrays([lists], ['x'])\n"
        "rows = [chunk.num_rows for chunk in ArrowPacker(FeedConfig()).chunks(iter([batch]))]\n"
        "print(sum(rows), 'pandas' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", statement], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["2", "False"]
