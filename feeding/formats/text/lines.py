"""Line reader: text files in blocks of whole lines, from any byte on.

Covers: LineReader, LineBlock; decompression of gzip files (GzipBytes); limits.
Does not: open files (filesystem), parse lines (source, formats.csv.source).
Threads: a reader belongs to one thread.
Memory: one block, or one line that is longer.
"""

from __future__ import annotations

import dataclasses
import gzip as gzip_format
import io
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Self, cast

from feeding.config import MIB, check_count
from feeding.errors import DataError
from feeding.filesystem.readahead import ReadAhead
from feeding.reading.gzip_bound import beyond_ratio
from rpc.field_texts import with_field_texts


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """Bounds of what a file makes its reader allocate."""

    max_line_bytes: int = 64 * MIB
    """Longer lines are refused."""
    max_gzip_ratio: int = 250
    """Most bytes per compressed byte of a gzip file, over the whole file."""
    block_bytes: int = 2 * MIB
    """Bytes read and parsed at a time."""

    def __post_init__(self) -> None:
        for name in ("max_line_bytes", "max_gzip_ratio", "block_bytes"):
            check_count(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Consecutive whole lines; the file's last one may lack its end.

    Args:
        data: the lines.
        first_byte: offset of the lines in the file, after decompression.
        first_line: number of the first line in the file, from 1; None if reading began within the
            file.
    """

    data: bytes
    first_byte: int
    first_line: int | None

    @property
    def place(self) -> str:
        """Where the block begins, for messages."""
        return f"byte {self.first_byte}" if self.first_line is None else f"line {self.first_line}"

    def part(self, first: int, last: int) -> Self:
        """Return the lines between two offsets of the block.

        Args:
            first: where a line begins.
            last: where one ends.
        """
        line = self.first_line
        if line is not None:
            line += self.data.count(b"\n", 0, first)
        return dataclasses.replace(
            self, data=self.data[first:last], first_byte=self.first_byte + first, first_line=line
        )

    def halves(self) -> tuple[Self, Self] | None:
        """Return the lines as two blocks; None if there is only one."""
        middle = self.data.rfind(b"\n", 0, len(self.data) // 2) + 1
        middle = middle or self.data.find(b"\n") + 1
        if not 0 < middle < len(self.data):
            return None
        return self.part(0, middle), self.part(middle, len(self.data))


class LineReader:
    """The lines of one file that begin in one range of its bytes.

    Readers of adjacent ranges return every line exactly once.

    Args:
        file: the file's bytes from the one before the range on; the caller closes it.
        name: for messages.
        span: first byte of the range, and its end, excluded; None: the file's end.
        limits: bound lines and blocks.
    """

    def __init__(
        self,
        file: BinaryIO,
        name: str,
        *,
        span: tuple[int, int | None] = (0, None),
        limits: LineLimits,
    ) -> None:
        self._file = file
        self._name = name
        self._start = span[0]
        self._stop = sys.maxsize if span[1] is None else span[1]
        self._limits = limits

    def blocks(self) -> Iterator[LineBlock]:
        """Yield the lines, some at a time.

        Raises:
            DataError: a line is too long, or compressed data is damaged.
            OSError: the file cannot be read.
        """
        at, held = self._first_line()
        line = None if self._start else 1
        while at < self._stop:
            more = self._file.read(self._limits.block_bytes)
            held += more
            end = self._end_of_lines(held, at, is_over=not more)
            if end:
                block = self._block(held[:end], at, line)
                yield block
                line = None if line is None else line + block.data.count(b"\n")
                at, held = at + end, held[end:]
            if not more:
                return

    def _block(self, data: bytes, at: int, line: int | None) -> LineBlock:
        return LineBlock(data, at, line)

    def _end_of_lines(self, held: bytes, at: int, *, is_over: bool) -> int:
        """Return the number of held bytes that are whole lines of the range."""
        if at + len(held) > self._stop:
            end = held.find(b"\n", max(self._stop - at - 1, 0)) + 1
            if end:
                return end
        end = len(held) if is_over else held.rfind(b"\n") + 1
        if not end and len(held) > self._limits.max_line_bytes:
            raise DataError(
                f"{self._name}: the line at byte {at} has more than {len(held)} bytes, "
                f"max_line_bytes is {self._limits.max_line_bytes}: if the file is not damaged, "
                "pass limits=LineLimits(max_line_bytes=…)"
            )
        return end

    def _first_line(self) -> tuple[int, bytes]:
        """Skip the line of the byte before the range; return the next line's offset, and bytes."""
        if not self._start:
            return 0, b""
        at = self._start - 1
        while held := self._file.read(self._limits.block_bytes):
            found = held.find(b"\n") + 1
            if found:
                return at + found, held[found:]
            at += len(held)
        return sys.maxsize, b""


class GzipBytes(io.RawIOBase):
    """The decompressed bytes of a gzip file.

    Args:
        file: the compressed bytes; `close` closes it.
        name: for messages.
        limits: bound the compression ratio.
    """

    def __init__(self, file: ReadAhead, name: str, limits: LineLimits) -> None:
        super().__init__()
        self._file = file
        self._name = name
        self._limits = limits
        self._zipped = gzip_format.GzipFile(fileobj=cast(BinaryIO, file))
        self._made = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer, except at the end.

        Raises:
            DataError: compressed data is damaged, or its ratio is above the limit.
        """
        try:
            count = self._zipped.readinto(buffer)
        except (zlib.error, EOFError, gzip_format.BadGzipFile) as error:
            raise DataError(
                f"{self._name}: the compressed data is damaged after byte {self._made}: {error}"
            ) from None
        self._made += count
        if text := beyond_ratio(self._made, self._file.tell(), self._limits.max_gzip_ratio):
            raise DataError(f"{self._name}: {text}")
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
