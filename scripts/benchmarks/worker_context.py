"""The part of `ctx` that the Keras binding and reading use, for a worker without a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ps.client.client import PSClient
from tfos.worker.reports.epoch_reports import EpochReports
from tfos.worker.reports.seen_progress import SeenProgress

if TYPE_CHECKING:
    from tfos.reading.reading import Reading


class BenchWorker:
    """A worker whose servers were started by `tfos.bench.servers`.

    Args:
        connect: returns a new client of the servers.
        log_dir: directory for event files.
        rank: this worker's rank.
        num_workers: workers that train together.
    """

    feed_channel: Any = None
    trained_feeds: Any = None
    stop_asked = False
    fit_place = None
    resumes_epochs = False
    resumes_rate = False
    epochs = EpochReports(lambda _: None)

    def __init__(
        self,
        connect: Callable[[], PSClient],
        log_dir: Path,
        *,
        rank: int = 0,
        num_workers: int = 1,
    ) -> None:
        self.new_ps_client = connect
        self._client = connect()
        self.log_dir = str(log_dir)
        self.cluster_log_dir = self.log_dir
        self.rank = rank
        self.worker_rank = rank
        self.num_workers = num_workers
        self.is_chief = rank == 0

    def save_now(self) -> str | None:
        """Nothing is saved."""

    def ps_client(self) -> PSClient:
        """Return the one client."""
        return self._client

    @property
    def read(self) -> Reading:
        """Files that this worker reads on its own."""
        from tfos.reading.reading import Reading

        return Reading(self)

    def absolute_path(self, path: str) -> str:
        """Return a path of this host."""
        return os.path.abspath(path)

    @property
    def seen_progress(self) -> SeenProgress:
        """Every benchmark here trains on the servers."""
        return SeenProgress(lambda _: None)

    def check_servers_used(self, what: str) -> None:
        """Every benchmark here trains on the servers."""

    def report_numbers(self, *_: object) -> None:
        """Drop the report: nobody looks at it."""

    def report_progress(self, *_: object) -> None:
        """Nobody listens."""
