"""Restart budget: how many restarts of one node are left, and how long each waits.

Covers: the limit within a window, delays that grow for nodes that end soon after their start.
Does not: start anything (tfos.driver.node_jobs, tfos.node.supervisor), look at a clock.
Runs in: the driver, for nodes; supervisors, for their children.      Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW_S = 600.0
"""Window in which restarts count against the limit: a node that dies once a day is not broken."""
STEADY_S = 10.0
"""A process that has lived this long did not die of its start; the next one starts at once."""
FIRST_DELAY_S = 0.5
"""Delay after the second short life in a row; doubled with each further one."""
MAX_DELAY_S = 8.0
"""Far below the RESTART_S that clients wait for a restarted server (tfos.worker.server_access)."""
_MAX_DOUBLINGS = 16


@dataclass
class RestartBudget:
    """Restarts of one node."""

    limit: int
    """Restarts within WINDOW_S."""
    count: int = 0
    """Restarts so far, also those before the window."""
    _recent: list[float] = field(default_factory=list)
    """Times of the restarts within WINDOW_S, in monotonic seconds."""
    _num_short: int = 0
    """Number of short lives in a row."""

    @property
    def num_recent(self) -> int:
        """Restarts that count against the limit now."""
        return len(self._recent)

    def has_left(self, now_s: float) -> bool:
        """Whether the limit leaves a restart at this time, in monotonic seconds."""
        self._recent = [each for each in self._recent if now_s - each < WINDOW_S]
        return len(self._recent) < self.limit

    def take(self, started_s: float, now_s: float) -> float | None:
        """Use one restart; return the seconds to wait before it, None when none is left.

        Args:
            started_s: when the process that has ended now was started, or was to be, in monotonic
                seconds.
            now_s: monotonic seconds.
        """
        if not self.has_left(now_s):
            return None
        self._recent.append(now_s)
        self.count += 1
        if now_s - started_s >= STEADY_S:
            self._num_short = 0
            return 0.0
        self._num_short += 1
        if self._num_short == 1:
            return 0.0
        doublings = min(self._num_short - 2, _MAX_DOUBLINGS)
        return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2.0**doublings))
