"""Waiting for what another thread or process makes true."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WAIT_S = 60.0
JVM_PAUSE_S = 0.05
"""Between questions to a JVM or to a cluster, which cost what they wait for a part of a core."""
_PAUSE_S = 0.002


def wait_until(
    condition: Callable[[], T],
    what: str | Callable[[], object] = "the condition",
    timeout_s: float = WAIT_S,
    *,
    pause_s: float = _PAUSE_S,
) -> T:
    """Poll a condition until it is true, and return what it returned.

    Args:
        condition: asked again and again; it asserts what must hold meanwhile.
        what: names it for the failure; or returns what is so instead.
        timeout_s: seconds until the test fails.
        pause_s: seconds between two questions.
    """
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not (found := condition()):
        assert time.monotonic() < deadline_s, (
            f"waited {timeout_s} s for {what() if callable(what) else what}"
        )
        pause.wait(pause_s)
    return found
