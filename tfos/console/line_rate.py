"""LineRate: how many lines of output may pass now; the same rule on the node and at the driver.

Threads: none; its owner serialises the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class LineRate:
    """A token bucket of lines.

    Args:
        per_s: lines per second that pass for ever.
        burst: lines that pass at once after a pause.
        clock: monotonic seconds.
    """

    def __init__(
        self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._clock = clock
        self._allowance = self._burst
        self._last_s = clock()

    def admit(self, num_lines: int) -> int:
        """Return how many of this many lines pass now."""
        now_s = self._clock()
        self._allowance += (now_s - self._last_s) * self._per_s
        self._allowance = min(self._burst, self._allowance)
        self._last_s = now_s
        passed = min(num_lines, int(self._allowance))
        self._allowance -= passed
        return passed
