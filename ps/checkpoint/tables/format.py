"""Format of tables in a shard's file: the index, and one piece at a time.

    segment after segment, in the manifest's order: pieces, then the counts of ids without a row
    a piece of rows: ids, versions, rows            a piece of dropped ids: ids

A *whole* segment holds all its rows; otherwise it holds changes since the base. An id that was
dropped and pushed again is among the dropped ones and has a row, which counts. Positions follow
from the index; each piece has a digest and at most ROWS_AT_ONCE rows, so no claim of a file takes
more memory than one piece.

Covers: records, sizes, checks, writing and reading a piece.
Does not: decide what to write (ps.checkpoint.snapshot) or fill tables
(ps.checkpoint.tables.restore), import numba.
Threads: none; every function is independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, BinaryIO, Protocol

import msgspec
import numpy as np

from ps.checkpoint.digest import Count, Digest, digest, refuse_nonfinite
from ps.errors import CheckpointError
from ps.manifest.manifest import Manifest
from ps.manifest.table_spec import MOST_CHOSEN_SEGMENTS, TableSpec
from ps.optim.row_rules import row_width
from ps.tables.eviction import MARKS
from ps.tables.rows import ROWS_AT_ONCE, Dropped, RowBatch

Array = np.ndarray[Any, Any]

MAX_COUNTS_NBYTES = 8 << 20
"""Size of the widest sketch of ps.tables.admission."""
Age = Annotated[float, msgspec.Meta(ge=0)]


class PieceRecord(msgspec.Struct, frozen=True, array_like=True):
    """One piece of a segment."""

    num_rows: Annotated[int, msgspec.Meta(ge=1, le=ROWS_AT_ONCE)]
    is_dropped: bool
    digest: Digest


class SegmentRecord(msgspec.Struct, frozen=True):
    """One segment of one table."""

    table: Count
    """Its number in the manifest."""
    segment: Count
    version: Count
    """Pushes that it has seen; also the step of the rule."""
    is_whole: bool
    pieces: tuple[PieceRecord, ...]
    counts_nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTS_NBYTES)]
    counts_digest: Digest
    ages: Annotated[tuple[tuple[Age, Count], ...], msgspec.Meta(max_length=MARKS + 2)] = ()
    """Seconds since marked versions, and the first version of each; see ps.tables.eviction."""

    @property
    def place(self) -> tuple[int, int]:
        """The table's number and the segment's."""
        return self.table, self.segment


class SegmentSource(Protocol):
    """A segment that is written: a ps.checkpoint.snapshot.SegmentSnapshot."""

    spec: TableSpec
    place: tuple[int, int]
    is_whole: bool
    version: int
    counts: Array
    ages: tuple[tuple[float, int], ...]

    def batches(self) -> Iterator[RowBatch | Dropped]:
        """Give the pieces; only then the other fields are right."""


def piece_nbytes(spec: TableSpec, piece: PieceRecord) -> int:
    """Return the bytes of a piece.

    Args:
        spec: the table.
        piece: the piece's entry in the index.
    """
    return piece.num_rows * (8 if piece.is_dropped else 16 + row_width(spec) * spec.itemsize)


def segment_nbytes(spec: TableSpec, record: SegmentRecord) -> int:
    """Return the bytes of a segment.

    Args:
        spec: the table.
        record: the segment's entry in the index.
    """
    return sum(piece_nbytes(spec, piece) for piece in record.pieces) + record.counts_nbytes


def write_segment(file: BinaryIO, source: SegmentSource) -> SegmentRecord:
    """Write a segment; one piece of it is in memory at a time.

    Args:
        file: open for writing, at the segment's position.
        source: yields the segment's rows.

    Raises:
        CheckpointError: a value is not finite.
    """
    pieces: list[PieceRecord] = []
    for batch in source.batches():
        if isinstance(batch, RowBatch):
            refuse_nonfinite(batch.rows, f"not saved: table {source.spec.name!r}")
            arrays = [batch.ids, batch.versions, batch.rows]
        else:
            arrays = [batch.ids]
        parts = [np.ascontiguousarray(array).data.cast("B") for array in arrays]
        pieces.append(PieceRecord(batch.ids.size, isinstance(batch, Dropped), digest(*parts)))
        for part in parts:
            file.write(part)
    counts = source.counts.tobytes()
    file.write(counts)
    at, number = source.place
    return SegmentRecord(
        at,
        number,
        source.version,
        source.is_whole,
        tuple(pieces),
        len(counts),
        digest(counts),
        source.ages,
    )


def num_segments(records: Sequence[SegmentRecord], table: int) -> int:
    """Return how many segments of a table a shard's file has.

    Args:
        records: the segments' entries in the index.
        table: its number in the manifest.
    """
    return sum(record.table == table for record in records)


def check_segments(
    path: str, manifest: Manifest, records: Sequence[SegmentRecord], *, is_delta: bool
) -> None:
    """Check that a shard has every segment of every table once, in order.

    Args:
        path: of the shard's file, for messages.
        manifest: has the tables.
        records: the segments' entries in the index.
        is_delta: whether rows may be missing, as in a delta checkpoint.
    """
    found = [record.place for record in records]
    counts = [num_segments(records, at) for at in range(len(manifest.tables))]
    expected = [
        (at, n)
        for at, (spec, count) in enumerate(zip(manifest.tables, counts, strict=True))
        for n in range(spec.segments or min(max(1, count), MOST_CHOSEN_SEGMENTS))
    ]
    if found != expected:
        raise CheckpointError(
            f"{path} has {len(found)} segments of tables {found[:5]}, the manifest has "
            f"{len(expected)} {expected[:5]}"
        )
    for record in records:
        if not is_delta and not record.is_whole:
            raise CheckpointError(
                f"{path}: segment {record.segment} of table {manifest.tables[record.table].name!r} "
                "is a delta in a full checkpoint"
            )


def read_piece(
    file: BinaryIO, path: str, spec: TableSpec, record: SegmentRecord, piece: PieceRecord
) -> RowBatch | Dropped:
    """Read the piece at the file's position, and check it.

    Args:
        file: open for reading, at the piece's position.
        path: path of the file, for messages.
        spec: the table.
        record: the segment's entry in the index.
        piece: the piece's entry.

    Raises:
        CheckpointError: it is damaged, or holds values that no table could have written.
    """
    what = f"segment {record.segment} of table {spec.name!r}"
    position = file.tell()
    data = read_checked(file, path, (piece_nbytes(spec, piece), piece.digest), what)
    split = 8 * piece.num_rows
    ids = np.frombuffer(data, np.int64, piece.num_rows)
    if int(ids.view(np.uint64).max()) > spec.largest_id:
        raise CheckpointError(f"{path}: {what} (byte {position}) has an id above {spec.largest_id}")
    if piece.is_dropped:
        return Dropped(ids)
    versions = np.frombuffer(data, np.int64, piece.num_rows, offset=split)
    if int(versions.min()) < 0 or int(versions.max()) > record.version:
        raise CheckpointError(
            f"{path}: {what} (byte {position}) has row versions {versions.min()}.."
            f"{versions.max()}, its own is {record.version}"
        )
    ordered = np.sort(ids)  # np.unique takes four times as long
    if (ordered[1:] == ordered[:-1]).any():
        raise CheckpointError(f"{path}: {what} (byte {position}) has an id twice in one piece")
    rows = np.frombuffer(data, spec.dtype, offset=2 * split)
    rows = rows.reshape(piece.num_rows, row_width(spec))
    refuse_nonfinite(rows, f"{path}: {what}")
    return RowBatch(ids, rows, versions)


def read_counts(file: BinaryIO, path: str, spec: TableSpec, record: SegmentRecord) -> bytes:
    """Read the counts at the file's position, and check their digest.

    Args:
        file: open for reading, at the counts' position.
        path: path of the file, for messages.
        spec: the table.
        record: the segment's entry in the index.
    """
    what = f"the counts of segment {record.segment} of table {spec.name!r}"
    return read_checked(file, path, (record.counts_nbytes, record.counts_digest), what)


def read_checked(file: BinaryIO, path: str, expected: tuple[int, str], what: str) -> bytes:
    """Read bytes of a known number and digest.

    Args:
        file: open for reading, at the right position.
        path: path of the file, for messages.
        expected: bytes and digest.
        what: names the part in messages.
    """
    nbytes, expected_digest = expected
    position = file.tell()
    data = file.read(nbytes)
    if len(data) != nbytes:
        raise CheckpointError(f"{path} ends inside {what}, which starts at byte {position}")
    if digest(data) != expected_digest:
        raise CheckpointError(
            f"{path} is damaged: the digest of {what} (from byte {position}) is {digest(data)}, "
            f"its index says {expected_digest}"
        )
    return data
