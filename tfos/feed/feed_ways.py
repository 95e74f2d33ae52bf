"""Which way rows take from feed tasks to workers: told once for each feed.

Covers: FeedWays.      Does not: choose the way (rpc.client.connect).
Runs in: the driver.
Threads: any; each feed has one call at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from feeding.sender.feeder import FeedReport
from tfos.console.console import Console


class FeedWays:
    """The ways that the user has been told of."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: dict[str, set[str]] = {}

    def tell(self, feed: str, reports: Iterable[FeedReport]) -> None:
        """Show a line if the tasks of a job took a way that this feed had not taken before."""
        ways = Counter(way for report in reports for way in report.ways)
        told = self._told.setdefault(feed, set())
        if ways.keys() <= told:
            return
        told.update(ways)
        counts = "; ".join(f"{count} times {way}" for way, count in ways.most_common())
        self._console.line(f"feed {feed!r}: its tasks reached workers {counts}")
