"""A worker's feed channel behind a real listener, and consumers in threads, for tests."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from feeding.columnar.batch import EpochEnd, FeedEnd
from feeding.config import FeedConfig
from feeding.protocol.messages import LIMITS
from feeding.protocol.row_ranges import AcceptedRows
from feeding.receiver.batch_reader import BatchReader
from feeding.receiver.channel import FeedChannel
from feeding.receiver.data_feed import DataFeed
from feeding.sender.connection_pool import POOL
from feeding.sender.task import FeedReport, FeedTarget, FeedTask, InferenceTask
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.server.listener import Listener
from tests.support.rpc import over_tls
from tests.support.waiting import wait_until

WAIT_S = 20.0
CREDENTIALS = Credentials.generate()
CONFIG = FeedConfig(chunk_rows=16, feed_timeout_s=10.0, starve_timeout_s=30.0)


class Worker:
    """One worker: channel and listener."""

    def __init__(self, rank: int, config: FeedConfig = CONFIG, transport: str = "unix") -> None:
        self.rank = rank
        self.channel = FeedChannel(config, worker=f"worker:{rank}")
        self.listener = Listener(
            self.channel.handler,
            given_tls() if transport == "tls" else CREDENTIALS,
            Identity(Role.WORKER, rank),
            on_disconnect=self.channel.on_disconnect,
            limits=LIMITS,
        )
        if transport == "inproc":
            self.listener.bind_inproc(f"feed-{rank}")
        elif transport == "unix":
            self.listener.bind_unix()
        else:
            self.listener.bind_tcp("127.0.0.1")
        self.listener.start()

    @property
    def target(self) -> FeedTarget:
        return FeedTarget(self.rank, f"worker:{self.rank}", self.listener.endpoint)

    def close(self) -> None:
        self.channel.close("the test is over")
        self.listener.close()


@contextmanager
def workers(
    count: int, config: FeedConfig = CONFIG, transport: str = "unix"
) -> Iterator[list[Worker]]:
    started: list[Worker] = []
    try:
        started += [Worker(rank, config, transport) for rank in range(count)]
        yield started
    finally:
        for worker in started:
            worker.close()
        POOL.clear()


def given() -> Credentials:
    """Give a task its credentials, as Spark does."""
    return CREDENTIALS


@functools.cache
def given_tls() -> Credentials:
    """Give a task the credentials of workers that are reached by TLS."""
    return over_tls(CREDENTIALS)


def feed_task(
    some: list[Worker], epoch: int = 0, config: FeedConfig = CONFIG, **fields: Any
) -> FeedTask:
    targets = tuple(worker.target for worker in some)
    fields = {"credentials": given, **fields}
    return FeedTask(targets=targets, epoch=epoch, config=config, **fields)


def inference_task(
    some: list[Worker], config: FeedConfig = CONFIG, credentials: Callable[[], Credentials] = given
) -> InferenceTask:
    targets = tuple(worker.target for worker in some)
    return InferenceTask(targets=targets, credentials=credentials, config=config)


class Background:
    """A function in a thread; `result` gives its value or raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, timeout_s: float = WAIT_S) -> Any:
        self._thread.join(timeout_s)
        assert self.done, "still running"
        if self._error is not None:
            raise self._error
        return self._value


def worker_rows(report: FeedReport) -> Counter[int]:
    """Return how many rows each worker has accepted, by its number."""
    packed = report.accepted.items()
    return Counter({worker: AcceptedRows.unpack(rows).num_rows for worker, rows in packed})


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Wait for a condition, by default as long as a feed may take."""
    return wait_until(condition, what, timeout_s)


def read_epochs(worker: Worker, batch_size: int = 10, feed: str = "input") -> Background:
    """Read batches until the feed ends; gives a list of epochs, each a list of batches."""

    def read() -> list[list[Any]]:
        reader = BatchReader(worker.channel, feed)
        epochs: list[list[Any]] = [[]]
        while not isinstance(item := reader.next_batch(batch_size), FeedEnd):
            if isinstance(item, EpochEnd):
                epochs.append([])
            else:
                epochs[-1].append(item)
        return epochs[:-1]

    return Background(read)


def answer_all(
    worker: Worker, answer: Callable[[list[Any]], Any], batch_size: int = 10
) -> Background:
    """Run an inference loop until the feed ends; gives the sizes of its batches."""

    def loop() -> list[int]:
        feed = DataFeed(worker.channel, train_mode=False)
        sizes = []
        while not feed.should_stop():
            batch = feed.next_batch(batch_size)
            assert isinstance(batch, list)
            sizes.append(len(batch))
            feed.batch_results(answer(batch))
        return sizes

    return Background(loop)
