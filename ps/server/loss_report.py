"""Loss report of a restore: updates lost, once the workers have reconnected.

Covers: the sentence, and when it is time to say it.
Does not: count (ps.exactly_once; clients that never come back tell nobody, and neither does
metadata, so it says `at least`), print or send (ps.cli.serve, tfos.node.ps_process).      Pure; no
threads.
"""

from __future__ import annotations

from typing import NamedTuple

from ps.stats.server_stats import ServerStats

SETTLED_S = 1.0
"""Workers come back within moments of each other; the sentence waits for the last of them."""


class RestorePoint(NamedTuple):
    """Where a restored server goes on, and how old that was."""

    step: int = -1
    seconds: float = 0.0


class LossReport:
    """Reports the loss of one server, once for each number that it settles at."""

    def __init__(self) -> None:
        self._seen = 0
        self._reported = 0
        self._changed_s = 0.0

    def poll(self, stats: ServerStats, now_s: float) -> str:
        """Return the sentence when the number has not changed for SETTLED_S, else nothing.

        Args:
            stats: the server's.
            now_s: monotonic.
        """
        if stats.lost_updates != self._seen:
            self._seen, self._changed_s = stats.lost_updates, now_s
        return "" if now_s - self._changed_s < SETTLED_S else self.last(stats)

    def last(self, stats: ServerStats) -> str:
        """Return the sentence if its number was not reported yet, settled or not."""
        if stats.lost_updates == self._reported:
            return ""
        self._reported = stats.lost_updates
        return loss_text(stats)


def loss_text(stats: ServerStats) -> str:
    """Return `ps:1: 12 s, at least 3,410 updates lost since step 900`."""
    updates = "update" if stats.lost_updates == 1 else "updates"
    return (
        f"ps:{stats.server}: {stats.lost_s:.0f} s, at least {stats.lost_updates:,} {updates} "
        f"lost since step {stats.restored_step}"
    )
