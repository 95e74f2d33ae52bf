"""cluster.results(): whose value is there, and what is said of the others. No Spark."""

from __future__ import annotations

import types
from typing import Any

import pytest

from rpc.endpoint import Endpoint
from tests.support.cluster_states import node_id, report_to
from tests.support.control import moving
from tfos.config import Checkpoints, ClusterConfig
from tfos.console.console import Console
from tfos.control import messages, return_values
from tfos.control.coordinator import Coordinator
from tfos.driver.results import ResultCalls
from tfos.errors import (
    CheckpointError,
    NodeFailedError,
    NoResultError,
    PhaseError,
    SettingsError,
)
from tfos.failure import EXECUTOR_LOST, NodeFailure
from tfos.monitor.history import BestCheckpoint
from tfos.phases import ClusterPhase
from tfos.topology import plan


class Cluster(ResultCalls):
    """Two servers and three workers that only report."""

    def __init__(self, checkpoints: Checkpoints | None = None) -> None:
        config = ClusterConfig(checkpoints=checkpoints)
        self.coordinator = Coordinator(plan(5, 2), config, Console(enabled=False))
        self._reserved: Any = types.SimpleNamespace(coordinator=self.coordinator, config=config)
        self.coordinator.act(moving(ClusterPhase.RESERVED))
        names = self.coordinator.read(lambda state: list(state.members))
        for at, name in enumerate(names):
            self.register(name, at)
        for name in names:
            self.hear(name, messages.Listening(Endpoint("127.0.0.1", 1)))

    def register(self, name: str, pid: int, attempt: int = 0) -> None:
        message = messages.Register(node_id(name, attempt), "0", "host", 1000 + pid)
        self.coordinator.on_register(message)

    def hear(self, name: str, event: messages.Event) -> None:
        report_to(self.coordinator, node_id(name), event)

    def returns(self, name: str, value: Any) -> None:
        self.hear(name, messages.Done(result=return_values.encode(value)))

    def fails(self, name: str, text: str, **how: Any) -> None:
        self.hear(name, messages.Failed(NodeFailure(node_id(name), "host", 1, message=text, **how)))

    def ends(self) -> None:
        """The driver stops all, and every node confirms."""
        self.coordinator.act(lambda state: state.end(state.live(), "end", grace_s=1.0))
        for name in self.coordinator.read(lambda state: list(state.members)):
            self.coordinator.on_stream_opened(node_id(name), 1)
            self.coordinator.on_stream_closed(node_id(name), 1)
        self.coordinator.act(moving(ClusterPhase.CLOSED))


@pytest.mark.parametrize(
    ("reasons", "lost"),
    [
        ({"ps:0": "an executor was lost", "worker:1": "killed"}, ""),  # its second attempt's value
        ({"worker:0": "an executor was lost"}, ""),  # main_fun has not returned
        ({"worker:2": "bigger than maxResultSize"}, "values of 1 of 3 workers .*maxResultSize"),
    ],
)
def test_values_that_spark_lost_are_told_from_workers_that_handed_nothing_over(reasons, lost):
    cluster = Cluster()
    for name in ("worker:1", "worker:2"):
        cluster.returns(name, None)
    cluster._reserved.plan = cluster.coordinator.read(lambda state: state.plan)
    cluster._ending = types.SimpleNamespace(  # type: ignore[assignment]
        values=lambda: {"worker:1": b"value", "ps:0": b""}, lost_values=lambda: reasons
    )
    if lost:
        with pytest.raises(NoResultError, match=lost):
            cluster.handed_over()
    else:
        assert cluster.handed_over() == {1: b"value"}


def test_values_come_in_rank_order_also_after_the_end_and_servers_have_none():
    cluster = Cluster()
    for name, value in (("worker:2", {"auc": 0.5}), ("worker:0", None), ("worker:1", (1, 2))):
        cluster.returns(name, value)
    assert cluster.results() == [None, (1, 2), {"auc": 0.5}]
    cluster.ends()
    assert cluster.results() == [None, (1, 2), {"auc": 0.5}]


def test_a_worker_that_still_runs_is_named_with_the_next_step():
    cluster = Cluster()
    cluster.returns("worker:1", 7)
    with pytest.raises(
        NoResultError,
        match=r"results\(\) lacks 2 of 3 values: worker:0 still runs main_fun; call shutdown\(\) "
        r"first, which waits for it; worker:2 still",
    ):
        cluster.results()
    assert cluster.results(default=None) == [None, 7, None]


def test_a_value_that_cannot_travel_warns_once_and_fails_only_results():
    cluster = Cluster()
    text = "main_fun returned a keras.Model; return numbers"
    shown: list[str] = []
    warn = lambda line, waits: shown.append(line)  # noqa: E731
    cluster.coordinator._console.warn = warn  # type: ignore[assignment, method-assign]
    for name in ("worker:0", "worker:1", "worker:2"):
        cluster.hear(name, messages.Done(no_result=text))
    assert shown == [f"worker:0: {text}. The run goes on; cluster.results() will fail"]
    cluster.ends()
    assert cluster.coordinator.phase is ClusterPhase.CLOSED
    with pytest.raises(NoResultError, match=r"worker:2: main_fun returned a keras\.Model; return"):
        cluster.results()
    assert cluster.results(default=0) == [0, 0, 0]


def test_a_lost_worker_leaves_the_values_of_the_others():
    cluster = Cluster()
    cluster.returns("worker:0", "chief")
    cluster.fails("worker:1", "worker:1 killed by SIGKILL", signal=9)
    cluster.returns("worker:2", "last")
    cluster.ends()
    with pytest.raises(NoResultError, match="1 of 3 values: worker:1 was lost: worker:1 killed by"):
        cluster.results()
    assert cluster.results(default=None) == ["chief", None, "last"]


def test_a_failed_cluster_tells_who_failed_and_who_was_stopped():
    cluster = Cluster()
    cluster.returns("worker:0", 1)
    cluster.fails("worker:1", "bad row\nand more", error_type="ValueError", traceback="T")
    with pytest.raises(
        NoResultError, match="worker:1 failed: bad row; worker:2 was stopped before main_fun"
    ) as caught:
        cluster.results()
    assert isinstance(caught.value.__cause__, NodeFailedError)
    assert cluster.results(default=None) == [1, None, None]


def test_the_value_is_the_last_attempts():
    cluster = Cluster()
    cluster.returns("worker:0", "old")
    member = cluster.coordinator.read(lambda state: state.members["worker:0"])
    member.take(messages.Register(node_id("worker:0", 1), "0", "host", 9), 0.0)
    assert member.done is None


def test_a_cluster_that_never_started_has_no_results():
    coordinator = Coordinator(plan(2, 1), ClusterConfig(), Console(enabled=False))
    coordinator.act(moving(ClusterPhase.RESERVED))
    calls = ResultCalls()
    calls._reserved = types.SimpleNamespace(coordinator=coordinator)  # type: ignore[assignment]
    with pytest.raises(
        PhaseError, match=r"results\(\) needs the cluster to be RUNNING or CLOSED or"
    ):
        calls.results()


def trained(number: int, **metrics: float) -> messages.EpochTrained:
    return messages.EpochTrained(1, number, metrics, steps=5, feed="input", fed_epoch=number)


def test_the_history_has_every_epoch_and_outlives_the_cluster():
    cluster = Cluster()
    assert not cluster.history()
    for number, loss in enumerate([0.5, 0.25]):
        cluster.hear("worker:0", trained(number, loss=loss))
    cluster.ends()
    assert cluster.history()["loss"] == [0.5, 0.25]
    assert [each.epoch for each in cluster.history().epochs] == [0, 1]


def test_the_best_checkpoint_is_the_chiefs_last_word():
    cluster = Cluster(Checkpoints(directory="/s", keep_best="val_loss"))
    for step, value in ((3, 0.5), (9, 0.25)):
        cluster.hear("worker:0", messages.BestSaved(f"/s/step-{step}", step, "val_loss", value))
    cluster.ends()
    assert cluster.best_checkpoint() == BestCheckpoint("/s/step-9", 9, "val_loss", 0.25)


def test_without_a_best_checkpoint_the_error_says_what_there_was():
    cluster = Cluster(Checkpoints(directory="/s", keep_best="val_loss"))
    with pytest.raises(CheckpointError, match="'val_loss': no epoch of fit on a distributed model"):
        cluster.best_checkpoint()
    for number in range(2):
        cluster.hear("worker:0", trained(number, loss=0.5, accuracy=0.5))
    with pytest.raises(
        CheckpointError, match=r"none of 2 epochs had .* they have 'loss', 'accuracy'"
    ):
        cluster.best_checkpoint()
    cluster.hear("worker:0", trained(2, loss=0.5, val_loss=0.5))
    with pytest.raises(CheckpointError, match="3 epochs have ended, but none could be saved"):
        cluster.best_checkpoint()


@pytest.mark.parametrize("plan", [None, Checkpoints(directory="/s")])
def test_a_cluster_that_keeps_no_best_says_how_to_ask_for_it(plan):
    with pytest.raises(SettingsError, match="keep_best='val_loss'"):
        Cluster(plan).best_checkpoint()


@pytest.mark.fault("F14")
@pytest.mark.parametrize("name", ["worker:0", "worker:1"])
@pytest.mark.parametrize("others_train", [True, False])
def test_a_value_stays_when_its_executor_is_lost_after_main_fun_returned(
    name: str, others_train: bool
):
    """Its supervisor may notice that before the driver misses its heartbeats."""
    cluster = Cluster()
    names = [f"worker:{rank}" for rank in range(3)]
    for each in names if not others_train else [name]:
        cluster.returns(each, each)
    cluster.fails(name, "executor 1 (JVM pid 7) ended", error_type=EXECUTOR_LOST)
    for each in names:
        cluster.returns(each, each)
    assert cluster.coordinator.error() is None
    assert cluster.results(default=None) == names
