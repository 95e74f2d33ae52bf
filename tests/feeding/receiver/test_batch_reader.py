"""BatchReader: exact batches, columns, text, ragged rows, schemas that change."""

import re

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from feeding.arrow.packer import ArrowPacker
from feeding.columnar.batch import Batch, EpochEnd, FeedEnd, Ragged
from feeding.columnar.schema import ColumnSpec
from feeding.config import FeedConfig
from feeding.encode.packer import Packer
from feeding.errors import FeedSettingsError, RowError, SchemaError
from feeding.receiver.batch_reader import BatchReader
from feeding.receiver.channel import FeedChannel
from tests.support.packed import packed

CONFIG = FeedConfig(starve_timeout_s=5.0)


def channel_with(*epochs, chunk_rows=4):
    """A channel whose feed holds these epochs of partitions of rows, and then ends."""
    channel = FeedChannel(CONFIG, worker="worker:0")
    config = FeedConfig(chunk_rows=chunk_rows)
    for epoch, partitions in enumerate(epochs):
        for partition, rows in enumerate(partitions):
            for chunk in Packer(config, epoch=epoch, partition=partition).chunks(iter(rows)):
                accept(channel, chunk)
        channel.flush("input", epoch)
    channel.finish("input")
    return channel


def accept(channel, chunk):
    with channel._state.changed:
        channel._state.queue("input").offer(chunk)


def read(reader, size):
    out: list = []
    while not isinstance(item := reader.next_batch(size), FeedEnd):
        out.append(item)
    return out


@hypothesis.given(
    st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=3),
    st.integers(1, 9),
    st.integers(1, 15),
)
def test_batches_are_full_and_rows_in_order_within_each_epoch(sizes, chunk_rows, batch_size):
    epochs = [
        [[[e, p, r] for r in range(rows)] for p, rows in enumerate(parts)]
        for e, parts in enumerate(sizes)
    ]
    channel = channel_with(*epochs, chunk_rows=chunk_rows)
    items = read(BatchReader(channel), batch_size)
    for epoch, partitions in enumerate(epochs):
        expected = [row for rows in partitions for row in rows]
        got: list = []
        lengths = []
        while not isinstance(item := items.pop(0), EpochEnd):
            lengths.append(item.num_rows)
            got += item.nest().tolist()
        assert item == EpochEnd(epoch)
        assert got == expected
        full, rest = divmod(len(expected), batch_size)
        assert lengths == [batch_size] * full + [rest] * bool(rest)
    assert items == []
    stats = channel.stats("input")
    assert stats.fed_rows == stats.taken_rows


def test_the_end_of_a_feed_stays():
    reader = BatchReader(channel_with([[1]]))
    assert [type(reader.next_batch(5)) for _ in range(4)] == [Batch, EpochEnd, FeedEnd, FeedEnd]


def one_batch(rows):
    (batch, end) = read(BatchReader(channel_with([rows])), 100)
    assert isinstance(end, EpochEnd)
    assert isinstance(batch, Batch)
    return batch


@pytest.mark.parametrize("second", [b"cd", b"cde"])
def test_bytearrays_are_bytes_in_a_batch(second):
    batch = one_batch([(bytearray(b"ab"), 1), (bytearray(second), 2)])
    assert batch.nest()[0].tolist() == [b"ab", second]
    assert {type(each) for each in batch.nest()[0]} == {bytes}


def test_a_batch_is_nested_as_its_rows_are():
    batch = one_batch([([1, 2], {"a": 0.5, "b": "t"}, 3)])
    x, parts, y = batch.nest()
    assert (x.tolist(), y.tolist()) == ([[1, 2]], [3])
    assert parts["a"].tolist() == [0.5]
    assert list(batch.columns) == ["0", "1.a", "1.b", "2"]
    assert batch.schema.columns[0] == ColumnSpec("0", "tensor", "list", "int64", (2,))


def test_text_and_bytes_are_object_arrays_that_keep_their_length():
    batch = one_batch([("ä", b"x\0\0"), ("", b"")])
    text, data = batch.nest()
    assert text.dtype == data.dtype == object
    assert (text.tolist(), data.tolist()) == (["ä", ""], [b"x\0\0", b""])


def test_ragged_rows_keep_their_lengths_across_chunks():
    rows = [[0] * (i % 4) for i in range(10)]
    ragged = one_batch(rows).nest()
    assert isinstance(ragged, Ragged)
    assert ragged.values.dtype == np.int64
    assert np.diff(ragged.offsets).tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("first", ["int64", "uint64"])
def test_ragged_rows_of_both_64_bit_dtypes_keep_large_ids(first):
    other = "uint64" if first == "int64" else "int64"
    rows = [np.array([2**60 + 1] * (i % 4), first if i < 4 else other) for i in range(8)]
    ragged = one_batch(rows).nest()
    assert ragged.values.dtype == first
    assert ragged.values.tolist() == [2**60 + 1] * 12


def test_chunks_of_ints_and_floats_join_only_where_nothing_is_lost():
    rows = [[1, 2]] * 4 + [[0.5, 2]] * 4
    assert one_batch(rows[::-1]).nest()[7].tolist() == [1.0, 2.0]
    told = (
        "feed 'input': column 'value' had int64, then got float64, which cannot become int64; "
        "cast the column to one type before it is fed"
    )
    with pytest.raises(SchemaError, match=re.escape(told)):
        one_batch(rows)


@pytest.mark.parametrize("of_rows", [lambda value: value, lambda value: np.array([value] * 2)])
def test_chunks_of_narrow_and_wide_ints_join_where_the_values_fit(of_rows):
    narrow = [of_rows(np.int32(7))] * 4
    batch = one_batch([*narrow, *[of_rows(np.int64(8))] * 4])
    assert batch.nest().dtype == np.int32
    assert batch.nest()[4].tolist() == of_rows(np.int64(8)).tolist()
    told = "column 'value' had int32, then got 1099511627776..1099511627776, which it cannot hold"
    with pytest.raises(SchemaError, match=re.escape(told)):
        one_batch([*narrow, *[of_rows(np.int64(2**40))] * 4])


@pytest.mark.parametrize("of_rows", [lambda value: value, lambda value: np.array([value] * 2)])
@pytest.mark.parametrize(
    ("first", "fits", "odd"),
    [
        (np.float16(0.5), np.uint16(65504), np.uint16(65519)),
        (np.float32(0.5), np.int32(2**24), np.int32(2**24 + 1)),
        (np.float32(0.5), np.int64(255), np.int64(2**24 + 1)),
        (np.float32(0.5), np.float64(1e38), np.float64(1e39)),
        (np.float32(0.5), np.float64(np.inf), np.float64(-1e300)),
    ],
)
def test_numbers_join_floats_that_hold_them_and_are_refused_by_others(first, fits, odd, of_rows):
    before = [of_rows(first)] * 4
    batch = one_batch([*before, *[of_rows(fits)] * 4])
    assert batch.nest().dtype == first.dtype
    assert np.all(batch.nest()[4] == first.dtype.type(fits))
    told = f"column 'value' had {first.dtype}, then got {odd}..{odd}, which it cannot hold"
    with pytest.raises(SchemaError, match=re.escape(told)):
        one_batch([*before, *[of_rows(odd)] * 4])


@pytest.mark.parametrize("rows_per_chunk", [1, 2])
def test_an_int_among_floats_is_a_float_wherever_chunks_end(rows_per_chunk):
    rows = [0.5, 2**60]
    channel = FeedChannel(CONFIG)
    for at in range(0, 2, rows_per_chunk):
        accept(channel, packed(Packer(FeedConfig()), rows[at : at + rows_per_chunk]))
    channel.finish("input")
    batch = BatchReader(channel).next_batch(9)
    assert isinstance(batch, Batch)
    assert batch.nest().tolist() == [0.5, 2.0**60]


@pytest.mark.parametrize("of_rows", [lambda value: value, lambda value: [value] * 2])
def test_an_int_that_floats_would_round_is_refused_wherever_chunks_end(of_rows):
    rows = [of_rows(0.5), of_rows(2**60 + 1)]
    with pytest.raises(RowError, match=f"{2**60 + 1} is an int among floats"):
        packed(Packer(FeedConfig()), rows)
    # A packer of lists goes on with floats in the next chunk, where it refuses the int itself.
    with pytest.raises((SchemaError, RowError), match=f"{2**60 + 1}.* (cannot hold|among floats)"):
        one_batch([*rows[:1] * 4, *rows[1:] * 4])


def test_a_list_of_texts_and_bytes_are_two_forms():
    channel = FeedChannel(CONFIG)
    for values in ([["a", "b"]], [b"xy"]):
        batch = pa.record_batch({"t": pa.array(values)})
        for chunk in ArrowPacker(FeedConfig()).chunks(iter([batch])):
            accept(channel, chunk)
    channel.finish("input")
    with pytest.raises(SchemaError, match="had rows of t: texts, then got rows of t: bytes"):
        BatchReader(channel).next_batch(9)


@pytest.mark.parametrize("chunk_rows", [1, 4])
def test_dicts_are_matched_by_name_wherever_chunks_end(chunk_rows):
    rows = [
        {"a": 1, "x": {"b": 2.5, "c": "t"}},
        {"x": {"c": "u", "b": 3.5}, "a": 4},
        {"x": {"b": 5.5, "c": "v"}, "a": 6},
    ]
    channel = channel_with([rows], chunk_rows=chunk_rows)
    batch, end = read(BatchReader(channel), 100)
    assert isinstance(end, EpochEnd)
    assert batch.columns["a"].tolist() == [1, 4, 6]
    assert batch.columns["x.b"].tolist() == [2.5, 3.5, 5.5]
    assert batch.columns["x.c"].tolist() == ["t", "u", "v"]
    assert [(span.start, span.stop) for span in batch.receipt] == [(0, 3)]


@pytest.mark.parametrize(
    ("later", "text"),
    [
        ([("a", "b")], "then got"),
        ([{"a": 1}], "then got"),
        (["x"], "then got rows of value: str"),
    ],
)
def test_partitions_that_do_not_match_are_refused(later, text):
    channel = channel_with([[[1, 2]] * 3, later])
    with pytest.raises(SchemaError, match=text):
        read(BatchReader(channel), 2)


def test_rows_of_one_length_become_ragged_when_others_come():
    channel = channel_with([[[1, 2]] * 3, [[1], []], [[3, 4]] * 2])
    batches = [item for item in read(BatchReader(channel), 2) if isinstance(item, Batch)]
    rows = []
    for batch in batches:
        (column,) = batch.arrays
        if isinstance(column, Ragged):
            assert batch.schema.columns[0].kind == "ragged"
            rows += [part.tolist() for part in np.split(column.values, column.offsets[1:-1])]
        else:
            rows += column.tolist()
    assert rows == [[1, 2]] * 3 + [[1], []] + [[3, 4]] * 2
    assert [type(batch.arrays[0]) for batch in batches] == [np.ndarray, *[Ragged] * 3]


def test_a_batch_within_one_chunk_is_a_view():
    channel = FeedChannel(CONFIG)
    chunk = packed(Packer(FeedConfig()), [np.arange(3.0)] * 8)
    accept(channel, chunk)
    channel.finish("input")
    for batch in read(BatchReader(channel), 4)[:2]:
        assert np.shares_memory(batch.nest(), chunk.columns[0].values)
        assert batch.nest().tolist() == [[0.0, 1.0, 2.0]] * 4


@pytest.mark.parametrize("size", [0, -1, 1.5, "32", True, None])
def test_batch_size_must_be_a_positive_int(size):
    with pytest.raises(FeedSettingsError, match=r"batch_size must be an int >= 1, got .*\("):
        BatchReader(FeedChannel(CONFIG)).next_batch(size)
