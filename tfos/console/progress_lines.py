"""ProgressLines: which moments of a training's progress become lines where nothing is drawn live.

Covers: the pace of plain lines.      Does not: make their text (tfos.console.progress).
Threads: none; its owner serialises the calls.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from tfos.console.console import Console
from tfos.console.progress import TrainingProgress

_LINE_S = 5.0
"""Seconds between lines about training."""
_SAME_START_S = 30.0
"""Seconds between lines about the same activity of workers that start."""
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
        self._start = ""

    def show(self, progress: TrainingProgress) -> None:
        """Show the progress if it is time to."""
        if not self._console.is_live:
            now_s, text = self._clock(), str(progress)
            start = _SECONDS.sub("", text) if progress.is_starting else ""
            pause_s = _SAME_START_S if start and start == self._start else _LINE_S
            if now_s - self._shown_s < pause_s:
                return
            self._shown_s, self._start = now_s, start
        self._console.progress(str(progress))
