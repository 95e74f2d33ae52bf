"""Row index of a text file: counts and finds the lines that are rows, without parsing them.

Covers: RowLines.
Does not: read lines (lines), parse them (source, formats.csv.source).
Threads: any; the compiled loop releases the GIL.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from feeding.columnar.chunk import Array
from feeding.config import MIB
from feeding.formats.kernel_cache import kernel
from feeding.formats.text.lines import LineBlock

BOM = b"\xef\xbb\xbf"
_LF, _CR = 10, 13
_PASSED, _BEGUN, _RETURNS, _CONTENT, _OVER = range(5)
"""State of the current line: is no row, has no byte so far, has carriage returns only, has content;
or the range has ended."""
_BLOCK_BYTES = MIB // 2
"""Fits the CPU's cache."""

_ALL = 1 << 62


@dataclass(frozen=True, slots=True)
class RowLines:
    """Defines which lines of a file are rows.

    Args:
        blank: whether lines without content, or with carriage returns only, are rows.
        header: whether the file's first line is a header and no row.
    """

    blank: bool = True
    header: bool = False

    def count(self, stream: BinaryIO, span: tuple[int, int | None]) -> int:
        """Return the number of rows that begin in a range.

        Args:
            stream: the file's bytes from the one before the range on.
            span: first byte of the range, and its end, excluded; None: the file's end.
        """
        start, stop = span
        buffer = np.empty(_BLOCK_BYTES, np.uint8)
        room = sys.maxsize if stop is None else stop - max(start - 1, 0)
        rows, at = 0, start
        phase = _PASSED if start else self._first_phase(0)
        while phase != _OVER and (filled := stream.readinto(buffer.data)):  # type: ignore[attr-defined]
            begin = self._begin(buffer[:filled], at)
            found, _, phase = _pass_all(buffer, begin, filled, room, phase, self.blank)
            rows += found
            room -= filled
            at += filled
        return rows + self._has_ended(phase)

    def in_block(self, block: LineBlock) -> int:
        """Return the number of rows of a block."""
        data, begin, phase = self._opened(block)
        found, _, phase = _pass_all(data, begin, len(data), sys.maxsize, phase, self.blank)
        return int(found + self._has_ended(phase))

    def rows(self, block: LineBlock, start: int, stop: int) -> LineBlock:
        """Return the lines of rows `start` to `stop`, `stop` excluded, of a block.

        Args:
            block: whole lines.
            start: number of the first row within the block.
            stop: number of the row after the last.
        """
        first = self._end_of(block, start) if start else 0
        return block.part(first, self._end_of(block, stop))

    def _end_of(self, block: LineBlock, num_rows: int) -> int:
        data, begin, phase = self._opened(block)
        _, at, _ = _pass_rows(data, begin, len(data), sys.maxsize, phase, self.blank, num_rows)
        return int(at)

    def _opened(self, block: LineBlock) -> tuple[Array, int, int]:
        data, at = np.frombuffer(block.data, np.uint8), block.first_byte
        return data, self._begin(data, at), self._first_phase(at)

    def _first_phase(self, at: int) -> int:
        return _PASSED if self.header and not at else _BEGUN

    def _begin(self, data: Array, at: int) -> int:
        """Return the bytes to skip at the file's beginning; a blank line after a BOM is blank."""
        return len(BOM) if not (at or self.blank) and data[: len(BOM)].tobytes() == BOM else 0

    def _has_ended(self, phase: int) -> bool:
        """Return whether the file's last line is a row without a line end."""
        return phase == _CONTENT or (self.blank and phase == _RETURNS)


@kernel
def _pass_rows(  # noqa: PLR0913 - a compiled function takes no object
    buffer: Array, begin: int, filled: int, room: int, phase: int, blank: bool, most_rows: int
) -> Any:
    """Count and skip the lines of buffer[begin:filled].

    Args:
        buffer: uint8.
        begin: first byte.
        filled: end, excluded.
        room: lines that begin at or after this byte do not count.
        phase: state of the line at `begin`.
        blank: whether lines without content are rows.
        most_rows: stop after this many.

    Returns:
        (rows whose line end was read, offset of the next line, its state).
    """
    rows, at = 0, begin
    while at < filled and rows < most_rows and phase != _OVER:
        if phase in (_PASSED, _CONTENT):
            while at < filled and buffer[at] != _LF:
                at += 1
            if at == filled:
                break
        byte = buffer[at]
        at += 1
        if byte == _LF:
            if phase == _CONTENT or (blank and phase != _PASSED):
                rows += 1
            phase = _BEGUN if at < room else _OVER
        else:
            phase = _RETURNS if byte == _CR else _CONTENT
    return rows, at, phase


@kernel
def _pass_all(buffer: Array, begin: int, filled: int, room: int, phase: int, blank: bool) -> Any:
    """Like `_pass_rows` of all rows, but vectorised where no line can be blank."""
    if begin < filled < room and phase not in (_PASSED, _OVER):
        first, last = buffer[begin], buffer[filled - 1]
        ends, doubts = int(first == _LF), int(first in (_LF, _CR)) + int(last == _CR)
        here, before = buffer[begin + 1 : filled], buffer[begin : filled - 1]
        for at in range(here.size):
            is_end = here[at] == _LF
            ends += is_end
            doubts += is_end & ((before[at] == _LF) | (before[at] == _CR))
        if blank or not doubts:
            return ends, filled, _BEGUN if last == _LF else _CONTENT
    return _pass_rows(buffer, begin, filled, room, phase, blank, _ALL)
