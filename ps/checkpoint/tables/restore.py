"""Restore of a server's tables from a checkpoint that any number of servers saved.

Covers: rows with slots and versions, the step of the rule, counts of ids without a row, limits.
Does not: read files (ps.checkpoint.tables.reader), serve.      Runs in: PS processes.
Threads: the caller's fills tables that no other thread sees yet; one more reads the files.

Steps are read from the newest back, and the first entry of an id is its final state. So the restore
loads no row that a newer step has dropped: a table never has more rows than were saved, and it can
evict the oldest rows while older steps are still unread.

With the same numbers of servers and segments the restored state is the saved one: rows are as old
as they were, whatever time has passed since, in which no push could reach them. Otherwise rows,
slots and versions are. A table's step is then the largest of its segments', which differ only by
pushes in flight, ids without a row are counted from 0, and a row's time to live starts again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ps.checkpoint.reader import ChainFiles, ShardFile
from ps.checkpoint.tables.format import num_segments
from ps.checkpoint.tables.reader import End, RowPlace, SavedSegment, read_rows
from ps.errors import CheckpointError
from ps.tables.rows import Dropped, RowBatch
from ps.tables.table import Table

_logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
_Piece = tuple[SavedSegment, RowBatch | Dropped | End]


def saved_segments(chain: ChainFiles) -> dict[str, int]:
    """Return the segments of each table in this server's share of a checkpoint, by table.

    A server that has as many is the one that was saved, also on a machine with other cores: its
    sessions and its next delta fit. With another number of servers the result is empty.

    Args:
        chain: the files of the checkpoint, for this server's place.
    """
    names = [spec.name for spec in chain.newest.manifest.tables]
    if not chain.is_own or not names:
        return {}
    return dict(zip(names, _segments_of(chain.own()[0]), strict=True))


def restore_tables(
    chain: ChainFiles, tables: Sequence[Table], *, reset_optimizer: bool = False
) -> bool:
    """Load all rows that this server owns; return whether its segments own the same ids as saved.

    Args:
        chain: the files of a checkpoint of the same model (see
            ps.checkpoint.restore.check_same_model), for this server.
        tables: empty tables to fill, in the manifest's order.
        reset_optimizer: restore the values only: slots and steps are reset, all rows have one age.

    Raises:
        CheckpointError: a file is damaged.
    """
    asked = [len(table.segments) for table in tables]
    is_same = chain.is_own and (
        not tables or all(asked == _segments_of(file) for file in chain.own())
    )
    versions = [0] * len(tables)
    gone: defaultdict[RowPlace, _Gone] = defaultdict(_Gone)
    pieces = read_rows(chain, is_own=is_same)
    for saved, piece in _one_ahead(pieces):
        at, number = saved.record.place
        table = tables[at]
        if isinstance(piece, RowBatch):
            batch = gone[saved.server, at, number].left_of(piece)
            table.load(table.without_slots(batch) if reset_optimizer else batch)
        elif isinstance(piece, Dropped):
            gone[saved.server, at, number].add(piece.ids[table.is_own(piece.ids)])
        elif is_same and not reset_optimizer:
            _end(table, number, piece)
        versions[at] = max(versions[at], saved.record.version)
    for table, version in zip(tables, versions, strict=True):
        table.fit()
        if table.has_left_out:
            _logger.warning(
                "table %r: ps:%d restores %d rows, as many as its share of the limit; those of "
                "the checkpoint that were pushed less recently are left out",
                table.spec.name,
                chain.rank,
                table.num_rows,
            )
        if reset_optimizer:
            table.forget_ages()
        elif not is_same:
            for segment in table.segments:
                segment.version = version
    return is_same


def _segments_of(file: ShardFile) -> list[int]:
    """Return how many segments each table has in one shard's file."""
    tables = range(len(file.checkpoint.manifest.tables))
    return [num_segments(file.index.tables, at) for at in tables]


def _one_ahead(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """Yield pieces while a thread reads and checks the next one, which takes longest."""
    with ThreadPoolExecutor(1, "restore") as reader:
        following = reader.submit(next, pieces, None)
        while (piece := following.result()) is not None:
            following = reader.submit(next, pieces, None)
            yield piece


class _Gone:
    """Ids that newer steps of one saved segment have dropped: 8 bytes an id of this server's."""

    def __init__(self) -> None:
        self._sorted: Array = np.empty(0, np.int64)
        self._new: list[Array] = []

    def add(self, ids: Array) -> None:
        """Note dropped ids."""
        self._new.append(ids)

    def left_of(self, batch: RowBatch) -> RowBatch:
        """Return the rows of those ids that were not dropped."""
        if self._new:
            self._sorted = np.unique(np.concatenate([self._sorted, *self._new]))
            self._new = []
        if not self._sorted.size:
            return batch
        places = np.searchsorted(self._sorted, batch.ids).clip(max=self._sorted.size - 1)
        is_abandoned = self._sorted[places] != batch.ids
        return RowBatch(*(column[is_abandoned] for column in batch))


def _end(table: Table, number: int, end: End) -> None:
    segment = table.segments[number]
    segment.version = end.version
    segment.ttl.restore(end.ages)
    try:
        segment.admission.load(np.frombuffer(end.counts, np.uint16))
    except ValueError as error:
        raise CheckpointError(
            f"table {table.spec.name!r}: the saved counts of segment {number} are damaged: {error}"
        ) from None
