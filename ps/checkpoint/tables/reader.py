"""Reader of table rows in committed checkpoints, piece by piece from the newest step back.

The first entry that is read of an id is its final state: its row, or that it was dropped. So a
reader ignores older entries, and never holds more rows than were saved. Reading a segment ends at
the newest step of the chain that holds it whole.

Covers: reading through a chain of deltas, verifying.
Does not: know servers' tables (ps.checkpoint.tables.restore), import numba.
Threads: none; every function is independent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from ps.checkpoint.format import Checkpoint, bucket_nbytes
from ps.checkpoint.reader import ChainFiles, Root, ShardFile, open_chain, open_shards
from ps.checkpoint.storage import typed_errors
from ps.checkpoint.tables.format import SegmentRecord, read_counts, read_piece, segment_nbytes
from ps.tables.rows import Dropped, RowBatch

RowPlace = tuple[int, int, int]
"""A saved segment: (server, table, number)."""


class SavedSegment(NamedTuple):
    """Source of a piece: step, server, table and segment."""

    server: int
    record: SegmentRecord


class End(NamedTuple):
    """State of a segment in its newest step, without rows; yielded after that step's rows."""

    version: int
    counts: bytes
    ages: tuple[tuple[float, int], ...]


def read_rows(
    chain: ChainFiles,
    *,
    is_own: bool = False,
    above: int | None = None,
    table: int | None = None,
) -> Iterator[tuple[SavedSegment, RowBatch | Dropped | End]]:
    """Yield the tables' rows, of each id the newest first, with one piece in memory at a time.

    Args:
        chain: the files of the checkpoint.
        is_own: read only those that the server of the chain's rank had saved.
        above: read only the steps of the chain that are newer than this one; None: all.
        table: read only the rows of this table, by its number in the manifest; None: of all.

    Raises:
        CheckpointError: a file is damaged.
    """
    manifest = chain.newest.manifest
    if not manifest.tables:
        return
    whole: set[RowPlace] = set()
    """Segments of which no older step has anything new."""
    for link, step in enumerate(chain.steps):
        if above is not None and step.step <= above:
            return
        for file in chain.files(link, is_own=is_own):
            yield from _read_shard(file, whole, table, with_ends=link == 0)
            whole.update(
                (file.rank, *record.place) for record in file.index.tables if record.is_whole
            )


def adds_changes_only(root: Root, checkpoint: Checkpoint, base: Checkpoint) -> bool:
    """Return whether the steps of a chain above `base` hold just what has changed since.

    Not if the chain does not contain `base`, or a segment was written whole since: then nobody
    knows which of its rows are gone.

    Args:
        root: the checkpoint directory.
        checkpoint: one that `read_manifest` returned.
        base: an older one.
    """
    chain = open_chain(root, checkpoint)
    if all((each.step, each.save_id) != (base.step, base.save_id) for each in chain.steps):
        return False
    newer = [each for each in chain.steps if each.step > base.step]
    return all(
        each.is_delta and not any(record.is_whole for record in file.index.tables)
        for each in newer
        for file in open_shards(chain.storage, each, chain.layout)
    )


def check_rows(file: ShardFile) -> None:
    """Read all pieces of one file and compare their digests.

    Raises:
        CheckpointError: names the damaged file.
    """
    if file.index.tables:
        for _ in _read_shard(file):
            pass


def _read_shard(
    file: ShardFile,
    passed: Collection[RowPlace] = (),
    table: int | None = None,
    *,
    with_ends: bool = True,
) -> Iterator[tuple[SavedSegment, RowBatch | Dropped | End]]:
    """Yield the pieces of one file, without segments that were `passed` or of other tables."""
    manifest, index, path = file.checkpoint.manifest, file.index, file.path
    position = sum(bucket_nbytes(file.layout, manifest, i) for i in index.bucket_ids)
    with typed_errors(file.storage, file.name, "read"), file.storage.open(file.name) as data:
        for record in index.tables:
            spec = manifest.tables[record.table]
            start, position = position, position + segment_nbytes(spec, record)
            is_asked = table is None or record.table == table
            if not is_asked or (file.rank, *record.place) in passed:
                continue
            place = SavedSegment(file.rank, record)
            data.seek(start)
            dropped: list[Dropped] = []
            for description in record.pieces:
                piece = read_piece(data, path, spec, record, description)
                if isinstance(piece, RowBatch):
                    yield place, piece
                else:  # an id that was dropped and pushed again is in both: its row is newer
                    dropped.append(piece)
            for gone in dropped:
                yield place, gone
            if with_ends:
                counts = read_counts(data, path, spec, record)
                yield place, End(record.version, counts, record.ages)
