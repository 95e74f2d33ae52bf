"""UnreadPipe: a standard error that nobody reads, as of a pager that shows its first page."""

from __future__ import annotations

import os
import threading


class UnreadPipe:
    """A pipe whose writer blocks once it is full, until `read` is called."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        self.stream = os.fdopen(write, "w", buffering=1)
        self._data = bytearray()
        self._reader: threading.Thread | None = None

    def read(self) -> None:
        """Begin to read all that is written."""
        self._reader = threading.Thread(target=self._read_all)
        self._reader.start()

    def close(self) -> str:
        """Close both ends and return what was written."""
        if self._reader is None:
            self.read()
        self.stream.close()
        assert self._reader is not None
        self._reader.join(30.0)
        os.close(self._read)
        return self._data.decode()

    def _read_all(self) -> None:
        while piece := os.read(self._read, 65536):
            self._data += piece
