"""Waits on a condition: until a state, a deadline, or the end of the caller's connection.

Covers: the one loop of all waits in a server.      Does not: say what follows from how it ends.
Threads: the caller holds the condition's lock.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable

CHECK_PEER_S = 0.25
"""How often a wait looks whether its sender is still there; costs one poll() each."""


class Waited(enum.Enum):
    """How a wait has ended."""

    DONE = "done"
    OVERDUE = "overdue"
    GONE = "gone"
    """Nobody waits for the answer any more."""


def wait_until(
    changed: threading.Condition,
    is_done: Callable[[], bool],
    deadline_s: float,
    is_gone: Callable[[], bool],
) -> Waited:
    """Wait until something is done, at the latest until the deadline.

    Args:
        changed: notified when it may be done.
        is_done: asked under its lock; what it raises ends the wait.
        deadline_s: monotonic.
        is_gone: whether nobody waits for the answer any more.
    """
    while not is_done():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return Waited.OVERDUE
        if is_gone():
            return Waited.GONE
        changed.wait(min(left_s, CHECK_PEER_S))
    return Waited.DONE
