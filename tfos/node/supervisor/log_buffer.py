"""Log buffer: the full output of a node in a file, and clean, rate-limited lines.

Covers: splitting bytes into lines, escaping, truncating, rate limiting, last lines for a failure.
Does not: read pipes (tfos.node.supervisor) or send lines (tfos.control.client).
Threads: used by the supervisor's main thread alone.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rpc.printable import printable
from tfos.console.line_rate import LineRate
from tfos.node.child_log import DETAIL

LOG_MODE = 0o640
"""Output may show rows. The group may read: YARN's NodeManager collects logs as the directory's
group."""
MAX_LINE_CHARS = 2000
"""A longer line is truncated for the driver; the file has all of it."""
TAIL_LINES = 100
"""Lines kept for a failure report."""
LINES_PER_S = 200.0
BURST_LINES = 1000
"""A traceback or a model summary passes at once; a flood is thinned out to LINES_PER_S."""
MAX_PENDING_BYTES = 64 * 1024
"""An unfinished line longer than this is treated as ended, so that memory stays bounded."""

_TENSORFLOW_GREETING = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    rb"|I\d{4} [^\]]* port\.cc:\d+\] oneDNN custom operations are on\."
    rb"|I\d{4} [^\]]* cudart_stub\.cc:\d+\] Could not find cuda drivers on your machine"
    rb"|E\d{4} [^\]]* cuda_platform\.cc:\d+\] failed call to cuInit: .*UNKNOWN ERROR \(303\)"
    rb"|.{0,40}INFO tensorflow: Assets written to: \S*/\.[0-9a-f]{12}/assets$"
)
"""Lines of every start of TensorFlow on a host without a GPU's driver (error 303: no such library),
printed whatever TF_CPP_MIN_LOG_LEVEL says; and an export's directory before it is renamed."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def clean_line(raw: bytes) -> str:
    """Return one line for display: no control characters, not longer than MAX_LINE_CHARS.

    Of a line that was overwritten with carriage returns or backspaces (progress bars) only the last
    state is kept. Colours are dropped; all other terminal control is escaped.
    """
    text = raw.decode("utf-8", errors="backslashreplace").rstrip("\r\n")
    text = _COLOURS.sub("", re.split(r"\r|\x08+", text)[-1])
    return printable(text, MAX_LINE_CHARS)


class LineSplitter:
    """Turns the bytes of one stream into lines."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes."""
        *lines, pending = (self._pending + data).split(b"\n")
        if len(pending) > MAX_PENDING_BYTES:
            lines.append(pending)
            pending = b""
        self._pending = pending
        return lines

    def finish(self) -> list[bytes]:
        """Return the last line if the stream ended without a newline."""
        pending, self._pending = self._pending, b""
        return [pending] if pending else []


class NodeLog:
    """All output of one node: appended to a file, and kept as lines until they are taken.

    Args:
        path: path of the log file.
        show_details: queue tfos's own lines below WARNING too.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        show_details: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._show_details = show_details
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, LOG_MODE), "ab", buffering=0)
        self._splitter = LineSplitter()
        self._rate = LineRate(LINES_PER_S, BURST_LINES, clock)
        self._lines: list[str] = []
        self._dropped = 0
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.write_error = ""

    def fileno(self) -> int:
        """The file's descriptor: for processes whose output needs no splitting."""
        return self._file.fileno()

    def write(self, data: bytes) -> None:
        """Append output of the child to the file, and queue the lines that it completes.

        A full disk costs the file, never the node.
        """
        try:
            self._file.write(data)
        except OSError as error:
            self.write_error = f"{self.path}: {error.strerror}"
        self.add(self._splitter.feed(data))

    def finish(self) -> None:
        """Queue the last line of an ended child if it has no newline."""
        self.add(self._splitter.finish())

    def add(self, lines: list[bytes]) -> None:
        """Queue lines for the driver as far as the rate allows, and keep the last ones.

        Only queued lines are decoded and cleaned: a flood costs little more than its file. Lines
        that TensorFlow prints at every import remain in the file, and tfos's own details too.
        """
        lines = [line for line in lines if not _TENSORFLOW_GREETING.match(line)]
        self._tail.extend(lines)
        if not self._show_details:
            lines = [line for line in lines if not DETAIL.match(line)]
        num_allowed = self._rate.admit(len(lines))
        self._lines += map(clean_line, lines[:num_allowed])
        self._dropped += len(lines) - num_allowed

    def take(self) -> tuple[tuple[str, ...], int]:
        """Return the queued lines and how many were dropped since the last call."""
        lines, dropped = tuple(self._lines), self._dropped
        self._lines, self._dropped = [], 0
        return lines, dropped

    def tail(self) -> tuple[str, ...]:
        """Return the last lines, dropped ones included."""
        return tuple(map(clean_line, self._tail))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
