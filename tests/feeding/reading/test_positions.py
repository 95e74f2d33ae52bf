"""Readers that stop anywhere and others that go on: every row of every epoch once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeding.columnar.batch import Batch
from feeding.columnar.ops import Columns
from feeding.columnar.schema import ColumnGroup, ColumnSpec, Schema
from feeding.errors import FeedSettingsError, FileChanged
from feeding.reading import lanes, splits
from feeding.reading.positions import (
    START,
    Course,
    Front,
    ListedFile,
    Place,
    Position,
    course_after,
    refuse_changed,
)
from feeding.reading.reader import DirectReader
from feeding.reading.splits import SourceFile, Split, deal_beside

pytestmark = pytest.mark.slow
ROW_BYTES = 10


class Rows:
    """A format: rows are numbers; by pieces with known rows, or by bytes where rows begin.

    Args:
        sizes: rows of each file, or of each piece of each file.
        left_out: rows that reading does not give, as a filter or damage would.
        block: rows that come at a time.
    """

    def __init__(
        self, sizes: Sequence[Sequence[int]], kind: str, *, left_out: int = 10**9, block: int = 3
    ) -> None:
        self._sizes, self._kind, self._left_out, self._block = sizes, kind, left_out, block
        self._first = dict(zip(map(str, range(len(sizes))), self._starts(), strict=True))

    def _starts(self) -> list[int]:
        return list(itertools.accumulate((sum(each) for each in self._sizes), initial=0))[:-1]

    @property
    def schema(self) -> Schema:
        return Schema(
            (ColumnSpec("n", "tensor", "scalar", "int64"),), ColumnGroup("dict", ("n",), (None,))
        )

    def files(self) -> list[SourceFile]:
        return [
            SourceFile(str(name), sum(pieces) * ROW_BYTES, self._kind != "whole", tuple(pieces))
            if self._kind == "pieces"
            else SourceFile(str(name), sum(pieces) * ROW_BYTES, self._kind != "whole")
            for name, pieces in enumerate(self._sizes)
        ]

    def read(self, split: Split) -> Iterator[Columns]:
        first = self._first[split.path]
        if split.piece is not None:
            begin = first + sum(self._sizes[int(split.path)][: split.piece])
            rows = range(begin + split.start, begin + split.stop)
        else:  # a row belongs to the split in which it begins
            rows = range(first - -split.start // ROW_BYTES, first - -split.stop // ROW_BYTES)
        given = [n for n in rows if n % self._left_out != 1]
        for at in range(0, len(given), self._block):
            yield (np.array(given[at : at + self._block]),)

    def expected(self) -> list[int]:
        total = sum(map(sum, self._sizes))
        return [n for n in range(total) if n % self._left_out != 1]


SIZES = st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=4), max_size=5)
KINDS = st.sampled_from(["pieces", "bytes", "whole"])


def numbers(batch: Batch) -> list[int]:
    column = batch.columns["n"]
    assert isinstance(column, np.ndarray)
    return list(map(int, column))


class Run:
    """Some workers that read until each has had so many batches."""

    def __init__(self, source: Rows, num_workers: int, shuffle: dict, course: Course) -> None:
        self.readers = [
            DirectReader(source, w, num_workers, **shuffle, course=course)
            for w in range(num_workers)
        ]
        self.start = self.readers[0].position.place
        self.seen: list[tuple[int, int]] = []
        """Epoch and row."""

    def read(self, worker: int, num_batches: int, batch_size: int) -> None:
        for _ in range(num_batches):
            epoch = self.readers[worker].position.place.epoch
            found = self.readers[worker].next_batch(batch_size)
            if isinstance(found, Batch):
                assert found.position == self.readers[worker].position
                self.seen += [(epoch, n) for n in numbers(found)]

    def finish(self, last_epoch: int) -> None:
        """Read up to the end of an epoch."""
        for worker, reader in enumerate(self.readers):
            while reader.position.place.epoch <= last_epoch:
                self.read(worker, 1, 4)

    def saved(self, lost: set[int]) -> list[Position]:
        """What a checkpoint holds; workers that said nothing yet may not be in it."""
        return [
            msgspec.json.decode(msgspec.json.encode(reader.position), type=Position)
            for worker, reader in enumerate(self.readers)
            if worker not in lost or reader.position.place != self.start
        ]


STOPS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 7)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200)
@given(
    SIZES, KINDS, STOPS, st.none() | st.integers(-5, 5), st.integers(1, 12), st.integers(2, 9),
    st.integers(1, 7), st.lists(st.integers(1, 5), min_size=5, max_size=5), st.integers(1, 200),
)  # fmt: skip
def test_rows_are_read_once_whoever_stops_where_and_goes_on(
    sizes, kind, stops, seed, window, left_out, pieces, widths, most_bytes
):
    """Each stop: batches that each worker has read by then, and their size.

    Each run may read another number of splits side by side.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "PIECE_BYTES", pieces * ROW_BYTES)
        patch.setattr(lanes, "_LEAST_TURN_ROWS", 2)
        patch.setattr(splits.share, "__kwdefaults__", {
            "seed": None, "epoch": 0, "piece_bytes": pieces * ROW_BYTES,
        })  # fmt: skip
        source = Rows(sizes, kind, left_out=left_out)
        shuffle = {"seed": seed, "shuffle_rows": 1 if seed is None else window}
        course, seen = START, []
        shuffle["most_bytes"] = most_bytes
        for (counts, batch_size), width in zip(stops, widths, strict=False):
            shuffle["interleave"] = width
            run = Run(source, len(counts), shuffle, course)
            for worker, count in enumerate(counts):
                run.read(worker, count, batch_size)
            seen += run.seen
            found = run.saved(lost={0})
            course = course_after(course, found, source.files(), run.readers[0].position)
        last = max([epoch for epoch, _ in seen], default=0) + 1
        run = Run(source, 2, shuffle, course)
        run.finish(last)
        seen += run.seen
        expected = Counter((epoch, n) for epoch in range(last + 1) for n in source.expected())
        assert Counter(seen) == expected


@settings(max_examples=100)
@given(SIZES, KINDS, st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 5))
def test_as_many_workers_go_on_as_if_nobody_had_stopped(sizes, kind, counts, batch_size):
    source, shuffle = Rows(sizes, kind), {"seed": 3, "shuffle_rows": 6, "interleave": 3}
    stopped = Run(source, len(counts), shuffle, START)
    for worker, count in enumerate(counts):
        stopped.read(worker, count, batch_size)
    found = stopped.saved(set())
    course = course_after(START, found, source.files(), found[0])
    for worker in range(len(counts)):
        gone_on = DirectReader(source, worker, len(counts), **shuffle, course=course)
        both = (gone_on, stopped.readers[worker])
        for behind, ahead in (both, both[::-1]):  # in epochs of which nothing was left
            while behind.position.place.epoch < ahead.position.place.epoch:
                assert not isinstance(behind.next_batch(batch_size), Batch)
        for _ in range(12):
            one, other = (
                reader.next_batch(batch_size) for reader in (stopped.readers[worker], gone_on)
            )
            if not isinstance(one, Batch):
                assert one == other
                continue
            assert isinstance(other, Batch)
            assert numbers(one) == numbers(other)


@given(
    st.lists(st.integers(0, 20), max_size=6), st.lists(st.integers(0, 30), min_size=1, max_size=5)
)
def test_what_is_left_is_dealt_evenly(sizes, loads):
    parts = [Split("f", 100 * n, 100 * n + size) for n, size in enumerate(sizes) if size]
    dealt = deal_beside(parts, loads, ())
    assert sorted(b for mine in dealt for s in mine for b in range(s.start, s.stop)) == sorted(
        b for s in parts for b in range(s.start, s.stop)
    )
    gets = [sum(s.size for s in mine) for mine in dealt]
    sums = [load + got for load, got in zip(loads, gets, strict=True)]
    reached = [total for total, got in zip(sums, gets, strict=True) if got]
    assert not reached or max(reached) - min(sums) <= 1


def test_what_cannot_go_on_says_why():
    source = Rows([[5], [7]], "bytes")
    reader = DirectReader(source, 0, 1, seed=1, shuffle_rows=4)
    reader.next_batch(3)
    saved, files = reader.position, source.files()
    assert len(msgspec.json.encode(saved)) < 300
    other = DirectReader(source, 0, 1, seed=2, shuffle_rows=4).position
    with pytest.raises(FeedSettingsError, match="it had seed=1, now 2"):
        course_after(START, [saved], files, other)
    changed = DirectReader(Rows([[5], [8]], "bytes"), 0, 1, seed=1, shuffle_rows=4).position
    with pytest.raises(FileChanged, match="files, their sizes or their rows have changed"):
        course_after(START, [saved], files, changed)
    before = [ListedFile("0", 50), ListedFile("1", 70), ListedFile("2", 3)]
    now = [SourceFile("0", 50), SourceFile("1", 80), SourceFile("3", 1)]
    with pytest.raises(FileChanged, match="1 had 70 bytes, now 80; 2 is gone; 3 is new"):
        refuse_changed(before, now)
    refuse_changed(before[:1], now[:1])
    course = course_after(START, [saved], files, saved)
    shorter = DirectReader(
        Rows([[5], [7]], "bytes", left_out=2),
        0,
        1,
        seed=1,
        course=Course(1, 0, ((Place(0, 0, Front(((0, 5),), 1)),),)),
    )
    assert course.run_number == 1
    with pytest.raises(FileChanged, match="5 of them were read before"):
        shorter.next_batch(3)


def test_positions_of_another_run_say_nothing():
    source = Rows([[20]], "pieces")
    reader = DirectReader(source, 0, 1)
    reader.next_batch(7)
    course = course_after(START, [reader.position], source.files(), reader.position)
    assert course_after(course, [reader.position], source.files(), reader.position) == course
