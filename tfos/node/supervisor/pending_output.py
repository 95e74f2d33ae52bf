"""Lines of a node that wait for the driver: how many of them go, and when.

Covers: what the driver wants of them, a reader's piece, the last lines while nobody reads.
Does not: send (tfos.node.supervisor.reporter), limit the node's lines (log_buffer).
Pure; its owner serialises the calls.
"""

from __future__ import annotations

import math

from tfos.console.log_tail import cut, num_fitting
from tfos.control.messages import Output

KEPT_LINES = 100
"""Lines to keep while nobody reads: for a later reader, and for the end."""
COLLECTING_S = 0.3
"""Lines are collected this long, so that a chatty child costs few messages."""
BETWEEN_PIECES_S = 2.0
"""Seconds between pieces: as often as a reader, page or `tfos logs -f`, looks."""
_MAX_BATCH_LINES = 200


class PendingOutput:
    """Takes lines as they come, gives out what the driver wants.

    Until the driver has said what it wants, nothing goes.
    """

    def __init__(self) -> None:
        self.wanted: Output = "none"
        self._lines: list[str] = []
        self._dropped = 0
        self._next_s = -math.inf

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self._lines and not self._dropped

    def due_s(self) -> float:
        """Return the monotonic time from which lines may go; inf: none go."""
        return math.inf if self.is_empty or self.wanted == "none" else self._next_s

    def add(self, lines: tuple[str, ...], dropped: int) -> None:
        """Keep lines.

        Args:
            lines: without line ends.
            dropped: lines that were left out before these.
        """
        self._lines += lines
        if self.wanted == "none":
            del self._lines[:-KEPT_LINES]
        else:
            self._dropped += dropped

    def take(self, now_s: float) -> tuple[tuple[str, ...], int]:
        """Return the next lines to send, and how many were left out before them.

        Args:
            now_s: monotonic seconds.
        """
        dropped, self._dropped = self._dropped, 0
        if self.wanted == "all":
            self._next_s = now_s + COLLECTING_S
            taken, self._lines = self._lines[:_MAX_BATCH_LINES], self._lines[_MAX_BATCH_LINES:]
            return tuple(taken), dropped
        self._next_s = now_s + BETWEEN_PIECES_S
        lines, self._lines = [cut(line) for line in self._lines], []
        number = num_fitting(reversed(lines))
        return tuple(lines[len(lines) - number :]), dropped + len(lines) - number

    def lose(self, number: int) -> None:
        """Count lines that were taken and could not be sent, with those left out before."""
        self._dropped += number
