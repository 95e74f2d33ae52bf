"""Quotes of CSV: which bytes are within quotes, checked by a compiled pass over whole rows.

    value   text without a quote at its beginning, or " text " with each quote within it doubled
    escape  optional; within quotes, escape + quote is a quote, two escapes are one, and an escape
            before any other byte is itself; outside quotes it is text, as Spark writes it

Covers: Quotes: faults that pyarrow accepts silently, and escapes as doubled quotes.
Does not: cut files (quoted_rows), parse values (source).
Threads: any; pure, releases the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from feeding.columnar.chunk import Array
from feeding.errors import DataError
from feeding.formats.kernel_cache import kernel

_LF, _CR, _QUOTE = 10, 13, 34
BEGUN, _START, _PLAIN, _QUOTED, _ESCAPED, _CLOSED = range(6)
"""State before a byte: the row has no content, a value begins, within a value, within quotes, after
an escape, after a quote that closes a value unless another follows."""
_FINE, _OPEN, _GOES_ON = range(3)
"""Faults: none, a quote is not closed, text follows a closing quote."""


@dataclass(frozen=True, slots=True)
class Quotes:
    """How values are quoted.

    Args:
        delimiter: between values.
        escape: escapes quotes within quotes; None: quotes are only doubled.
        across_lines: whether values may hold line ends.
        noun: what a value is, for messages.
    """

    delimiter: str
    escape: str | None = None
    across_lines: bool = False
    noun: str = "value"

    @property
    def codes(self) -> tuple[int, int]:
        """Delimiter and escape as bytes; -1: no escape."""
        return ord(self.delimiter), -1 if self.escape is None else ord(self.escape)

    def doubled(self, data: bytes) -> bytes:
        """Return rows with every quote within a value doubled.

        Args:
            data: whole rows.

        Raises:
            DataError: a quote is not closed, or text follows a closing quote.
        """
        if b'"' not in data:
            return data
        delimiter, escape = self.codes
        out = np.empty(0 if escape < 0 else len(data), np.uint8)
        buffer = np.frombuffer(data, np.uint8)
        fault, length = _pass_values(buffer, out, delimiter, escape, self.across_lines)
        if fault != _FINE:
            raise DataError(self._told(fault, data))
        return data if escape < 0 else out[:length].tobytes()

    def _told(self, fault: int, data: bytes) -> str:
        if fault == _GOES_ON:
            text = (
                f"text follows the closing quote of a {self.noun}; {self.delimiter!r} or the line "
                "end must follow"
            )
        elif self.across_lines:
            text = f"a quoted {self.noun} does not end: all that follows, {len(data)} bytes, is it"
        else:
            text = f"a quoted {self.noun} does not end on its line"
            if self.noun == "value":
                text += "; if values may hold line ends, pass quoted_newlines=True"
        if self.escape is None and b'\\"' in data:
            text += "; if the file escapes quotes by a backslash, as Spark does, pass escape='\\\\'"
        return text


@kernel
def _after(phase: int, byte: int, delimiter: int, escape: int) -> Any:
    """Return the state after a byte."""
    if phase == _QUOTED:
        if byte == escape:
            return _ESCAPED
        return _CLOSED if byte == _QUOTE else _QUOTED
    if phase == _ESCAPED or (phase == _CLOSED and byte == _QUOTE):
        return _QUOTED
    if byte == _LF:
        return BEGUN
    if byte == _CR:
        return BEGUN if phase == BEGUN else _START
    if byte == delimiter:
        return _START
    return _QUOTED if byte == _QUOTE and phase in (BEGUN, _START) else _PLAIN


@kernel
def pass_rows(
    buffer: Array, begin: int, phase: int, delimiter: int, escape: int, most_rows: int
) -> Any:
    """Count and skip rows; text after a closing quote belongs to its value.

    Args:
        buffer: uint8.
        begin: first byte.
        phase: state before it.
        delimiter: byte between values.
        escape: byte, or -1.
        most_rows: stop after this many.

    Returns:
        (rows whose line end was read, offset after the last line end or 0, state at the end).
    """
    rows, last, at = 0, 0, begin
    while at < buffer.size and rows < most_rows:
        after = _after(phase, buffer[at], delimiter, escape)
        at += 1
        if after == BEGUN and buffer[at - 1] == _LF:
            rows += phase != BEGUN
            last = at
        phase = after
    return rows, last, phase


@kernel
def _pass_values(buffer: Array, out: Array, delimiter: int, escape: int, across_lines: bool) -> Any:
    """Check the quotes of whole rows; with an escape, write the rows with doubled quotes to `out`.

    Args:
        buffer: uint8.
        out: uint8, as large, if there is an escape.
        delimiter: byte between values.
        escape: byte, or -1.
        across_lines: whether values may hold line ends.

    Returns:
        (fault, bytes written).
    """
    phase, length = BEGUN, 0
    for at in range(buffer.size):
        byte = buffer[at]
        after = _after(phase, byte, delimiter, escape)
        if phase == _CLOSED and after == _PLAIN:
            return _GOES_ON, length
        if byte == _LF and after == _QUOTED and not across_lines:
            return _OPEN, length
        if escape >= 0 and after != _ESCAPED:
            if phase == _ESCAPED and byte != escape:
                out[length] = _QUOTE if byte == _QUOTE else escape
                length += 1
            out[length] = byte
            length += 1
        phase = after
    return _OPEN if phase in (_QUOTED, _ESCAPED) else _FINE, length
