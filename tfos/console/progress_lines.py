"""ProgressLines: which moments of a training's progress become lines where nothing is drawn live.

Covers: the pace of plain lines.      Does not: make their text (tfos.console.progress).
Threads: none; its owner serialises the calls.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from tfos.console.console import Console

_LINE_S = 5.0
"""Seconds between lines about training."""
_SAME_START_S = 10.0
"""Seconds between lines about the same start: rarely enough to read, often enough to see life."""
_SECONDS = re.compile(r"\d+ s")


class ProgressLines:
    """Shows one training's progress: always on a live display, else a line now and then.

    Args:
        console: where it is shown.
        clock: monotonic seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._shown_s = clock()
        self._start = self._last = ""

    def show(self, text: str, *, is_start: bool = False) -> None:
        """Show the progress if it is time to.

        Args:
            text: one line.
            is_start: whether workers start: the same again is news after a longer time only.
        """
        if not self._console.is_live:
            now_s = self._clock()
            start = _SECONDS.sub("", text) if is_start else ""
            pause_s = _SAME_START_S if start and start == self._start else _LINE_S
            if now_s - self._shown_s < pause_s:
                return
            self._shown_s, self._start = now_s, start
        self._last = text
        self._console.progress(text)

    def end(self, text: str) -> None:
        """Leave the last line, also if it is not time to; a plain line does not come twice.

        Args:
            text: one line.
        """
        if self._console.is_live or text != self._last:
            self._console.progress(text, final=True)
        self._console.end_progress()
