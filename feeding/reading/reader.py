"""Direct reader: files that a worker reads itself, as full batches, epoch after epoch.

Covers: DirectReader; batches across files, the position after each batch.
Does not: know a file format (formats), assign files (splits, positions), shuffle (runs), know
TensorFlow.
Threads: one consumer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np

from feeding.columnar.batch import Batch, EpochEnd, check_batch_size
from feeding.columnar.ops import Columns, joined, num_rows, split_rows
from feeding.columnar.schema import Schema
from feeding.config import MIB, check_count
from feeding.errors import FeedSettingsError
from feeding.reading.host_paths import common_directory
from feeding.reading.positions import (
    START,
    Course,
    EpochPosition,
    Position,
    choice,
    fingerprint,
    versions,
    work_of,
)
from feeding.reading.runs import Order, RowRun, Source, runs
from feeding.reading.splits import SourceFile

MOST_BYTES = 512 * MIB
WINDOW_SHARE = 4
"""A window holds at most one in this many of those bytes: permuting it copies it twice."""


class DirectReader:
    """One worker's share of some files, in batches of exactly `batch_size` rows.

    Only an epoch's last batch may be shorter. An epoch's rows and their order are a pure function
    of files, worker, number of workers, seed, epoch and course.

    Args:
        source: the files.
        worker: number of this worker, from 0.
        num_workers: workers that share the files.
        seed: of the order of the files' pieces and of the rows in windows, another order in each
            epoch; None: no shuffling.
        shuffle_rows: rows of a window, held in memory; 1: rows keep their order.
        interleave: most splits that are read side by side; 1: one after the other.
        most_bytes: what the splits that are read side by side hold at most, and four windows; one
            split and one row are always read.
        course: first epoch, and how much of it earlier runs have read; see positions.
    """

    def __init__(  # noqa: PLR0913 - the order of the rows, by keyword
        self,
        source: Source,
        worker: int,
        num_workers: int,
        *,
        seed: int | None = None,
        shuffle_rows: int = 1,
        interleave: int = 1,
        most_bytes: int = MOST_BYTES,
        course: Course = START,
    ) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer)):
            raise FeedSettingsError(f"seed must be an int, got {seed!r} ({type(seed).__name__})")
        check_count("shuffle_rows", shuffle_rows)
        if shuffle_rows > 1 and seed is None:
            raise FeedSettingsError(f"shuffle_rows={shuffle_rows} without a seed; pass seed=")
        check_count("interleave", interleave)
        check_count("most_bytes", most_bytes)
        self._source = source
        self._share = (worker, num_workers)
        self._files = tuple(source.files())
        held = max((file.held_bytes for file in self._files), default=0)
        # One more split than those that are read is opened ahead.
        fitting = max(1, most_bytes // held - 1) if held else interleave
        self._width = min(interleave, fitting)
        self._window_bytes = most_bytes // WINDOW_SHARE
        self._directory = common_directory(self._files)
        self._course = course
        self._runs: Iterator[RowRun] | None = None
        self._run: RowRun | None = None
        self._left: Columns | None = None
        """Rows of the run that were not returned yet."""
        self._position = Position(
            fingerprint(self._files),
            None if seed is None else int(seed),
            shuffle_rows,
            course.run_number,
            worker,
            num_workers,
            EpochPosition(course.first_epoch),
            versions(self._files),
            choice(self._files),
        )

    @property
    def schema(self) -> Schema:
        """Schema of the batches."""
        return self._source.schema

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """All files, those of other workers included."""
        return self._files

    @property
    def position(self) -> Position:
        """Position after the last batch; after an epoch's end, the start of the next epoch."""
        return self._position

    def next_batch(self, batch_size: int) -> Batch | EpochEnd:
        """Return the next batch, or EpochEnd once after each epoch.

        After an error, the next call begins the epoch again.

        Args:
            batch_size: rows; only an epoch's last batch has fewer.

        Raises:
            DataError: a file is damaged and the policy is to fail.
            OSError: a file cannot be read, or has changed since it was listed.
        """
        most_rows = check_batch_size(batch_size)
        epoch = self._position.place.epoch
        try:
            parts = self._take(most_rows, epoch)
        except BaseException:
            self.begin(epoch)
            raise
        if parts:
            rows = joined(parts)
            return Batch(num_rows(rows), self.schema, rows, self._position)
        self.begin(epoch + 1)
        return EpochEnd(epoch)

    def begin(self, epoch: int) -> None:
        """Let the next batch be an epoch's first.

        Args:
            epoch: from 0.
        """
        self._runs = self._run = self._left = None
        self._move(EpochPosition(epoch))

    def _move(self, place: EpochPosition) -> None:
        self._position = msgspec.structs.replace(self._position, place=place)

    def _take(self, missing: int, epoch: int) -> list[Columns]:
        if self._runs is None:
            self._runs = self._epoch_runs(epoch)
        parts: list[Columns] = []
        while missing:
            if self._left is None:
                run = next(self._runs, None)
                if run is None:
                    break
                self._run, self._left = run, run.columns
            taken, self._left = split_rows(self._left, missing)
            parts.append(taken)
            missing -= num_rows(taken)
        if parts and self._run is not None:
            left = 0 if self._left is None else num_rows(self._left)
            self._move(self._run.after(num_rows(self._run.columns) - left))
        return parts

    def _epoch_runs(self, epoch: int) -> Iterator[RowRun]:
        at = self._position
        work = work_of(
            self._files, *self._share, seed=at.seed, epoch=epoch, stops=self._course.stops
        )
        order = Order(
            at.seed, at.shuffle_rows, epoch, self._width, self._window_bytes, self._directory
        )
        source = self._source  # not self: a reader that is freed closes its file at once
        return itertools.chain.from_iterable(
            runs(source, part, number, order) for number, part in enumerate(work)
        )
