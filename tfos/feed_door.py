"""The way from the calls that feed rows to the jobs that do: checks first, numpy only then.

Covers: refusing a cluster that takes no rows, a feed that it does not have, a phase without feeds.
Does not: feed (feed_jobs).
Runs in: the driver.      Threads: any; `_making` guards the one object that feeds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfos import preflight
from tfos.errors import SettingsError
from tfos.phases import ClusterPhase, require
from tfos.reservation import Reservation

if TYPE_CHECKING:
    from tfos.feed_jobs import FeedJobs


class FeedDoor:
    """Gives the calls of one cluster what feeds its workers.

    Args:
        reserved: the cluster.
        raise_failure: raises the cluster's failure, if it has one.
    """

    def __init__(self, reserved: Reservation, raise_failure: Callable[[], None]) -> None:
        self._reserved = reserved
        self._raise_failure = raise_failure
        self._making = threading.Lock()
        self.jobs: FeedJobs | None = None
        """Made by the first call."""

    def open(self, call: str, feed_timeout: float, feed: str) -> tuple[FeedJobs, float]:
        """Return what feeds, and the timeout in seconds.

        Args:
            call: the user's call, for errors.
            feed_timeout: as the user gave it.
            feed: its name.

        Raises:
            SettingsError: an argument, or the cluster's input mode, does not fit.
            NodeFailedError: the cluster has failed.
            PhaseError: it does not run.
        """
        reserved = self._reserved
        feeds = reserved.settings.feeds
        timeout_s = preflight.check_timeout("feed_timeout", feed_timeout)
        if not feeds:
            raise SettingsError(
                f"{call} needs input_mode=InputMode.SPARK; this cluster was made with "
                "InputMode.TENSORFLOW, where main_fun reads its own data."
            )
        if feed not in feeds:
            raise SettingsError(
                f"qname={feed!r} is no feed of this cluster: {list(feeds)}. Name "
                "it in queues= of reserve() or run()."
            )
        self._raise_failure()
        require(call, reserved.coordinator.phase, ClusterPhase.RUNNING)
        with self._making:
            if self.jobs is None:
                from tfos.feed_jobs import FeedJobs  # numpy: only where rows are fed

                self.jobs = FeedJobs(
                    reserved.sc,
                    reserved.coordinator,
                    reserved.credentials,
                    reserved.config,
                    reserved.console,
                )
        return self.jobs, timeout_s


def as_rdd(data: Any) -> Any:
    """Return an RDD of whatever a user may feed; see tfos.feed_jobs."""
    from tfos.feed_jobs import as_rdd as convert

    return convert(data)
