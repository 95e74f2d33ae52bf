"""Waiting for what another thread or process makes true."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WAIT_S = 60.0
_PAUSE_S = 0.002


def wait_until(
    condition: Callable[[], bool], what: str = "the condition", timeout_s: float = WAIT_S
) -> None:
    """Poll a condition until it is true.

    Args:
        condition: asked every few milliseconds.
        what: names it for the failure.
        timeout_s: seconds until the test fails.
    """
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s for {what}"
        pause.wait(_PAUSE_S)
