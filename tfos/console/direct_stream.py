"""DirectStream: a stream that one thread writes to while the program writes to it, too.

Covers: writing past the stream's buffer, whose lock would be held as long as nobody reads; whole
lines; a descriptor that does not block.
Does not: queue (tfos.console.writer).
Threads: one writes.
"""

from __future__ import annotations

import io
import os
import select
from collections.abc import Iterator
from typing import Any

_WHOLE_BYTES = select.PIPE_BUF
"""A pipe takes this much at once: no other writer's text comes between."""


class DirectStream:
    """The part of a text stream that is written to.

    Args:
        stream: such as sys.stderr; other than a plain file, as in a notebook, is just written to.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.encoding: str = getattr(stream, "encoding", None) or "utf-8"
        self._errors: str = getattr(stream, "errors", None) or "backslashreplace"
        # At the end of the interpreter a buffer's lock that a blocked thread holds is a fatal
        # error, so a plain file is written to by its descriptor.
        self._is_plain = _is_plain(stream)

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        isatty = getattr(self.stream, "isatty", None)
        return bool(isatty and isatty())

    def fileno(self) -> int:
        """Return the descriptor."""
        number: int = self.stream.fileno()
        return number

    def write(self, text: str) -> int:
        """Write text; blocks while nobody reads."""
        if not self._is_plain:
            self.stream.write(text)
            return len(text)
        descriptor = self.stream.fileno()
        for piece in _whole_lines(text.encode(self.encoding, self._errors)):
            _write_all(descriptor, piece)
        return len(text)

    def flush(self) -> None:
        """Let the stream pass on what it has."""
        if not self._is_plain:
            self.stream.flush()


def _is_plain(stream: Any) -> bool:
    # The exact types: another class may do more with what is written, as a log file's tee does.
    if type(stream) is not io.TextIOWrapper or not (stream.line_buffering or stream.write_through):
        return False
    buffer = stream.buffer
    return type(buffer) is io.FileIO or (
        type(buffer) is io.BufferedWriter and type(buffer.raw) is io.FileIO
    )


def _whole_lines(data: bytes) -> Iterator[bytes]:
    """Yield pieces that a pipe takes at once, cut after line ends where there are some."""
    while len(data) > _WHOLE_BYTES:
        end = data.rfind(b"\n", 0, _WHOLE_BYTES) + 1 or _WHOLE_BYTES
        yield data[:end]
        data = data[end:]
    if data:
        yield data


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            ready = select.poll()
            ready.register(descriptor, select.POLLOUT)
            ready.poll()
