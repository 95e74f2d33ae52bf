"""Files of lines as a source: text, one column `value`; what text and CSV share.

Covers: LineSource (files → blocks of lines, what becomes of bad ones), TextSource.
Does not: batch or shuffle (direct), find lines (text_lines), parse CSV (csv_source).
Threads: one reader.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, Protocol, cast

import numpy as np

from feeding.bad_data import BadData
from feeding.column_cuts import Columns
from feeding.data_files import data_files
from feeding.errors import DataError, FileChanged
from feeding.filesystem.choose import DEFAULTS, filesystem_for
from feeding.filesystem.interface import FileStatus, Path, RangeReader
from feeding.filesystem.readahead import ReadAhead
from feeding.schema import ColumnSpec, Group, Schema
from feeding.splits import SourceFile, Split
from feeding.text_lines import GzipBytes, LineBlock, LineLimits, LineReader, is_gzip

_GZIP_NAMES = (".gz", ".gzip")


class Parser(Protocol):
    """Makes columns of the lines of one file."""

    def __call__(self, block: LineBlock) -> Columns:
        """Return the rows of a block.

        Raises:
            DataError: some line is not what it should be.
        """


class LineSource:
    """Files of lines; see direct.Source.

    Args:
        paths: files, directories or patterns.
        bad: what becomes of bad lines and damaged files.
        limits: what a file may ask for.
        can_cut: whether a line end always ends a row: then files are read from the middle on.
    """

    def __init__(
        self,
        paths: Path | Iterable[Path],
        *,
        bad: BadData | None = None,
        limits: LineLimits | None = None,
        can_cut: bool = True,
    ) -> None:
        self.bad = bad or BadData()
        self._limits = limits or LineLimits()
        self._can_cut = can_cut
        self.listed = data_files(paths, can_be_cut=self._may_be_cut)
        self._sizes = {file.path: file.size_bytes for file in self.listed}

    @property
    def num_skipped(self) -> int:
        """Bad lines, and files given up, so far."""
        return self.bad.num_skipped

    def files(self) -> Sequence[SourceFile]:
        """See direct.Source."""
        return self.listed

    def opened(self, path: str) -> RangeReader:
        """Open a file that was listed.

        Raises:
            FileChanged: it has another size now.
        """
        file = filesystem_for(path).open(path)
        if file.size_bytes != self._sizes[path]:
            file.close()
            raise FileChanged(
                f"{path} had {self._sizes[path]} bytes when it was listed, now "
                f"{file.size_bytes}; train on files that are not written to any more"
            )
        return file

    def stream(self, file: RangeReader, start: int = 0) -> BinaryIO:
        """Return a file's bytes without compression, from the byte before `start` on."""
        ahead = ReadAhead(file, DEFAULTS, begin=max(start - 1, 0))
        if start or not is_gzip(file.read_range(0, 2)):
            return cast(BinaryIO, ahead)
        return cast(BinaryIO, GzipBytes(ahead, file.path, self._limits))

    def blocks(self, file: RangeReader, span: tuple[int, int | None] = (0, None)) -> LineReader:
        """Return a reader of the lines that begin in a range."""
        stream = self.stream(file, span[0])
        if isinstance(stream, GzipBytes):
            span = (0, None)
        return LineReader(stream, file.path, span=span, limits=self._limits)

    def rows(self, split: Split, file: RangeReader, parse: Parser) -> Iterator[Columns]:
        """Yield the rows of a split of an open file; bad lines are left out if that is said."""
        if split.start and is_gzip(file.read_range(0, 2)):
            return  # whoever reads its beginning reads all of it
        try:
            for block in self.blocks(file, (split.start, split.stop)).blocks():
                yield from self._parsed(block, file.path, parse)
        except DataError as error:
            self.bad.skip(file.path, file.size_bytes, error)

    def _parsed(self, block: LineBlock, path: str, parse: Parser) -> Iterator[Columns]:
        """Yield a block's rows, in parts if some line is bad."""
        try:
            columns = parse(block)
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

    def _may_be_cut(self, status: FileStatus) -> bool:
        return self._can_cut and not status.path.endswith(_GZIP_NAMES)


class TextSource(LineSource):
    """Lines as text, without their ends (LF or CR LF); see direct.Source."""

    schema = Schema((ColumnSpec("value", "str", "str"),), Group("dict", ("value",), (None,)))

    def read(self, split: Split) -> Iterator[Columns]:
        """See direct.Source."""
        with contextlib.closing(self.opened(split.path)) as file:
            yield from self.rows(split, file, _lines)


def _lines(block: LineBlock) -> Columns:
    try:
        text = block.data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"it is no UTF-8: {error.reason}") from None
    if block.first_byte == 0:
        text = text.removeprefix("\ufeff")
    if "\r" in text:
        text = text.replace("\r\n", "\n").removesuffix("\r")
    lines = text.removesuffix("\n").split("\n")
    out = np.empty(len(lines), object)
    out[:] = lines
    return (out,)
