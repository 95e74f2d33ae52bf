"""Files that a worker reads by itself → full batches, epoch after epoch.

Covers: DirectReader; batches across files, where a reader is after each.
Does not: know a file format (tfrecord_source), share files out (splits, positions), shuffle (runs),
know TensorFlow.
Threads: one consumer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np

from feeding.columnar.batch import Batch, EpochEnd, check_batch_size
from feeding.columnar.ops import Columns, cut, joined, num_rows
from feeding.columnar.schema import Schema
from feeding.errors import FeedSettingsError
from feeding.reading.positions import START, Course, Place, Position, fingerprint, work_of
from feeding.reading.runs import Order, RowRun, Source, runs


class DirectReader:
    """One worker's share of some files, in batches of exactly `batch_size` rows.

    Only an epoch's last batch may be shorter. An epoch's rows and their order are a pure function
    of files, worker, number of workers, seed, epoch and course.

    Args:
        source: the files.
        worker, num_workers: whose share.
        seed: shuffles the order of files' pieces and the rows within windows, anew in each epoch;
            None: nothing is shuffled.
        shuffle_rows: rows of a window, which are held in memory; 1: rows keep their order.
        course: the epoch to begin with, and what was read of it before; see positions.
    """

    def __init__(
        self,
        source: Source,
        worker: int,
        num_workers: int,
        *,
        seed: int | None = None,
        shuffle_rows: int = 1,
        course: Course = START,
    ) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer)):
            raise FeedSettingsError(f"seed must be an int, got {seed!r} ({type(seed).__name__})")
        if type(shuffle_rows) is not int or shuffle_rows < 1:
            raise FeedSettingsError(f"shuffle_rows must be an int >= 1, got {shuffle_rows!r}")
        if shuffle_rows > 1 and seed is None:
            raise FeedSettingsError(f"shuffle_rows={shuffle_rows} without a seed; pass seed=")
        self._source = source
        self._share = (worker, num_workers)
        self._files = tuple(source.files())
        self._course = course
        self._runs: Iterator[RowRun] | None = None
        self._run: RowRun | None = None
        self._left: Columns | None = None
        """Rows of the run that were not handed out."""
        self._position = Position(
            fingerprint(self._files),
            None if seed is None else int(seed),
            shuffle_rows,
            course.generation,
            worker,
            num_workers,
            Place(course.first_epoch),
        )

    @property
    def schema(self) -> Schema:
        """Of the batches."""
        return self._source.schema

    @property
    def position(self) -> Position:
        """Where reading is after the last batch, or after the end of an epoch: at the next one."""
        return self._position

    def next_batch(self, batch_size: int, timeout_s: float | None = None) -> Batch | EpochEnd:  # noqa: ARG002 - files need no waiting
        """Return the next batch, or EpochEnd once after each epoch.

        An epoch that failed begins anew with the next call.

        Raises:
            DataError: a file is damaged and the policy is to fail.
            OSError: a file cannot be read, or has another size than when it was listed.
        """
        most_rows = check_batch_size(batch_size)
        epoch = self._position.place.epoch
        try:
            parts = self._take(most_rows, epoch)
        except BaseException:
            self._begin(epoch)
            raise
        if parts:
            rows = joined(parts)
            return Batch(num_rows(rows), self.schema, rows, self._position)
        self._begin(epoch + 1)
        return EpochEnd(epoch)

    def _begin(self, epoch: int) -> None:
        self._runs = self._run = self._left = None
        self._move(Place(epoch))

    def _move(self, place: Place) -> None:
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
            taken, self._left = cut(self._left, missing)
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
        order = Order(at.seed, at.shuffle_rows, epoch)
        source = self._source  # not self: a reader that is dropped closes its file at once
        return itertools.chain.from_iterable(
            runs(source, part, number, order) for number, part in enumerate(work)
        )
