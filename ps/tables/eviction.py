"""How long ago a version was reached, for rows with a time to live. Pure apart from the clock.

Covers: which versions have outlived it.      Does not: drop rows (ps.tables.segment).
Threads: none; the segment's lock serialises all calls.

A row keeps its version, not a time: up to 65 marks (time, first version) say when
versions were reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

MARKS = 64
"""How finely ages are known: a row lives up to 1/64 longer than its time to live."""


class Ages:
    """When the versions of one segment were reached.

    Args:
        ttl_s: how long a version lives; None: for ever.
        clock: seconds that only grow.
    """

    def __init__(self, ttl_s: float | None, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque()

    def outlived(self, version: int) -> int | None:
        """Return the newest version that has outlived its time, if one has since the last call.

        Call it before version + 1 is made.
        """
        if self._ttl_s is None:
            return None
        now_s, grain_s = self._clock(), self._ttl_s / MARKS
        outlived = None
        while self._marks and now_s - self._marks[0][0] >= self._ttl_s + grain_s:
            self._marks.popleft()
            # The versions before the next mark came within a grain of this one.
            outlived = self._marks[0][1] - 1 if self._marks else version
        if not self._marks or now_s - self._marks[-1][0] >= grain_s:
            self._marks.append((now_s, version + 1))
        return outlived

    def restart(self) -> None:
        """Let every version that there is begin its life now."""
        self._marks.clear()
        if self._ttl_s is not None:
            self._marks.append((self._clock(), 0))
