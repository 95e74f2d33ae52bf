"""Deadline of a wait for a peer, which a thread that could not look in time prolongs.

Covers: how long is left, and that a late look gives the peer time once more.
Does not: wait (rpc.client.pending_call).
Threads: one at a time.

A process may stand still for longer than a deadline: native code holds the GIL, or the host gives
no processor. The thread that waits then finds the deadline passed, though it has not sent its
request to the end or read the reply that is there. That is not the peer's silence.
"""

from __future__ import annotations

import math
import time

LATE_S = 0.01
"""A look this long after a deadline is late; poll rounds up to milliseconds."""


class Deadline:
    """When a wait ends: at `at_s`, or later if the first look behind that came late.

    Args:
        begun_s: when the wait began (monotonic).
        at_s: monotonic seconds; may be moved.
    """

    def __init__(self, begun_s: float, at_s: float) -> None:
        self._begun_s = begun_s
        self.at_s = at_s
        self._prolonged_to_s = -math.inf

    def left_s(self) -> float:
        """Return the seconds left; 0 or less: the time is over.

        The first look that is late by more than LATE_S adds as much time from now on as it was
        late, but at most the length of the wait: a host may have been suspended for hours. No
        later look adds any, so a wait ends however often a process stands still.
        """
        now_s = time.monotonic()
        left_s = max(self.at_s, self._prolonged_to_s) - now_s
        if left_s < -LATE_S and self._prolonged_to_s == -math.inf:
            left_s = min(-left_s, self.at_s - self._begun_s)
            self._prolonged_to_s = now_s + left_s
        return left_s
