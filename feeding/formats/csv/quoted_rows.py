"""Quoted rows: blocks of whole CSV rows whose values may hold line ends.

Covers: QuotedRows (counts and finds rows), QuotedRowReader, QuotedBlock.
Does not: check quotes (quotes), parse values (source).
Threads: a reader belongs to one thread.
Memory: one block, or one row that is longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO, Self

import numpy as np

from feeding.config import MIB
from feeding.errors import DataError
from feeding.formats.csv.quotes import BEGUN, Quotes, pass_rows
from feeding.formats.text.lines import LineBlock, LineLimits, LineReader
from feeding.formats.text.row_index import BOM

_BLOCK_BYTES = MIB // 2
"""Fits the CPU's cache."""
_ALL = 1 << 62


@dataclass(frozen=True, slots=True)
class QuotedRows:
    """Defines which bytes of a file are a row; see text.row_index.RowLines.

    Args:
        quotes: how values are quoted.
        header: whether the file's first row is a header and no row.
    """

    quotes: Quotes
    header: bool = False

    def count(self, stream: BinaryIO, span: tuple[int, int | None]) -> int:
        """Return the number of rows of a whole file.

        Args:
            stream: the file's bytes.
            span: all of them.
        """
        buffer = np.empty(_BLOCK_BYTES, np.uint8)
        rows, phase, at = 0, BEGUN, span[0]
        while filled := stream.readinto(buffer.data):  # type: ignore[attr-defined]
            begin = _begin(buffer[: len(BOM)].tobytes(), at)
            found, _, phase = pass_rows(buffer[:filled], begin, phase, *self.quotes.codes, _ALL)
            rows += found
            at += filled
        return max(rows + (phase != BEGUN) - self.header, 0)

    def in_block(self, block: LineBlock) -> int:
        """Return the number of rows of a block."""
        return max(self.with_header(block) - self._num_headers(block), 0)

    def with_header(self, block: LineBlock) -> int:
        """Return the number of rows of a block, its header included."""
        rows, _, phase = self._passed(block, _ALL)
        return int(rows + (phase != BEGUN))

    def rows(self, block: LineBlock, start: int, stop: int) -> LineBlock:
        """Return rows `start` to `stop`, `stop` excluded, of a block.

        Args:
            block: whole rows.
            start: number of the first row within the block.
            stop: number of the row after the last.
        """
        more = self._num_headers(block)
        first = self.end_of(block, start + more) if start else 0
        return block.part(first, self.end_of(block, stop + more))

    def end_of(self, block: LineBlock, num_rows: int) -> int:
        """Return the offset after this many rows of a block, its header included.

        Args:
            block: whole rows.
            num_rows: at most the block's.
        """
        rows, at, _ = self._passed(block, num_rows)
        return int(at) if rows == num_rows else len(block.data)

    def _passed(self, block: LineBlock, most_rows: int) -> Any:
        data = np.frombuffer(block.data, np.uint8)
        begin = _begin(block.data, block.first_byte)
        return pass_rows(data, begin, BEGUN, *self.quotes.codes, most_rows)

    def _num_headers(self, block: LineBlock) -> int:
        return int(self.header and not block.first_byte)


@dataclass(frozen=True, slots=True)
class QuotedBlock(LineBlock):
    """Consecutive whole rows; see LineBlock."""

    found_by: QuotedRows

    def halves(self) -> tuple[Self, Self] | None:
        """Return the rows as two blocks; None if there is only one."""
        num_rows = self.found_by.with_header(self)
        if num_rows < 2:
            return None
        middle = self.found_by.end_of(self, num_rows // 2)
        return self.part(0, middle), self.part(middle, len(self.data))


class QuotedRowReader(LineReader):
    """The rows of one file.

    Args:
        file: the file's bytes; the caller closes it.
        name: for messages.
        rows: find the rows.
        limits: bound rows and blocks.
    """

    def __init__(self, file: BinaryIO, name: str, rows: QuotedRows, limits: LineLimits) -> None:
        super().__init__(file, name, limits=limits)
        self._rows = rows
        self._phase = BEGUN
        self._num_passed = 0
        """Held bytes that were passed, all of a row that has not ended."""

    def _end_of_lines(self, held: bytes, at: int, *, is_over: bool) -> int:
        """Return the number of held bytes that are whole rows."""
        if is_over:
            return len(held)
        if not at and len(held) < len(BOM):
            return 0
        begin = self._num_passed or _begin(held, at)
        codes = self._rows.quotes.codes
        data = np.frombuffer(held, np.uint8)
        _, end, self._phase = pass_rows(data, begin, self._phase, *codes, _ALL)
        self._num_passed = len(held) - end
        if not end and len(held) > self._limits.max_line_bytes:
            raise DataError(
                f"{self._name}: the row at byte {at} has more than {len(held)} bytes, "
                f"max_line_bytes is {self._limits.max_line_bytes}. The rest of the file is left "
                "out; look for an unclosed quote, or pass limits=LineLimits(max_line_bytes=…)"
            )
        return int(end)

    def _block(self, data: bytes, at: int, line: int | None) -> LineBlock:
        return QuotedBlock(data, at, line, self._rows)


def _begin(data: bytes, at: int) -> int:
    """Return the bytes to skip at the file's beginning."""
    return len(BOM) if not at and data.startswith(BOM) else 0
