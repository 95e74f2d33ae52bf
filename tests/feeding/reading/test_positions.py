"""Readers that stop anywhere and others that go on: every row of every epoch once."""

from __future__ import annotations

import dataclasses
import itertools
import os
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
from feeding.filesystem.interface import is_other
from feeding.reading import lanes, splits
from feeding.reading.positions import (
    START,
    Course,
    EpochPosition,
    Front,
    ListedFile,
    Position,
    course_after,
    refuse_changed,
    versions,
    work_of,
)
from feeding.reading.reader import DirectReader
from feeding.reading.splits import SourceFile, Split, deal_beside

pytestmark = pytest.mark.slow
ROW_BYTES, BLOCK_ROWS = 10, 3


class Rows:
    """A format: rows are numbers; by pieces with known rows, or by bytes where rows begin.

    Args:
        sizes: rows of each file, or of each piece of each file.
        left_out: of so many rows, one is not given, as by a filter or damage; 0: all are.
        directory: of this host, that has the files; empty: none, paths are those of URLs.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        kind: str,
        *,
        left_out: int = 0,
        directory: str = "",
    ) -> None:
        self._sizes, self._kind, self._left_out = sizes, kind, left_out
        self._directory = directory
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
            SourceFile(
                os.path.join(self._directory, str(name)),
                sum(pieces) * ROW_BYTES,
                self._kind != "whole",
                tuple(pieces) if self._kind == "pieces" else None,
            )
            for name, pieces in enumerate(self._sizes)
        ]

    @property
    def num_skipped(self) -> int:
        return 0

    def read(self, split: Split) -> Iterator[Columns]:
        name = os.path.basename(split.path)
        first = self._first[name]
        if split.piece is not None:
            begin = first + sum(self._sizes[int(name)][: split.piece])
            rows = range(begin + split.start, begin + split.stop)
        else:  # a row belongs to the split in which it begins
            rows = range(first - -split.start // ROW_BYTES, first - -split.stop // ROW_BYTES)
        given = [n for n in rows if self._is_given(n)]
        for at in range(0, len(given), BLOCK_ROWS):
            yield (np.array(given[at : at + BLOCK_ROWS]),)

    def expected(self) -> list[int]:
        total = sum(map(sum, self._sizes))
        return [n for n in range(total) if self._is_given(n)]

    def _is_given(self, row: int) -> bool:
        return not self._left_out or row % self._left_out != 1


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


def stops(counts: st.SearchStrategy[list[int]]) -> st.SearchStrategy:
    return st.lists(st.tuples(counts, st.integers(1, 7)), min_size=1, max_size=4)


def counts(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 9), min_size=least, max_size=most)


# Half of them by equally many workers, each of which goes on in the window that it has begun.
STOPS = stops(counts(1, 4)) | st.integers(1, 3).flatmap(lambda n: stops(counts(n, n)))


@settings(max_examples=200)
@given(
    SIZES, KINDS, STOPS, st.none() | st.integers(-5, 5), st.integers(1, 12), st.integers(2, 9),
    st.integers(1, 7), st.lists(st.integers(1, 5), min_size=5, max_size=5), st.integers(1, 200),
)  # fmt: skip
def test_rows_are_read_once_whoever_stops_where_and_goes_on(
    sizes, kind, stops, seed, window, left_out, pieces, widths, most_bytes
):
    """Each stop: batches that each worker has read by then, and their size.

    Each run may read another number of splits side by side, and has its files elsewhere.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "PIECE_BYTES", pieces * ROW_BYTES)
        patch.setattr(lanes, "_LEAST_TURN_ROWS", 2)
        shuffle = {"seed": seed, "shuffle_rows": 1 if seed is None else window}
        course, seen = START, []
        shuffle["most_bytes"] = most_bytes
        *before, source = (
            Rows(sizes, kind, left_out=left_out, directory=f"/tmp/run-{number}")
            for number in range(len(stops) + 1)
        )
        for own, (counts, batch_size), width in zip(before, stops, widths, strict=False):
            shuffle["interleave"] = width
            run = Run(own, len(counts), shuffle, course)
            for worker, count in enumerate(counts):
                run.read(worker, count, batch_size)
            seen += run.seen
            found = run.saved(lost={0})
            course = course_after(course, found, own.files(), run.readers[0].position)
        last = max([epoch for epoch, _ in seen], default=0) + 1
        run = Run(source, len(stops[-1][0]), shuffle, course)
        run.finish(last)
        seen += run.seen
        expected = Counter((epoch, n) for epoch in range(last + 1) for n in source.expected())
        assert Counter(seen) == expected


def test_a_window_is_read_as_it_was_though_the_run_that_began_it_had_more_lanes_than_it_fills(
    monkeypatch,
):
    """The second run keeps four lanes until they end, and begins a window meanwhile."""
    monkeypatch.setattr(lanes, "_LEAST_TURN_ROWS", 2)
    source = Rows([[3, 10, 10, 10, 10, 10]], "pieces")  # the first lane ends early
    for seed in range(30):
        course, seen = START, []
        shuffle = {"seed": seed, "shuffle_rows": 8}
        for width, num_rows in ((4, 4), (1, 10)):
            shuffle["interleave"] = width
            run = Run(source, 1, shuffle, course)
            run.read(0, num_rows, 1)
            seen += run.seen
            course = course_after(course, run.saved(set()), source.files(), run.saved(set())[0])
        run = Run(source, 1, shuffle, course)
        run.finish(0)
        assert sorted(n for _, n in seen + run.seen) == source.expected(), seed


WINDOWS = {"seed": 1, "shuffle_rows": 8, "interleave": 4}


@pytest.mark.parametrize("saved_in", ["/data", "/tmp/spark-1"])
def test_a_window_goes_on_with_files_in_another_directory(monkeypatch, saved_in):
    monkeypatch.setattr(lanes, "_LEAST_TURN_ROWS", 2)
    sizes = [[3, 10, 10], [10, 10, 10]]
    first = Run(Rows(sizes, "pieces", directory=saved_in), 1, WINDOWS, START)
    first.read(0, 4, 1)
    (saved,) = first.saved(set())
    assert (saved.place.taken, saved.place.rows) == (4, 8)
    source = Rows(sizes, "pieces", directory="/tmp/spark-2")
    course = course_after(START, [saved], source.files(), saved)
    run = Run(source, 1, WINDOWS, course)
    run.finish(0)
    assert sorted(n for _, n in first.seen + run.seen) == source.expected()


def test_the_order_of_a_window_of_urls_does_not_change():
    source = Rows([[30], [30]], "bytes", directory="hdfs://n/d")
    run = Run(source, 1, WINDOWS, START)
    run.read(0, 8, 1)
    assert [n for _, n in run.seen] == [37, 33, 30, 31, 36, 35, 34, 32]


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
        course=Course(1, 0, ((EpochPosition(0, 0, Front(((0, 5),), 1)),),)),
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


def test_a_file_that_gains_a_version_makes_versions_that_are_not_compared():
    known, bare = SourceFile("s3://b/x", 10, version="etag a"), SourceFile("s3://b/y", 10)
    before, told = versions([known, bare]), dataclasses.replace(bare, version="etag q")
    assert not is_other(before, versions([known, told]))
    assert is_other(before, versions([dataclasses.replace(known, version="etag b"), bare]))


@pytest.mark.parametrize("num_workers", [1, 40])
def test_files_are_put_in_order_once_for_all_workers(monkeypatch, num_workers):
    pieces_of, asked = splits.byte_pieces, Counter[str]()

    def counted(file: SourceFile) -> list[Split]:
        asked[file.path] += 1
        return pieces_of(file)

    monkeypatch.setattr(splits, "byte_pieces", counted)
    files = [SourceFile(f"f{number}", 1000, False) for number in range(100)]
    stop = tuple(EpochPosition(2, front=Front(((0, 5),), 1)) for _ in range(num_workers))
    work_of(files, 0, num_workers, seed=1, epoch=2, stops=[stop])
    assert set(asked.values()) == {1}


@pytest.mark.parametrize("stops", [(), [(EpochPosition(2, front=Front(((0, 5),), 1)),)]])
def test_a_worker_that_is_not_there_is_refused(stops):
    with pytest.raises(FeedSettingsError, match="worker must be 0 to 1, got 2"):
        work_of([SourceFile("f", 1000)], 2, 2, seed=1, epoch=2, stops=stops)
