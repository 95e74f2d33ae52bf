"""Shuffled windows: rows of any type, in an order that only seed, epoch and partition decide."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeding.columnar.chunk import Chunk, decode, payload_bytes
from feeding.columnar.rows import rows_of
from feeding.config import FeedConfig
from feeding.encode.packer import Packer
from feeding.sender.shuffle import Shuffle
from tests.support.packed import packed

CONFIG = FeedConfig(chunk_rows=8)
KINDS: dict[str, Any] = {
    "numbers that need 1, 2 and 4 bytes": lambda i: [3, 300, -70_000, 2][i % 4],
    "floats": lambda i: i / 3,
    "text": lambda i: "é" * (i % 4) + str(i),
    "bytes": lambda i: bytes([i % 256]) * (i % 3),
    "lists": lambda i: [i, 2],
    "ragged lists": lambda i: [i] * (i % 4 + 1),
    "tuples": lambda i: (i, [0.5, float(i)], str(i)),
    "dicts": lambda i: {"a": i, "b": [i] * (i % 2)},
}


def shuffled(
    rows: list[Any], shuffle: Shuffle, config: FeedConfig = CONFIG, **options: Any
) -> list[Chunk]:
    chunks = Packer(config, **options).chunks(iter(rows))
    return list(shuffle.chunks(chunks, config.max_inflight_bytes))


def rows_in(chunks: list[Chunk]) -> list[Any]:
    return [row for chunk in chunks for row in rows_of(travelled(chunk))]


def travelled(chunk: Chunk) -> Chunk:
    """A chunk as the worker decodes it."""
    payload = bytearray().join(chunk.encode())
    assert payload_bytes(chunk.meta) == len(payload)
    return decode(chunk.meta, memoryview(payload))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("window", [2, 20, 50, 1000])
def test_rows_stay_whole_and_in_their_window(kind, window):
    rows = [kind(i) for i in range(50)]
    chunks = shuffled(rows, Shuffle(5, window))
    found = rows_in(chunks)
    for start in range(0, 50, window):
        part, expected = found[start : start + window], rows[start : start + window]
        assert sorted(map(repr, part)) == sorted(map(repr, expected))
    assert found != rows
    ends = [chunk.meta.first_row + chunk.num_rows for chunk in chunks]
    assert [chunk.meta.first_row for chunk in chunks] == [0, *ends[:-1]]
    assert [chunk.meta.last_in_partition for chunk in chunks] == [
        *[False] * (len(chunks) - 1), True,
    ]  # fmt: skip
    assert max(chunk.num_rows for chunk in chunks) <= CONFIG.chunk_rows


@given(st.integers(0, 80), st.integers(1, 90), st.integers(1, 20), st.integers(0, 1 << 63))
def test_the_order_is_the_documented_permutation_whatever_the_chunks(rows, window, size, seed):
    config = dataclasses.replace(CONFIG, chunk_rows=size)
    chunks = shuffled(list(range(rows)), Shuffle(seed, window), config, epoch=3, partition=4)
    expected: list[int] = []
    for number, start in enumerate(range(0, rows, window)):
        random = np.random.Generator(np.random.PCG64([seed, 3, 5, number]))
        order = random.permutation(min(window, rows - start)) if window > 1 else np.zeros(1, int)
        expected += (start + order).tolist()
    assert rows_in(chunks) == expected


def test_epochs_partitions_and_seeds_differ():
    rows = list(range(100))
    orders = [
        rows_in(shuffled(rows, Shuffle(seed, 100), epoch=epoch, partition=partition))
        for seed in (1, 2)
        for epoch in (0, 1)
        for partition in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert Shuffle(1).partitions(0, 9) == Shuffle(1, 77).partitions(0, 9)
    assert sorted(Shuffle(1).partitions(0, 9)) == list(range(9))
    assert Shuffle(1).partitions(0, 9) != Shuffle(1).partitions(1, 9)


def test_a_window_ends_where_it_holds_too_many_bytes():
    config = FeedConfig(chunk_rows=8, max_inflight_bytes=16 * 80)
    found = rows_in(shuffled([[float(i)] * 10 for i in range(64)], Shuffle(1, 64), config))
    firsts = [int(row[0]) for row in found]
    assert [sorted(firsts[at : at + 16]) for at in range(0, 64, 16)] == [
        list(range(at, at + 16)) for at in range(0, 64, 16)
    ]


def test_rows_of_another_type_are_not_mixed_with_those_before():
    packer = Packer(CONFIG)
    chunks = [packed(packer, [1, 2, 3]), packed(packer, ["a", "b"])]
    found = rows_in(list(Shuffle(1, 100).chunks(iter(chunks), 1 << 20)))
    assert (sorted(found[:3]), sorted(found[3:])) == ([1, 2, 3], ["a", "b"])
