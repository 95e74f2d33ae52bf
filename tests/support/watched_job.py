"""A job at a driver without Spark: a coordinator, played nodes, the Job that both doors ask."""

from __future__ import annotations

import io
from collections.abc import Iterator

import msgspec
import pytest

from ps.stats.server_stats import ServerStats
from rpc.endpoint import Endpoint
from rpc.histogram import Latency
from tests.support.cluster_states import node_id, report_to
from tests.support.control import moving
from tests.support.waiting import wait_until
from tfos.config import Checkpoints, ClusterConfig, Restarts
from tfos.console.console import Console
from tfos.control import messages
from tfos.control.coordinator import Coordinator
from tfos.failure import NodeFailure
from tfos.phases import ClusterPhase
from tfos.topology import plan
from tfos.watch.job import Job
from tfos.watch.snapshot import JobInfo

NODES = ("ps:0", "worker:0", "worker:1")
INFO = JobInfo("c0ffee", "digits", "app-7", "http://127.0.0.1:4040", started_at=1e9)
SERVER = ServerStats(
    0,
    "SERVING",
    clock=8,
    uptime_s=1.0,
    bytes_in=5000,
    bytes_out=7000,
    requests={"push": Latency(8, 0.1, 0.001, 0.002, 0.003)},
)


class WatchedJob:
    """Three nodes that run, and an evaluator if wanted, until a test says otherwise."""

    def __init__(
        self, *, saves: bool = True, shows: bool = True, evaluates: bool = False, restarts: int = 0
    ) -> None:
        self.now_s = 100.0
        nodes = (*NODES, "evaluator:0") if evaluates else NODES
        config = ClusterConfig(
            checkpoints=Checkpoints(directory="/runs/7") if saves else None,
            restarts=Restarts(workers=restarts),
        )
        self.coordinator = Coordinator(
            plan(len(nodes), 1, eval_node=evaluates),
            config,
            Console(enabled=shows, stream=io.StringIO()),
            clock=lambda: self.now_s,
        )
        self.job = Job(self.coordinator, INFO)
        self.coordinator.act(moving(ClusterPhase.RESERVED))
        for name in nodes:
            node = node_id(name)
            self.coordinator.on_register(messages.Register(node, "1", "host-a", 7))
        for name in nodes:
            report_to(self.coordinator, node_id(name), messages.Listening(Endpoint("h", 1)))

    def beat(self, name: str, seq: int, **fields: object) -> messages.HeartbeatReply:
        beat = messages.Heartbeat(node_id(name), seq, "main_fun", **fields)  # type: ignore[arg-type]
        return self.coordinator.on_heartbeat(beat)

    def tick(self, seconds: float = 3.0) -> None:
        self.now_s += seconds
        self.coordinator.act(lambda state: state.on_tick(self.now_s))

    def fail(self, name: str, **fields: object) -> None:
        failure = NodeFailure(node_id(name), "host-a", 7, **fields)  # type: ignore[arg-type]
        report_to(self.coordinator, node_id(name), messages.Failed(failure))

    def note(
        self,
        event: messages.EpochTrained | messages.Evaluated | messages.SavedNow | messages.BestSaved,
    ) -> None:
        self.coordinator.read(lambda state: state.epochs.note(event))

    def log(self, name: str, *lines: str, dropped: int = 0) -> None:
        self.coordinator.on_log(messages.LogBatch(node_id(name), lines, dropped))

    def wait_for_order(self) -> int:
        """Wait until a save is ordered, and return its number."""
        return wait_until(
            lambda: self.coordinator.read(lambda state: state.saves_asked), "the order", 10.0
        )

    def answer_save(self, **fields: object) -> None:
        """Play the chief: wait for the order, and report."""
        number = self.wait_for_order()
        saved = messages.SavedNow(number, **fields)  # type: ignore[arg-type]
        report_to(self.coordinator, node_id("worker:0"), saved)


@pytest.fixture
def bed() -> Iterator[WatchedJob]:
    made = WatchedJob()
    yield made
    made.coordinator.close()


def server_stats() -> bytes:
    return msgspec.msgpack.encode(SERVER)
