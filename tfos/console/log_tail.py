"""LogTail: the last lines of one node's output at the driver, numbered, for live readers.

Covers: how many are kept, which are new to a reader, lines that are gone.
Does not: receive lines, limit their rate (tfos.control.coordinator).
Threads: none; its owner serialises the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from rpc.printable import printable

MOST_CHARS = 32_768
"""Characters of one node's lines: a thousand nodes cost the driver some 30 MB."""
PIECE_BYTES = 5000
"""Bytes of one answer's lines as JSON: at one answer every two seconds a reader gets under 3 KB/s.
Characters are no measure of that: one of them has up to four bytes, and a quote has two."""


class LogTail:
    """Numbered lines of a node, the oldest forgotten first."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque()
        self._chars = 0
        self._newest = 0

    def add(self, lines: tuple[str, ...], dropped: int) -> None:
        """Keep lines, free of what would steer a terminal.

        Args:
            lines: output without line ends.
            dropped: lines that were left out before these.
        """
        gap = (f"({dropped} lines dropped: over the rate limit; see its log)",) if dropped else ()
        for line in (*gap, *lines):
            self._newest += 1
            shown = cut(printable(line))
            self._lines.append((self._newest, shown))
            self._chars += len(shown)
        while self._chars > MOST_CHARS and len(self._lines) > 1:
            self._chars -= len(self._lines.popleft()[1])

    def after(self, number: int) -> list[tuple[int, str]]:
        """Return what fits an answer of the lines after this number, each with its own.

        Args:
            number: the last line that the reader has; 0: it begins, with the newest lines.
        """
        new = [each for each in self._lines if each[0] > number]
        # A reader that begins wants the end of the log; one that follows wants no gap.
        if number:
            return new[: num_fitting(line for _, line in new)]
        return new[len(new) - num_fitting(line for _, line in reversed(new)) :]


def num_fitting(lines: Iterable[str]) -> int:
    """Return how many of these lines, from the first on, fit an answer."""
    num_bytes = number = 0
    for line in lines:
        num_bytes += _json_bytes(line)
        if num_bytes > PIECE_BYTES:
            break
        number += 1
    return number


def cut(line: str) -> str:
    """Return as much of a line as fits an answer."""
    while len(line) > PIECE_BYTES // 5 and _json_bytes(line) > PIECE_BYTES:
        line = f"{line[: len(line) * 3 // 4]} …"
    return line


def _json_bytes(line: str) -> int:
    """Return what a line takes in a list of JSON, with its comma."""
    return len(msgspec.json.encode(line)) + 1
