"""Driver pause: a time in which the driver itself did not run, as between Ctrl-Z and `fg`.    Pure.

Covers: detecting it by ticks that come late, what it does to the times of members, and the sentence
for the failures that it leads to.
Does not: decide which node is lost (control.restarts.silence).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tfos.config import ClusterConfig
from tfos.control.members import Member
from tfos.failure import NodeFailure

_LATE_TICKS = 3.0
"""A tick later than this many intervals was not just a slow thread."""
_EXPLAINS_S = 60.0
"""For about this long after a pause Spark reports the ends of executors and tasks."""


def tick_s(config: ClusterConfig) -> float:
    """Return the seconds between two looks for silent nodes."""
    return min(1.0, config.heartbeat_s / 2)


class DriverPause:
    """The driver's last pause.

    Args:
        config: has the times.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._ticked_s: float | None = None
        self._lasted_s = 0.0
        self._ended_s = 0.0

    def on_tick(self, members: Iterable[Member], now_s: float) -> None:
        """Take the time since the last tick off the silence of nodes if nobody could hear them.

        Args:
            members: all of the cluster.
            now_s: monotonic seconds.
        """
        is_late, self._ticked_s = self._sees(now_s), now_s
        if not is_late:
            return
        for member in members:
            member.heard_s = min(now_s, member.heard_s + self._lasted_s)
            member.lost_s = min(now_s, member.lost_s + self._lasted_s)
            member.moved_s = min(now_s, member.moved_s + self._lasted_s)
            if member.stream_lost_s is not None:
                member.stream_lost_s = min(now_s, member.stream_lost_s + self._lasted_s)

    def _sees(self, now_s: float) -> bool:
        """Return whether the driver has stood still since the last tick; remember for how long."""
        interval_s = tick_s(self._config)
        if self._ticked_s is None or now_s - self._ticked_s <= (1 + _LATE_TICKS) * interval_s:
            return False
        self._lasted_s, self._ended_s = now_s - self._ticked_s - interval_s, now_s
        return True

    def explained(self, failure: NodeFailure, now_s: float) -> NodeFailure:
        """Return the failure of a node that was ended from outside, with the pause if it caused it.

        Args:
            failure: the record.
            now_s: monotonic seconds.
        """
        self._sees(now_s)  # the failure may be heard before the first tick after the pause
        lease_s = self._config.lease_s
        # The last contact may be a heartbeat older than the pause.
        if self._lasted_s + self._config.heartbeat_s < lease_s:
            return failure
        if now_s - self._ended_s > _EXPLAINS_S:
            return failure
        text = (
            f"{failure.message}. Before that the driver itself was suspended for "
            f"{self._lasted_s:.0f} s (Ctrl-Z, SIGSTOP, a frozen host): a node that does not reach "
            f"it for lease_s={lease_s:.0f} s ends itself. Let the driver run, or raise "
            "ClusterConfig(lease_s)"
        )
        return msgspec.structs.replace(failure, message=text)
