"""Row counts: files whose rows were counted once, so that shares are exact to the row.

    files ─► pieces (32 MiB; an unsplittable file is one piece) ─► one worker counts each piece
          ─► `SourceFile.piece_rows` ─► splits of rows within a piece, found by skipping rows

Covers: who counts which pieces, rows of a piece, pieces whose count has changed.
Does not: know formats (formats), ask workers (tfos.reading.row_counts).
Threads: one reader.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from feeding.columnar.ops import Columns
from feeding.columnar.schema import Schema
from feeding.errors import FileChanged
from feeding.reading.runs import Source
from feeding.reading.splits import SourceFile, Split, byte_pieces


@dataclass(frozen=True, slots=True)
class PieceRows:
    """Rows `start` to `stop`, `stop` excluded, of a piece in which `counted` rows begin."""

    piece: Split
    """Byte range of a file."""
    start: int
    stop: int
    counted: int

    def within(self, first: int, count: int) -> tuple[int, int] | None:
        """Return which rows of a block are wanted.

        Args:
            first: number of the block's first row in the piece.
            count: rows of the block.

        Returns:
            (start, stop) within the block; None if it has no wanted row.
        """
        start, stop = max(self.start - first, 0), min(self.stop - first, count)
        return (start, stop) if start < stop else None

    def is_read(self, at: int) -> bool:
        """Return whether reading may stop at a row; after a piece's last row, `check` follows."""
        return self.stop <= at and self.stop < self.counted

    def check(self, found: int) -> None:
        """Compare the count with the rows found in the whole piece.

        Raises:
            FileChanged: the numbers differ.
        """
        if found != self.counted:
            piece = self.piece
            raise FileChanged(
                f"{piece.path}, bytes {piece.start} to {piece.stop}: {self.counted} rows were "
                f"counted, now it has {found}; read only files that are no longer written"
            )


class Countable(Source, Protocol):
    """A source whose rows can be counted without decoding them."""

    def count(self, piece: Split) -> int:
        """Return the number of rows that begin in a byte range; of a compressed file, all rows.

        Counts also rows that turn out to be damaged when they are decoded.

        Raises:
            DataError: a file is damaged and the policy is to fail.
            OSError: the file cannot be read, or has changed since it was listed.
        """

    def read_rows(self, wanted: PieceRows) -> Iterator[Columns]:
        """Yield rows of a piece as columns, in blocks, as `read` does.

        Raises:
            FileChanged: the number of rows differs from the count.
        """


class CountedSource:
    """A source of the same rows with the counts of its pieces; see runs.Source.

    Args:
        source: the files.
        rows: count of each of `pieces_of(source.files())`.
    """

    def __init__(self, source: Countable, rows: Iterable[int]) -> None:
        self._source = source
        counts = iter(rows)
        self._pieces = {file.path: byte_pieces(file) for file in source.files()}
        self._files = tuple(
            dataclasses.replace(
                file, piece_rows=tuple(itertools.islice(counts, len(self._pieces[file.path])))
            )
            for file in source.files()
        )
        self._rows = {file.path: file.piece_rows or () for file in self._files}

    @property
    def schema(self) -> Schema:
        """See runs.Source."""
        return self._source.schema

    @property
    def num_skipped(self) -> int:
        """See runs.Source."""
        return self._source.num_skipped

    def files(self) -> Sequence[SourceFile]:
        """See runs.Source."""
        return self._files

    def read(self, split: Split) -> Iterator[Columns]:
        """See runs.Source."""
        number = split.piece or 0
        piece, counted = self._pieces[split.path][number], self._rows[split.path][number]
        return self._source.read_rows(PieceRows(piece, split.start, split.stop, counted))


def pieces_of(files: Iterable[SourceFile]) -> list[Split]:
    """Return all pieces of all files, in order."""
    return [piece for file in files for piece in byte_pieces(file)]


def counting_share(pieces: Sequence[Split], worker: int, num_workers: int) -> range:
    """Return the indexes of the pieces that one worker counts: consecutive, of even bytes.

    Args:
        pieces: pieces of all files.
        worker: from 0.
        num_workers: workers that share the counting.
    """
    total = sum(piece.size for piece in pieces)
    ends = itertools.accumulate(piece.size for piece in pieces)
    owners = [
        (2 * end - piece.size) * num_workers // (2 * total)
        for piece, end in zip(pieces, ends, strict=True)
    ]
    mine = [number for number, owner in enumerate(owners) if owner == worker]
    return range(mine[0], mine[-1] + 1) if mine else range(0)
