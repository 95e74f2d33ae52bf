"""What the Keras tests share: real servers in this process, contexts, data, and worker threads.

No Spark and no supervisors: each worker of a test is a thread with a context of its own.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from feeding.config import FeedConfig
from feeding.encode.packer import Packer
from feeding.receiver.channel import FeedChannel
from ps.client.client import PSClient
from ps.consistency.policy import OnLost
from ps.manifest.manifest import Manifest
from ps.server.server import PSServer, ServerSettings
from rpc.auth.handshake import Credentials, Identity, Role
from tfos.fit_place import FitPlace
from tfos.worker.reports.epoch_reports import EpochReports
from tfos.worker.reports.seen_progress import SeenProgress
from tfos.worker.trained.feeds import TrainedFeeds

DEADLINE_S = 60.0
HANG_S = 180.0
"""For the threads of a test's workers: on a loaded host a fit of two takes a minute."""
_names = itertools.count()


@dataclass
class Context:
    """What tfos.keras.protocols.ShownContext and DataContext ask for."""

    client: PSClient
    num_workers: int = 1
    worker_rank: int = 0
    cluster_log_dir: str | None = None
    feed_channel: FeedChannel = field(default_factory=FeedChannel)
    trained_feeds: TrainedFeeds = field(default_factory=lambda: TrainedFeeds(lambda _: None))
    reported: list[Any] = field(default_factory=list)
    """What `fit` has reported of its epochs."""
    make_client: Callable[..., PSClient] = field(repr=False, kw_only=True, default=lambda: None)  # type: ignore[assignment]
    progress: list[tuple[int, int, float | None]] = field(default_factory=list)
    numbers: list[Mapping[str, float]] = field(default_factory=list)
    """What was reported beside each entry of `progress`."""
    stop_asked: bool = False
    fit_place: FitPlace | None = None
    resumes_epochs: bool = False
    resumes_rate: bool = False
    seen: list[dict[str, float]] = field(default_factory=list)
    """Progress that data have seen of fits that are not distributed."""

    @property
    def log_dir(self) -> str | None:
        """As of a NodeContext."""
        root = self.cluster_log_dir
        return None if root is None else f"{root}/worker-{self.worker_rank}"

    @property
    def epochs(self) -> EpochReports:
        return EpochReports(self.reported.append)

    @property
    def rank(self) -> int:
        return self.worker_rank

    @property
    def is_chief(self) -> bool:
        return self.worker_rank == 0

    @property
    def seen_progress(self) -> SeenProgress:
        return SeenProgress(self.seen.append)

    def check_servers_used(self, what: str) -> None:
        """Train without the servers too: tests compare with plain Keras."""

    def ps_client(self) -> PSClient:
        return self.client

    def save_now(self) -> str | None:
        """As of a job without checkpoints."""

    def new_ps_client(self) -> PSClient:
        return self.make_client()

    def report_progress(
        self,
        step: int,
        rows: int,
        loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        self.report_numbers({**(metrics or {}), "steps": step, "rows": rows, "loss": loss})

    def report_numbers(self, numbers: Mapping[str, float | None]) -> None:
        others = {name: value for name, value in numbers.items() if value is not None}
        steps, rows = int(others.pop("steps")), int(others.pop("rows"))
        self.progress.append((steps, rows, others.pop("loss", None)))
        self.numbers.append(others)

    @property
    def staging_dir(self) -> str:
        return tempfile.gettempdir()

    def absolute_path(self, path: str) -> str:
        return path


@dataclass
class Servers:
    """Running servers, and a context for each worker."""

    servers: list[PSServer]
    contexts: list[Context]

    @property
    def manifest(self) -> Manifest:
        return self.contexts[0].client.manifest

    @property
    def pushes(self) -> int:
        return sum(worker.pushes for worker in self.servers[0].stats().workers)

    def rows(self, rank: int) -> int:
        return sum(w.rows for w in self.servers[0].stats().workers if w.worker == rank)

    def null_pushes(self) -> int:
        return sum(w.null_pushes for w in self.servers[0].stats().workers)

    def values(self) -> dict[str, np.ndarray]:
        """What the servers hold, by parameter name, fetched anew."""
        client = self.contexts[0].client
        pushed, frozen = (
            {group.name: np.empty(group.num_elements, group.dtype) for group in groups}
            for groups in (client.manifest.pushed_groups, client.manifest.frozen_groups)
        )
        client.pull(pushed)
        client.pull_frozen(client.manifest, frozen)
        into = pushed | frozen
        found = {}
        for group in client.manifest.groups:
            start = 0
            for param in group.params:
                stop = start + param.num_elements
                found[param.name] = into[group.name][start:stop].reshape(param.shape)
                start = stop
        return found


@contextmanager
def serving(
    num_workers: int = 1,
    num_servers: int = 1,
    log_dir: str | None = None,
    on_lost: OnLost = "fail",
) -> Iterator[Servers]:
    """Servers and one connected client per worker, closed at the end."""
    credentials = Credentials.generate()
    servers = []
    for rank in range(num_servers):
        settings = ServerSettings(
            rank=rank, num_servers=num_servers, num_workers=num_workers, on_lost=on_lost
        )
        server = PSServer(settings, credentials)
        server.bind_inproc(f"keras-test-{next(_names)}")
        server.start()
        servers.append(server)
    endpoints = [server.endpoint for server in servers]

    def new_client(rank: int, generation: int = 0) -> PSClient:
        worker = Identity(Role.WORKER, rank, generation)
        return PSClient(
            endpoints, credentials, worker, num_workers=num_workers, timeout_s=DEADLINE_S
        )

    contexts = [
        Context(
            new_client(rank),
            num_workers,
            rank,
            log_dir,
            make_client=partial(new_client, rank),
        )
        for rank in range(num_workers)
    ]
    try:
        yield Servers(servers, contexts)
    finally:
        for context in contexts:
            context.feed_channel.close()
            context.client.close()
        for server in servers:
            server.close()


def together(work: Callable[[int], Any], num_workers: int) -> list[Any]:
    """Run `work(rank)` in one thread per worker; a worker's error is raised here."""
    results: list[Any] = [None] * num_workers
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert errors or not thread.is_alive(), "a worker hangs"
        if errors:
            raise errors[0]
    return results


def offer(channel: FeedChannel, rows: Sequence[Any], *, epoch: int, feed: str = "input") -> None:
    """Put the rows of an epoch into the channel, as a feed task would."""
    packer = Packer(FeedConfig(chunk_rows=7), feed=feed, epoch=epoch)
    with channel._state.changed:
        for chunk in packer.chunks(iter(rows)):
            channel._state.queue(feed).offer(chunk)
        channel._state.changed.notify_all()


def feed_epochs(
    channel: FeedChannel, epochs: Sequence[Sequence[Any]], *, finish: bool, feed: str = "input"
) -> None:
    """Put several epochs, each with its end; `finish`: no more will come."""
    for epoch, rows in enumerate(epochs):
        offer(channel, rows, epoch=epoch, feed=feed)
        channel.flush(feed, epoch)
    if finish:
        channel.finish(feed)


def blobs(num_rows: int, num_features: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two classes that a small model learns."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(num_rows, num_features)).astype("float32")
    return x, (x[:, 0] + x[:, 1] > 0).astype("int64")


def rows_of(x: np.ndarray, y: np.ndarray) -> list[tuple[np.ndarray, int]]:
    return [(row, int(label)) for row, label in zip(x, y, strict=True)]
