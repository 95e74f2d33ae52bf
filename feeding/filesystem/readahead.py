"""A file read from front to back, with the next ranges on their way while one is used.

Covers: an object like a file, for whoever reads in blocks of its own size.
Does not: repeat what failed; that is each range's own work (RangeReader).
Threads: a ReadAhead belongs to one thread.
Memory: at most `ranges_in_flight` + 1 ranges.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator

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
        end: int | None = None,
    ) -> None:
        """Read `reader`, which is closed with this, from byte `begin` to before byte `end`."""
        super().__init__()
        end = reader.size_bytes if end is None else end
        self.name = reader.path
        self._reader = reader
        self._range_bytes = config.range_bytes
        self._ranges_in_flight = config.ranges_in_flight
        self._position = self._asked = begin
        self._end = end
        self._coming: deque[Callable[[], bytes]] = deque()
        self._current = memoryview(b"")
        if not 0 <= begin <= end <= reader.size_bytes:
            raise ValueError(
                f"bytes {begin} to {end} of {reader.path}, which has {reader.size_bytes}"
            )

    def ranges(self) -> Iterator[bytes | memoryview]:
        """Return what is left, range by range as it came, without a copy."""
        while data := self._next():
            yield data

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in the file of the byte that is read next."""
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill the buffer, except at the end; return how many bytes it got."""
        view = memoryview(buffer).cast("B")
        if isinstance(self._reader, LocalReader) and not self._current and not self._coming:
            # The kernel reads ahead here, and the bytes are copied once.
            filled = self._reader.read_into(self._position, view[: self._end - self._position])
            self._position += filled
            self._asked = self._position
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

    def close(self) -> None:
        """Close the file and forget what is on its way."""
        if not self.closed:
            self._coming.clear()
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
        """Make the next range the current one, and ask for those behind it; False at the end."""
        if self.closed:
            raise ValueError(f"{self.name} is closed")
        self._ask()
        if not self._coming:
            return False
        self._current = memoryview(self._coming.popleft()())
        self._ask()
        return True

    def _ask(self) -> None:
        while self._asked < self._end and len(self._coming) < self._ranges_in_flight:
            # Whole multiples: then few ranges cross from one of the storage's blocks to the next.
            stop = self._asked - self._asked % self._range_bytes + self._range_bytes
            length = min(stop, self._end) - self._asked
            self._coming.append(self._reader.start_range(self._asked, length))
            self._asked += length
