"""Reader of table rows in committed checkpoints, piece by piece from the newest step back.

The first entry that is read of an id is its final state: its row, or that it was dropped. So a
reader ignores older entries, and never holds more rows than were saved. Reading a segment ends at
the newest step of the chain that holds it whole.

Covers: reading through a chain of deltas, verifying.
Does not: know servers' tables (ps.checkpoint.table_restore), import numba.
Threads: none; every function is independent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from ps.checkpoint.format import Checkpoint, ShardIndex, bucket_nbytes
from ps.checkpoint.reader import Root, load_chain, load_indexes
from ps.checkpoint.storage import Storage, storage_at, typed_errors
from ps.checkpoint.table_format import SegmentRecord, read_counts, read_piece, segment_nbytes
from ps.manifest.manifest import Layout
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


def read_rows(
    root: Root,
    checkpoint: Checkpoint,
    *,
    servers: Collection[int] | None = None,
    above: int | None = None,
) -> Iterator[tuple[SavedSegment, RowBatch | Dropped | End]]:
    """Yield the tables' rows, of each id the newest first, with one piece in memory at a time.

    Args:
        root: the checkpoint directory.
        checkpoint: one that `read_manifest` returned.
        servers: ranks of the servers whose files to read; None: all.
        above: read only the steps of the chain that are newer than this one; None: all.

    Raises:
        CheckpointError: a file is damaged.
    """
    if not checkpoint.manifest.tables:
        return
    storage = storage_at(root)
    chain = [
        (each, load_indexes(storage, each))
        for each in load_chain(storage, checkpoint.step)
        if above is None or each.step > above
    ]
    first = _first_links(chain)
    for link, (each, indexes) in enumerate(chain):
        for server, (name, index) in enumerate(indexes):
            if servers is not None and server not in servers:
                continue
            for place, piece in _read_shard(storage, each, (server, name), index):
                is_older = link > first.get((server, *place.record.place), link)
                if not is_older and (link == 0 or not isinstance(piece, End)):
                    yield place, piece


def adds_changes_only(root: Root, checkpoint: Checkpoint, base: Checkpoint) -> bool:
    """Return whether the steps of a chain above `base` hold just what has changed since.

    Not if the chain does not contain `base`, or a segment was written whole since: then nobody
    knows which of its rows are gone.

    Args:
        root: the checkpoint directory.
        checkpoint: one that `read_manifest` returned.
        base: an older one.
    """
    storage = storage_at(root)
    chain = load_chain(storage, checkpoint.step)
    if all((each.step, each.save_id) != (base.step, base.save_id) for each in chain):
        return False
    newer = [each for each in chain if each.step > base.step]
    return all(
        each.is_delta and not any(record.is_whole for record in index.tables)
        for each in newer
        for _, index in load_indexes(storage, each)
    )


def check_step_rows(storage: Storage, checkpoint: Checkpoint) -> None:
    """Read all pieces of one step alone and compare their digests.

    Args:
        storage: the checkpoint root.
        checkpoint: the step to read.

    Raises:
        CheckpointError: names the first damaged file.
    """
    if not checkpoint.manifest.tables:
        return
    for server, (name, index) in enumerate(load_indexes(storage, checkpoint)):
        for _ in _read_shard(storage, checkpoint, (server, name), index):
            pass


def _first_links(
    chain: list[tuple[Checkpoint, list[tuple[str, ShardIndex]]]],
) -> dict[RowPlace, int]:
    """Return where in the chain, newest first, each segment is whole for the first time."""
    found: dict[RowPlace, int] = {}
    for link, (_, indexes) in enumerate(chain):
        for server, (_, index) in enumerate(indexes):
            for record in index.tables:
                if record.is_whole:
                    found.setdefault((server, *record.place), link)
    return found


def _read_shard(
    storage: Storage, checkpoint: Checkpoint, where: tuple[int, str], index: ShardIndex
) -> Iterator[tuple[SavedSegment, RowBatch | Dropped | End]]:
    server, name = where
    manifest = checkpoint.manifest
    layout = Layout.whole(manifest)
    path = storage.where(name)
    position = sum(bucket_nbytes(layout, manifest, i) for i in index.bucket_ids)
    with typed_errors(storage, name, "read"), storage.open(name) as file:
        for record in index.tables:
            spec = manifest.tables[record.table]
            place = SavedSegment(server, record)
            file.seek(position)
            dropped: list[Dropped] = []
            for description in record.pieces:
                piece = read_piece(file, path, spec, record, description)
                if isinstance(piece, RowBatch):
                    yield place, piece
                else:  # an id that was dropped and pushed again is in both: its row is newer
                    dropped.append(piece)
            for gone in dropped:
                yield place, gone
            yield place, End(record.version, read_counts(file, path, spec, record))
            position += segment_nbytes(spec, record)
