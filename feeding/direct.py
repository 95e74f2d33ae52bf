"""Files that a worker reads by itself → full batches, epoch after epoch.

Covers: DirectReader; batches across files, a window of shuffled rows.
Does not: know a file format (tfrecord_source), share files out (splits), know TensorFlow.
Threads: one consumer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from feeding import splits
from feeding.batches import Batch, BatchColumn, Ragged
from feeding.cursor import check_batch_size
from feeding.errors import SettingsError
from feeding.feed_queue import EpochEnd
from feeding.schema import Schema
from feeding.splits import SourceFile, Split

Columns = tuple[BatchColumn, ...]


class Source(Protocol):
    """Files of one format."""

    @property
    def schema(self) -> Schema:
        """What its rows look like; `read` gives the columns in this order."""

    def files(self) -> Sequence[SourceFile]:
        """Return the files to read; the same for every worker.

        Where the format knows how many rows each piece has (`SourceFile.piece_rows`), shares are
        exact to the row, and `read` gets splits that name a piece and rows within it.
        """

    def read(self, split: Split) -> Iterator[Columns]:
        """Yield the rows of a split as columns, some rows at a time; the same ones every time.

        The call may begin to fetch what the first rows need: it comes before the split's turn.
        """


class DirectReader:
    """One worker's share of some files, in batches of exactly `batch_size` rows.

    Only an epoch's last batch may be shorter. An epoch's rows and their order are a pure function
    of files, worker, number of workers, seed and epoch.

    Args:
        source: the files.
        worker, num_workers: whose share.
        seed: shuffles the order of files' pieces and the rows within windows, anew in each epoch;
            None: nothing is shuffled.
        shuffle_rows: rows of a window, which are held in memory; 1: rows keep their order.
        first_epoch: number of the epoch to begin with.
    """

    def __init__(
        self,
        source: Source,
        worker: int,
        num_workers: int,
        *,
        seed: int | None = None,
        shuffle_rows: int = 1,
        first_epoch: int = 0,
    ) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer)):
            raise SettingsError(f"seed must be an int, got {seed!r} ({type(seed).__name__})")
        if type(shuffle_rows) is not int or shuffle_rows < 1:
            raise SettingsError(f"shuffle_rows must be an int >= 1, got {shuffle_rows!r}")
        if shuffle_rows > 1 and seed is None:
            raise SettingsError(f"shuffle_rows={shuffle_rows} without a seed; pass seed=")
        self._source = source
        self._share = (worker, num_workers)
        self._seed = None if seed is None else int(seed)
        self._window = shuffle_rows
        self._files = tuple(source.files())
        self._epoch = first_epoch
        self._rows: Iterator[Columns] | None = None
        self._left: Columns | None = None

    @property
    def schema(self) -> Schema:
        """Of the batches."""
        return self._source.schema

    def next_batch(self, batch_size: int, timeout_s: float | None = None) -> Batch | EpochEnd:  # noqa: ARG002 - files need no waiting
        """Return the next batch, or EpochEnd once after each epoch.

        An epoch that failed begins anew with the next call.

        Raises:
            DataError: a file is damaged and the policy is to fail.
            OSError: a file cannot be read, or has another size than when it was listed.
        """
        most_rows = check_batch_size(batch_size)
        try:
            parts = self._take(most_rows)
        except BaseException:
            self._rows = self._left = None
            raise
        if parts:
            joined = _join(parts)
            return Batch(_num_rows(joined), self.schema, joined)
        end = EpochEnd(self._epoch)
        self._epoch += 1
        self._rows = None
        return end

    def _take(self, missing: int) -> list[Columns]:
        if self._rows is None:
            self._rows = self._epoch_rows()
        parts: list[Columns] = []
        while missing:
            columns = self._left if self._left is not None else next(self._rows, None)
            if columns is None:
                break
            taken, self._left = _cut(columns, missing)
            parts.append(taken)
            missing -= _num_rows(taken)
        return parts

    def _epoch_rows(self) -> Iterator[Columns]:
        mine = splits.share(self._files, *self._share, seed=self._seed, epoch=self._epoch)
        source = self._source  # not self: a reader that is dropped closes its file at once
        parts = (part for split_rows in _begun_ahead(source, mine) for part in split_rows)
        rows = (part for part in parts if _num_rows(part))
        if self._window == 1:
            return rows
        seeds = (self._seed or 0, self._epoch, self._share[0])
        return _shuffled(rows, self._window, np.random.default_rng([abs(each) for each in seeds]))


def _begun_ahead(source: Source, mine: Sequence[Split]) -> Iterator[Iterator[Columns]]:
    """Yield each split's rows, with the next split begun."""
    coming: Iterator[Columns] | None = None
    for split in mine:
        ready, coming = coming, source.read(split)
        if ready is not None:
            yield ready
    if coming is not None:
        yield coming


def _shuffled(
    parts: Iterator[Columns], window: int, dice: np.random.Generator
) -> Iterator[Columns]:
    """Yield the rows of one window after the other, each in a random order."""
    held: list[Columns] = []
    count = 0
    for part in parts:
        rest: Columns | None = part
        while rest is not None:
            taken, rest = _cut(rest, window - count)
            held.append(taken)
            count += _num_rows(taken)
            if count == window:
                yield _taken(_join(held), dice.permutation(count))
                held, count = [], 0
    if held:
        yield _taken(_join(held), dice.permutation(count))


def _num_rows(columns: Columns) -> int:
    first = columns[0]
    return len(first.offsets) - 1 if isinstance(first, Ragged) else len(first)


def _cut(columns: Columns, most_rows: int) -> tuple[Columns, Columns | None]:
    """Return the first rows, and the others if there are any."""
    count = _num_rows(columns)
    if count <= most_rows:
        return columns, None
    return (
        tuple(_rows(column, 0, most_rows) for column in columns),
        tuple(_rows(column, most_rows, count) for column in columns),
    )


def _rows(column: BatchColumn, start: int, stop: int) -> BatchColumn:
    if not isinstance(column, Ragged):
        return column[start:stop]
    bounds = column.offsets[start : stop + 1]
    return Ragged(column.values[bounds[0] : bounds[-1]], bounds - bounds[0])


def _join(parts: Sequence[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    return tuple(_joined(columns) for columns in zip(*parts, strict=True))


def _joined(columns: Sequence[BatchColumn]) -> BatchColumn:
    ragged = [column for column in columns if isinstance(column, Ragged)]
    if not ragged:
        return np.concatenate(columns)  # type: ignore[arg-type]  # none is Ragged
    lengths = np.concatenate([np.diff(column.offsets) for column in ragged])
    values = np.concatenate([column.values for column in ragged])
    return Ragged(values, np.concatenate([[0], np.cumsum(lengths)]))


def _taken(columns: Columns, order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Columns:
    return tuple(_ordered(column, order) for column in columns)


def _ordered(column: BatchColumn, order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> BatchColumn:
    if not isinstance(column, Ragged):
        return column[order]
    lengths = np.diff(column.offsets)[order]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(offsets[-1]) + np.repeat(column.offsets[:-1][order] - offsets[:-1], lengths)
    return Ragged(column.values[places], offsets)
