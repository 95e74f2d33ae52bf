"""Read-ahead: a file read from front to back while the next ranges are fetched.

Covers: a file object for readers with blocks of their own size.
Does not: retry; each range does that itself (interface.RangeReader).
Threads: a ReadAhead belongs to one thread.
Memory: at most `ranges_in_flight` + 1 ranges.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator

from feeding.errors import FileChanged
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.interface import RangeReader
from feeding.filesystem.local import LocalReader


class ReadAhead(io.RawIOBase):
    """`with ReadAhead(fs.open(path), config) as file: while count := file.readinto(block): …`."""

    def __init__(
        self,
        reader: RangeReader,
        config: FileSystemConfig,
        *,
        begin: int = 0,
        ahead_until: int | None = None,
    ) -> None:
        """Read a file from a byte on.

        Args:
            reader: the open file; `close` closes it.
            config: size and number of the ranges.
            begin: first byte.
            ahead_until: byte behind which little is likely to be read: the range that begins there
                is the last one ahead, until another one was needed; None: the file's end.
        """
        super().__init__()
        self.name = reader.path
        self._reader = reader
        self._range_bytes = config.range_bytes
        self._ranges_in_flight = config.ranges_in_flight
        self._position = self._requested = begin
        self._end = reader.size_bytes
        self._ahead_until = self._end if ahead_until is None else ahead_until
        self._in_flight: deque[tuple[int, int, Callable[[], bytes]]] = deque()
        """Offset and length of each range that was begun, and what waits for it."""
        self._current = memoryview(b"")
        if not 0 <= begin <= self._end:
            raise ValueError(f"byte {begin} of {reader.path}, which has {self._end} bytes")

    def ranges(self) -> Iterator[bytes | memoryview]:
        """Yield the rest of the file, range by range, without a copy."""
        while data := self._next():
            yield data

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill the buffer; return the bytes read, fewer only at the end.

        Raises:
            FileChanged: the file has shrunk since it was opened.
        """
        view = memoryview(buffer).cast("B")
        if isinstance(self._reader, LocalReader) and not self._current and not self._in_flight:
            # Local file: the kernel reads ahead, and one copy is enough.
            filled = self._reader.read_into(self._position, view[: self._end - self._position])
            self._position += filled
            self._requested = self._position
            if not filled and len(view) and self._position < self._end:
                raise self._has_shrunk(self._position)
            return filled
        filled = 0
        while filled < len(view):
            if not self._current and not self._fetch():
                break
            count = min(len(view) - filled, len(self._current))
            view[filled : filled + count] = self._current[:count]
            self._current = self._current[count:]
            filled += count
        self._position += filled
        return filled

    def __exit__(self, *raised: object) -> None:
        """Close the file. Raises as `RangeReader.__exit__`."""
        try:
            self._reader.__exit__(*raised)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file and drop the ranges in flight."""
        if not self.closed:
            self._in_flight.clear()
            self._current = memoryview(b"")
            self._reader.close()
            super().close()

    def _next(self) -> memoryview:
        if not self._current:
            self._fetch()
        data, self._current = self._current, memoryview(b"")
        self._position += len(data)
        return data

    def _fetch(self) -> bool:
        """Make the next range the current one and request those after it; False at the end."""
        if self.closed:
            raise ValueError(f"{self.name} is closed")
        self._request(at_least=1)
        if not self._in_flight:
            return False
        offset, length, take = self._in_flight.popleft()
        self._current = memoryview(take())
        if len(self._current) < length:
            raise self._has_shrunk(offset + len(self._current))
        self._request(at_least=0)
        return True

    def _has_shrunk(self, at: int) -> FileChanged:
        return FileChanged(
            f"{self.name} now has no byte after {at}, it had {self._end} bytes when it was opened; "
            "read only files that are no longer written"
        )

    def _request(self, at_least: int) -> None:
        while self._requested < self._end and len(self._in_flight) < self._ranges_in_flight:
            is_unlikely = 0 < self._requested - self._ahead_until < 2 * self._range_bytes
            if is_unlikely and len(self._in_flight) >= at_least:
                return
            # Ranges end at multiples of their size, so few of them cross a block of the storage.
            stop = self._requested - self._requested % self._range_bytes + self._range_bytes
            length = min(stop, self._end) - self._requested
            take = self._reader.start_range(self._requested, length)
            self._in_flight.append((self._requested, length, take))
            self._requested += length
