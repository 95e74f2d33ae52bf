"""Files whose rows were counted: dealt to the row, like those that know their rows themselves.

    files ─► pieces (32 MiB; what cannot be cut is one) ─► each is counted once, by one worker
          ─► `SourceFile.piece_rows` ─► splits of rows within a piece, found by passing those before

Covers: who counts what, rows of a piece, pieces that have other rows than were counted.
Does not: know formats (tfrecord_source, text_source, csv_source), ask workers
(tfos.reading.row_counts).
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
    """Rows `start` to `stop` of those that begin in a piece, of which `counted` were found."""

    piece: Split
    """Bytes of a file."""
    start: int
    stop: int
    counted: int

    def within(self, first: int, count: int) -> tuple[int, int] | None:
        """Return which of `count` rows from row `first` on are wanted; None: none of them."""
        start, stop = max(self.start - first, 0), min(self.stop - first, count)
        return (start, stop) if start < stop else None

    def is_read(self, at: int) -> bool:
        """Whether nothing is left to do at a row; the last rows are followed by `check`."""
        return self.stop <= at and self.stop < self.counted

    def check(self, found: int) -> None:
        """Compare the count with the rows that the whole piece has.

        Raises:
            FileChanged: they differ.
        """
        if found != self.counted:
            piece = self.piece
            raise FileChanged(
                f"{piece.path}, bytes {piece.start} to {piece.stop}: {self.counted} rows were "
                f"counted, now it has {found}; read files that are not written to any more"
            )


class Countable(Source, Protocol):
    """Files of a format whose rows can be counted without making columns of them."""

    def count(self, piece: Split) -> int:
        """Return how many rows begin in a range of bytes, of a compressed file in all of it.

        Rows that turn out to be damaged when they are read count too.

        Raises:
            DataError: a file is damaged and the policy is to fail.
            OSError: it cannot be read, or has another size than when it was listed.
        """

    def read_rows(self, wanted: PieceRows) -> Iterator[Columns]:
        """Yield rows of a piece as columns, some at a time; as `read` gives them.

        Raises:
            FileChanged: the piece has another number of rows than was counted.
        """


class CountedSource:
    """A source of the same rows that knows how many each piece has; see direct.Source.

    Args:
        source: the files.
        rows: of each of `pieces_of(source.files())`.
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
        """See direct.Source."""
        return self._source.schema

    def files(self) -> Sequence[SourceFile]:
        """See direct.Source."""
        return self._files

    def read(self, split: Split) -> Iterator[Columns]:
        """See direct.Source."""
        number = split.piece or 0
        piece, counted = self._pieces[split.path][number], self._rows[split.path][number]
        return self._source.read_rows(PieceRows(piece, split.start, split.stop, counted))


def pieces_of(files: Iterable[SourceFile]) -> list[Split]:
    """Return all pieces of files, in their order."""
    return [piece for file in files for piece in byte_pieces(file)]


def counting_share(pieces: Sequence[Split], worker: int, num_workers: int) -> range:
    """Return the numbers of the pieces that one worker counts: neighbours, about as many bytes."""
    total = sum(piece.size for piece in pieces)
    ends = itertools.accumulate(piece.size for piece in pieces)
    owners = [
        (2 * end - piece.size) * num_workers // (2 * total)
        for piece, end in zip(pieces, ends, strict=True)
    ]
    mine = [number for number, owner in enumerate(owners) if owner == worker]
    return range(mine[0], mine[-1] + 1) if mine else range(0)
