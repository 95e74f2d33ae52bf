"""Seconds that a worker has spent in each part of its steps: compute, feed, lookup, pull, push.

Covers: adding them up.
Does not: know the steps (tfos.keras.step.trainer), report the sums (tfos.keras.fit.progress).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

PARTS = ("compute", "feed", "lookup", "pull", "push")


class StepClock:
    """Adds up the time of each part since the start. Parts are not nested."""

    def __init__(self) -> None:
        self._spent_s = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Count the block's time."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s[part] += time.perf_counter() - started_s

    def spent(self) -> dict[str, float]:
        """Return the sums as `compute_s`, `feed_s`, `lookup_s`, `pull_s` and `push_s`."""
        return {f"{part}_s": seconds for part, seconds in self._spent_s.items()}
