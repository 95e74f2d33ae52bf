"""What it costs that somebody looks: bytes between reader and driver, nothing at the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import msgspec
import pytest

from ps.stats.server_stats import SHOWN_REQUESTS, ServerStats
from rpc.histogram import Latency
from tests.support.page_reader import LOOK_S, PageReader
from tests.support.watched_job import WatchedJob
from tfos.cli.jobs import FOLLOW_S
from tfos.control import messages
from tfos.control.state.actions import Send
from tfos.watch.page_server import JobPage

MOST_BYTES_PER_S = 3000
"""Per node, while somebody looks."""
FEWEST_NODES = 2
"""Of a cluster; the job here has one more, so a small one costs less than is counted here."""
LOOKS = 5
SERVER = ServerStats(
    0,
    "SERVING",
    clock=123456,
    uptime_s=5000.0,
    bytes_in=123456789012,
    bytes_out=123456789012,
    requests={name: Latency(123456, 0.1, 0.001, 0.002, 0.003) for name in SHOWN_REQUESTS},
)
LINE = '2031-01-01 "größe": шаг — 損失 0.6931 ' * 3


class Busy:
    """A job that has trained for long, has lost nodes before, and prints more than is shown."""

    def __init__(self) -> None:
        self.bed = WatchedJob()
        self._numbers = count(1)
        for _ in range(20):
            self.bed.fail("worker:1", signal=9, traceback="Traceback\n" * 400, message="m" * 900)
        for _ in range(200):
            self.goes_on()

    def goes_on(self) -> None:
        """Play two seconds: heartbeats, an epoch with many metrics, an evaluation, many lines."""
        seq = next(self._numbers)
        names = ("compute_s", "feed_s", "lookup_s", "pull_s", "push_s", "wait_s")
        progress = {"at_s": 2.0 * seq, "steps": 777.3 * seq, "rows": 46712.2 * seq, "loss": 1 / seq}
        progress |= dict.fromkeys(names, 0.1234567 * seq)
        feed = messages.FeedSnapshot("input", 10**9, 10**9, 10**6, 10**7, 1 / 3, trained_rows=10**9)
        for name in ("worker:0", "worker:1"):
            self.bed.beat(name, seq, progress=progress, feeds=(feed,), rss_bytes=1 << 31)
        self.bed.beat("ps:0", seq, stats=msgspec.msgpack.encode(SERVER))
        metrics = {f"val_metric_{number}": 1 / 3 for number in range(20)}
        for event in (messages.EpochTrained(1, seq, metrics), messages.Evaluated(seq, metrics)):
            self.bed.note(event)
        self.bed.log("worker:1", *(LINE for _ in range(300)))
        self.bed.tick(2.0)


@pytest.fixture
def busy() -> Busy:
    return Busy()


@pytest.fixture
def page(busy: Busy) -> Iterator[JobPage]:
    made = JobPage(busy.bed.job, lambda: b"")
    made.start("127.0.0.1", 0)
    yield made
    made.close()


@pytest.mark.socket
def test_the_page_with_a_log_costs_each_node_less_than_3_kb_per_second(busy, page):
    reader = PageReader(page.url, "worker:1")
    reader.look()
    for _ in range(LOOKS):
        busy.goes_on()
        num_bytes = reader.look()
        assert num_bytes / LOOK_S / FEWEST_NODES < MOST_BYTES_PER_S
        assert num_bytes > 6000  # the log is not empty


def test_following_a_log_costs_less_than_3_kb_per_second(busy):
    last = 0.0
    for _ in range(LOOKS):
        busy.goes_on()
        answer = busy.bed.job.answer(messages.Ask("log", "worker:1", last))
        last = msgspec.json.decode(answer)["last"]
        assert 4000 < len(answer) < MOST_BYTES_PER_S * FOLLOW_S


@pytest.mark.socket
def test_who_looks_costs_the_nodes_nothing(busy, page, monkeypatch):
    sent: list[object] = []
    monkeypatch.setattr(busy.bed.coordinator, "_execute", sent.extend)
    reader = PageReader(page.url, "worker:1")
    for _ in range(LOOKS):
        reader.look()
        busy.bed.job.answer(messages.Ask("log", "worker:1"))
        busy.bed.job.answer(messages.Ask("status"))
        busy.bed.log("worker:1", LINE)
    assert [each for each in sent if isinstance(each, Send)] == []
    busy.bed.job.stop()
    assert [each for each in sent if isinstance(each, Send)]  # an order would have been seen
