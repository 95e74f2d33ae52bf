"""Text source: files of lines as columns; what text and CSV sources share.

Covers: LineSource (files to blocks of lines, policy for bad lines), TextSource (one column
`value`).
Does not: batch or shuffle (reading.reader), find lines (lines), parse CSV (formats.csv.source).
Threads: one reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, Protocol, cast

import numpy as np

from feeding.columnar.ops import Columns, num_rows
from feeding.columnar.schema import ColumnSpec, Schema
from feeding.errors import DataError
from feeding.filesystem.interface import Path, RangeReader
from feeding.filesystem.readahead import ReadAhead
from feeding.filesystem.registry import DEFAULTS
from feeding.formats.text.lines import GzipBytes, LineBlock, LineLimits, LineReader
from feeding.formats.text.row_index import RowLines
from feeding.reading.bad_records import BadData
from feeding.reading.discover import data_files, is_gzip, is_plain
from feeding.reading.listed import open_listed
from feeding.reading.partitions import PartitionColumn, partition_columns
from feeding.reading.row_counts import PieceRows
from feeding.reading.splits import SourceFile, Split

EVERY_LINE = RowLines()
Parser = Callable[[LineBlock], Columns]
"""Returns the rows of a block of one file; raises DataError for a malformed line."""


class RowFinder(Protocol):
    """Defines which bytes of a file are a row; see RowLines."""

    def count(self, stream: BinaryIO, span: tuple[int, int | None]) -> int:
        """See RowLines."""

    def in_block(self, block: LineBlock) -> int:
        """See RowLines."""

    def rows(self, block: LineBlock, start: int, stop: int) -> LineBlock:
        """See RowLines."""


class LineSource:
    """Files of lines; see reading.runs.Source.

    Args:
        paths: files, directories or patterns.
        bad: policy for bad lines and damaged files.
        limits: bounds of lines and compression.
        can_split: whether a line end always ends a row, so that a file can be read in pieces.
        lines: which lines are rows.
        partitions: whether `directories` has columns.
    """

    def __init__(
        self,
        paths: Path | Iterable[Path],
        *,
        bad: BadData | None = None,
        limits: LineLimits | None = None,
        can_split: bool = True,
        lines: RowFinder = EVERY_LINE,
        partitions: bool = False,
    ) -> None:
        self.bad = bad or BadData()
        self._lines = lines
        self._limits = limits or LineLimits()
        self.listed = data_files(paths, is_splittable=is_plain if can_split else lambda _: False)
        self._by_path = {file.path: file for file in self.listed}
        self.directories: dict[str, PartitionColumn] = (
            partition_columns(self.listed) if partitions else {}
        )
        """Columns of directories, which `read` leaves out, by name."""

    @property
    def num_skipped(self) -> int:
        """Bad lines and files that were skipped so far."""
        return self.bad.num_skipped

    def files(self) -> Sequence[SourceFile]:
        """See reading.runs.Source."""
        return self.listed

    def opened(self, path: str) -> RangeReader:
        """Open a file that was listed.

        Raises:
            FileChanged: the file has another size or version now.
        """
        return open_listed(self._by_path[path])

    def stream(self, file: RangeReader, start: int = 0, ahead_until: int | None = None) -> BinaryIO:
        """Return a file's bytes, decompressed, from the byte before `start` on.

        Args:
            file: the open file.
            start: byte of the file, 0 for compressed ones.
            ahead_until: see ReadAhead.
        """
        ahead = ReadAhead(file, DEFAULTS, begin=max(start - 1, 0), ahead_until=ahead_until)
        if start or not is_gzip(file.read_range(0, 2)):
            return cast(BinaryIO, ahead)
        return cast(BinaryIO, GzipBytes(ahead, file.path, self._limits))

    def blocks(
        self,
        file: RangeReader,
        span: tuple[int, int | None] = (0, None),
        ahead_until: int | None = None,
    ) -> LineReader:
        """Return a reader of the lines that begin in a range.

        Args:
            file: open file; the caller closes it.
            span: first byte of the range, and its end, excluded; None: the file's end.
            ahead_until: see ReadAhead; None: the range's end.
        """
        stream = self.stream(file, span[0], span[1] if ahead_until is None else ahead_until)
        if isinstance(stream, GzipBytes):
            span = (0, None)
        return LineReader(stream, file.path, span=span, limits=self._limits)

    def rows(self, split: Split, parse: Parser) -> Iterator[Columns]:
        """Yield the rows of a split; the policy may skip bad lines.

        Args:
            split: split of a file.
            parse: makes columns of lines.
        """
        with self.opened(split.path) as file:
            if _is_read_elsewhere(split, file):
                return
            try:
                for block in self.blocks(file, (split.start, split.stop)).blocks():
                    yield from self._parsed(block, file.path, parse)
            except DataError as error:
                self.bad.skip(file.path, file.size_bytes, error)

    def count(self, piece: Split) -> int:
        """See reading.row_counts.Countable."""
        with self.opened(piece.path) as file:
            if _is_read_elsewhere(piece, file):
                return 0
            stream = self.stream(file, piece.start, piece.stop)
            stop = None if isinstance(stream, GzipBytes) else piece.stop
            try:
                return self._lines.count(stream, (piece.start, stop))
            except DataError:
                return self._count_readable(piece, file)

    def _count_readable(self, piece: Split, file: RangeReader) -> int:
        """Return the number of rows before damaged data, as a reader finds it."""
        rows = 0
        try:
            for block in self.blocks(file, (piece.start, piece.stop)).blocks():
                rows += self._lines.in_block(block)
        except DataError as error:
            self.bad.skip(file.path, file.size_bytes, error)
        return rows

    def rows_of(self, wanted: PieceRows, parse: Parser) -> Iterator[Columns]:
        """Yield some rows of a piece; lines of other rows are not parsed.

        Args:
            wanted: the piece, and which of its rows.
            parse: makes columns of lines.
        """
        piece, at = wanted.piece, 0
        with self.opened(piece.path) as file:
            try:
                for block in self.blocks(file, (piece.start, piece.stop)).blocks():
                    first, at = at, at + self._lines.in_block(block)
                    if part := wanted.within(first, at - first):
                        mine = block if part == (0, at - first) else self._lines.rows(block, *part)
                        yield from self._parsed(mine, file.path, parse)
                    if wanted.is_read(at):
                        return
            except DataError as error:
                self.bad.skip(file.path, file.size_bytes, error)
                return
            wanted.check(at)

    def _parsed(self, block: LineBlock, path: str, parse: Parser) -> Iterator[Columns]:
        """Yield a block's rows; bisect it to find bad lines; a line of several rows is bad, too."""
        try:
            columns = parse(block)
            if b"\r" in block.data and num_rows(columns) > self._lines.in_block(block):
                raise DataError("a carriage return ends a row within it; lines end in LF or CR LF")
        except DataError as error:
            halves = block.halves()
            if halves is None:
                text = f"{path}: {block.place}: {error}"
                self.bad.skip(path, block.first_byte, DataError(text))
                return
        else:
            yield columns
            return
        for half in halves:
            yield from self._parsed(half, path, parse)


class TextSource(LineSource):
    """Lines as text, without their ends (LF or CR LF); see reading.runs.Source."""

    schema = Schema.of_dict([ColumnSpec("value", "str", "str")])

    def read(self, split: Split) -> Iterator[Columns]:
        """See reading.runs.Source."""
        return self.rows(split, _lines)

    def read_rows(self, wanted: PieceRows) -> Iterator[Columns]:
        """See reading.row_counts.Countable."""
        return self.rows_of(wanted, _lines)


def _is_read_elsewhere(split: Split, file: RangeReader) -> bool:
    """Return whether a file is compressed: the reader of its first split reads all of it."""
    return split.start > 0 and is_gzip(file.read_range(0, 2))


def _lines(block: LineBlock) -> Columns:
    try:
        text = block.data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"it is not UTF-8: {error.reason}") from None
    if block.first_byte == 0:
        text = text.removeprefix("\ufeff")
    has_end = text.endswith("\n")
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    lines = text.removesuffix("\n").split("\n")
    if not has_end:
        lines[-1] = lines[-1].removesuffix("\r")
    out = np.empty(len(lines), object)
    out[:] = lines
    return (out,)
