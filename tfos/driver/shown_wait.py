"""The wait for a state of the cluster, with lines of progress meanwhile.

Covers: the deadline, the interval of the lines.
Does not: make the lines' text, judge a wait that was too short.
Runs in: the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tfos.console.console import Console
from tfos.console.progress_lines import ProgressLines
from tfos.control.coordinator import Coordinator
from tfos.control.state.cluster_view import ClusterView

_LOOK_S = 1.0
"""Interval of progress; events end a wait at once."""


def shown_wait(
    coordinator: Coordinator,
    console: Console,
    is_over: Callable[[ClusterView], bool],
    timeout_s: float,
    line: Callable[[], tuple[str, bool]],
) -> bool:
    """Return whether the state was reached in time.

    Args:
        coordinator: the cluster's coordinator.
        console: where the lines go.
        is_over: the condition on the cluster's state.
        timeout_s: seconds.
        line: returns what to show now, and whether workers start; see ProgressLines.show.
    """
    deadline_s = time.monotonic() + timeout_s
    lines = ProgressLines(console)
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            if coordinator.wait(is_over, min(_LOOK_S, left_s)):
                return True
            text, is_start = line()
            lines.show(text, is_start=is_start)
    finally:
        console.end_progress()
    return False
