"""A chunk's decoder refuses what contradicts itself before it takes memory, and never crashes."""

import contextlib
import random
import tracemalloc

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from feeding.columnar import chunk as chunks
from feeding.columnar.rows import rows_of
from feeding.columnar.schema import MAX_COLUMNS, ColumnGroup, ColumnSpec, Schema
from feeding.config import FeedConfig
from feeding.encode.packer import Packer
from feeding.errors import ChunkError, FeedError
from feeding.protocol import messages
from tests.support.packed import packed

ROWS = [([1, 2, 3], 0.5, "ä", b"\0x", [1.0] * (i % 3), True, {"k": i}) for i in range(4)]


def good():
    chunk = packed(Packer(FeedConfig()), ROWS)
    return chunk.meta, bytearray().join(chunk.encode())


def decode(meta, payload):
    if chunks.payload_bytes(meta) != len(payload):
        raise ChunkError("length")
    return chunks.decode(meta, memoryview(payload))


def test_the_good_one_is_good():
    assert rows_of(decode(*good())) == ROWS


def changed(**fields):
    return msgspec.structs.replace(good()[0], **fields)


def with_column(index, **fields):
    meta = good()[0]
    columns = list(meta.schema.columns)
    columns[index] = msgspec.structs.replace(columns[index], **fields)
    return changed(schema=Schema(tuple(columns), meta.schema.layout))


def deep(levels):
    node = None
    for _ in range(levels):
        node = ColumnGroup("tuple", ("0",), (node,))
    return node


BOMBS = {
    "2^60 rows": lambda: changed(num_rows=1 << 60),
    "2^63 rows": lambda: changed(num_rows=(1 << 63) - 1),
    "rows without bytes": lambda: changed(
        num_rows=1 << 40, schema=Schema((), ColumnGroup("tuple", (), ())), stored=(), data_items=()
    ),
    "2^62 items": lambda: changed(data_items=(0, 0, 1 << 62, 8, 3, 0, 0)),
    "negative items": lambda: changed(data_items=(0, 0, -8, 8, 3, 0, 0)),
    "items of a tensor": lambda: changed(data_items=(8, 0, 8, 8, 3, 0, 0)),
    "fewer lengths than columns": lambda: changed(data_items=(0,)),
    "fewer dtypes than columns": lambda: changed(stored=("uint8",)),
    "more columns than leaves": lambda: changed(
        schema=Schema((*good()[0].schema.columns, ColumnSpec("z", "str", "str")), None)
    ),
    "shape overflows": lambda: with_column(0, shape=(1 << 40, 1 << 40, 1 << 40)),
    "shape overflows behind a zero": lambda: with_column(0, shape=(0, 1 << 40, 1 << 40)),
    "negative shape": lambda: with_column(0, shape=(-1,)),
    "rank 1000": lambda: with_column(0, shape=(1,) * 1000),
    "object dtype": lambda: with_column(0, dtype="object"),
    "dtype of nothing": lambda: with_column(0, dtype="O8,V3"),
    "dtype of text": lambda: with_column(2, dtype="int8"),
    "stored wider than the column": lambda: changed(
        stored=("float64", "float64", "", "", "float64", "bool", "uint8")
    ),
    "stored as object": lambda: changed(
        stored=("object", "float64", "", "", "float64", "bool", "int64")
    ),
    "text stored as numbers": lambda: changed(
        stored=("uint8", "float64", "uint8", "", "float64", "bool", "uint8")
    ),
    "shape of text": lambda: with_column(2, shape=(3,)),
    "same name twice": lambda: with_column(0, name="1"),
    "name too long": lambda: with_column(0, name="n" * 300),
    "scalar with a shape": lambda: with_column(0, value="scalar"),
    "text value of numbers": lambda: with_column(0, value="str"),
    "deep layout": lambda: changed(schema=Schema(good()[0].schema.columns[:1], deep(50))),
    "names without values": lambda: changed(
        schema=Schema(good()[0].schema.columns, ColumnGroup("tuple", ("a", "b"), (None,)))
    ),
}


@pytest.mark.attack("A08")
@pytest.mark.attack("A09")
@pytest.mark.attack("A10")
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_before_memory_is_taken(bomb):
    _, payload = good()
    meta = bomb()
    tracemalloc.start()
    try:
        with pytest.raises(ChunkError):
            decode(meta, payload)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


LIMITS = {
    "2^60 rows": "rows in a chunk, the limit is 16777216",
    "rows without bytes": "rows in a chunk, the limit is 16777216",
    "shape overflows": "impossible shape",
    "shape overflows behind a zero": "impossible shape",
    "negative shape": "impossible shape",
    "rank 1000": "impossible shape",
    "name too long": "300 characters, the limit is 256",
    "deep layout": "nest deeper than 8",
    "negative items": "-8 items",
    "items of a tensor": "a tensor has no item count, got 8",
    "fewer lengths than columns": "7 columns with 7 stored dtypes and 1 lengths",
    "fewer dtypes than columns": "7 columns with 1 stored dtypes and 7 lengths",
    "more columns than leaves": "layout has 1 leaves for 8 columns",
    "names without values": "2 names for 1 values",
    "object dtype": "dtype 'object' for kind tensor",
    "dtype of text": "dtype 'int8' for kind str",
    "stored wider than the column": "'float64' cannot hold int64",
    "stored as object": "'object' cannot hold int64",
    "text stored as numbers": "str has no stored dtype, got 'uint8'",
    "shape of text": "kind str has no shape",
    "same name twice": "same name",
    "scalar with a shape": "a scalar has no shape",
    "text value of numbers": "value str for kind tensor",
}


@pytest.mark.attack("A10")
@pytest.mark.parametrize("name", LIMITS)
def test_a_bomb_is_refused_by_its_own_limit_whatever_was_sent(name):
    with pytest.raises(ChunkError, match=LIMITS[name]):
        chunks.payload_bytes(BOMBS[name]())


@pytest.mark.attack("A10")
def test_a_schema_has_a_limited_number_of_columns():
    def wide(num_columns):
        names = tuple(map(str, range(num_columns)))
        layout = ColumnGroup("tuple", names, (None,) * num_columns)
        return Schema(tuple(ColumnSpec(name, "str", "str") for name in names), layout)

    wide(MAX_COLUMNS).check()
    with pytest.raises(ChunkError, match=f"{MAX_COLUMNS + 1} columns, the limit is {MAX_COLUMNS}"):
        wide(MAX_COLUMNS + 1).check()


def bytes_chunk():
    chunk = packed(Packer(FeedConfig()), [b"abc", b"de", b""])
    return chunk.meta, bytearray().join(chunk.encode())


@pytest.mark.parametrize(
    "offsets",
    [[1, 3, 5, 5], [0, 3, 5, 4], [0, 3, 4, 4], [0, 4, 3, 5], [0, -1, 5, 5], [0, 9, 9, 5]],
)
def test_offsets_that_leave_their_data_are_refused(offsets):
    meta, payload = bytes_chunk()
    payload[:32] = np.array(offsets, np.int64).tobytes()
    with pytest.raises(ChunkError, match="offsets"):
        decode(meta, payload)


def test_a_bool_that_is_no_bool_is_refused():
    chunk = packed(Packer(FeedConfig()), [True, False])
    payload = bytearray().join(chunk.encode())
    payload[1] = 7
    with pytest.raises(ChunkError, match="neither 0 nor 1"):
        decode(chunk.meta, payload)


def test_bools_of_which_there_are_none_are_read():
    meta = packed(Packer(FeedConfig()), [[True], [False, True]]).meta
    empty = msgspec.structs.replace(meta, num_rows=0, data_items=(0,))
    assert rows_of(decode(empty, bytes(8))) == []


def test_text_that_is_not_utf8_is_refused_when_read():
    chunk = packed(Packer(FeedConfig()), ["abc"])
    payload = bytearray().join(chunk.encode())
    payload[-8] = 0xFF
    with pytest.raises(ChunkError, match="not UTF-8"):
        rows_of(decode(chunk.meta, payload))


@pytest.mark.attack("A12")
def test_truncated_and_mutated_metas_end_in_a_typed_error():
    meta, payload = good()
    encoded = messages.encode(messages.Put(meta))
    generator = random.Random(5)
    cases = [encoded[:cut] for cut in range(len(encoded))]
    for _ in range(4000):
        mutated = bytearray(encoded)
        for _ in range(generator.randint(1, 4)):
            mutated[generator.randrange(len(mutated))] = generator.randrange(256)
        cases.append(bytes(mutated))
    refused = 0
    for case in cases:
        try:
            request = messages.decode_request(case)
            if isinstance(request, messages.Put):
                rows_of(decode(request.chunk, bytearray(payload)))
        except FeedError:
            refused += 1
    assert refused > len(cases) * 0.8


@pytest.mark.attack("A12")
@hypothesis.given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(data):
    with contextlib.suppress(ChunkError):
        messages.decode_request(data)


@pytest.mark.attack("A12")
@hypothesis.given(st.data())
def test_any_payload_of_the_right_length_decodes_or_is_refused(data):
    meta, payload = good()
    junk = data.draw(st.binary(min_size=len(payload), max_size=len(payload)))
    with contextlib.suppress(ChunkError):
        rows_of(decode(meta, bytearray(junk)))


def test_a_meta_that_nests_without_end_is_refused():
    nested = b"\x93\xa5tuple\x91\xa1a\x91" * 8000
    with pytest.raises(ChunkError):
        messages.decode_request(b"\x92\xa3Put\x98\xa1f\x00\x00\x00\x00\x92\x90" + nested)


GOLDEN_META = (
    "93a35075749ba5696e70757402030002929395a130a674656e736f72a46c697374a5696e743634910395a131"
    "a674656e736f72a67363616c6172a7666c6f617436349095a132a3737472a3737472a09093a57475706c6593"
    "a130a131a13293c0c0c093a575696e7438a7666c6f61743634a093000002c2a5747261696e0000"
)
GOLDEN_PAYLOAD = (
    "0102030405060000000000000000e03f000000000000f83f"
    "000000000000000002000000000000000200000000000000c3a4000000000000"
)
GOLDEN_ROWS = [([1, 2, 3], 0.5, "ä"), ([4, 5, 6], 1.5, "")]


def test_golden_bytes():
    chunk = packed(Packer(FeedConfig(), epoch=2, partition=3), GOLDEN_ROWS)
    assert messages.encode(messages.Put(chunk.meta)).hex() == GOLDEN_META
    assert bytearray().join(chunk.encode()).hex() == GOLDEN_PAYLOAD
    hello = messages.Hello(feed="f", epoch=2)
    assert messages.encode(hello).hex() == "98a548656c6c6f01a1660200c20000"
    status = messages.FeedStatus(7, 8, room=True, draining=False)
    assert messages.encode(status).hex() == "9b0708c3c2c20000000000c2"


def test_golden_bytes_are_read():
    request = messages.decode_request(bytes.fromhex(GOLDEN_META))
    assert isinstance(request, messages.Put)
    assert rows_of(decode(request.chunk, bytearray.fromhex(GOLDEN_PAYLOAD))) == GOLDEN_ROWS
    assert (request.chunk.epoch, request.chunk.partition) == (2, 3)
