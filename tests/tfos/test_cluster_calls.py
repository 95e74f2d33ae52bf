"""What TFCluster's calls do with their arguments, without Spark."""

from __future__ import annotations

import contextlib
import math
import os
import types
from collections.abc import Collection
from typing import Any

import pytest

from tests.support.fake_spark import FakeSpark
from tests.support.nodes import node_settings
from tfos import TFCluster
from tfos.config import Checkpoints, ClusterConfig
from tfos.console.console import Console
from tfos.control.authority import ClusterAuthority
from tfos.control.coordinator import Coordinator
from tfos.control.state.actions import Action
from tfos.control.state.cluster_state import ClusterState
from tfos.driver.main_fun_wait import MainFunWait
from tfos.errors import PhaseError, ReservationTimeout, SettingsError, ShutdownTimeout
from tfos.failure import NODE_JOB_FAILED
from tfos.feed.request import FeedRequest
from tfos.phases import ClusterPhase
from tfos.spark.task_secrets import PREFIX
from tfos.topology import plan
from tfos.watch.snapshot import JobInfo

pytestmark = pytest.mark.socket


class Jobs:
    def __init__(self) -> None:
        self.ended = 0

    def is_bringing(self, ended: Collection[str]) -> bool:
        return False

    def end(self, timeout_s: float) -> bool:
        self.ended += 1
        return True


class Feeding:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, int, str]] = []

    def train(self, request: FeedRequest, is_abandoned: Any) -> None:
        self.calls.append((request.data, request.num_epochs, request.feed))

    def feed_interval(self, request: FeedRequest) -> None:
        self.calls.append((request.data, request.num_epochs, request.feed))


class Stream:
    """A DStream of two batches that have come already."""

    def foreachRDD(self, feed: Any) -> None:
        for batch in ("first", "second"):
            feed(batch)


def _run(state: ClusterState) -> list[Action]:
    state.move(ClusterPhase.RESERVED)
    state.move(ClusterPhase.RUNNING)
    return []


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> TFCluster:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = ClusterConfig(verbose=False)
    console = Console(enabled=False)
    coordinator = Coordinator(plan(2, 1), config, console)
    coordinator.act(_run)
    reserved: Any = types.SimpleNamespace(
        sc=FakeSpark(),
        config=config,
        console=console,
        plan=plan(2, 1),
        settings=node_settings(),
        coordinator=coordinator,
        credentials=types.SimpleNamespace(cluster_id="c"),
        keys=types.SimpleNamespace(authority=ClusterAuthority("c")),
        job=types.SimpleNamespace(info=JobInfo("c", "words", "app-7")),
    )
    made = TFCluster(reserved)
    made._ending._jobs = Jobs()  # type: ignore[assignment]
    return made


@pytest.mark.fault("F16")
def test_a_forked_child_at_the_end_of_a_with_block_ends_nothing(cluster, monkeypatch):
    """It would wait for days for what its copy of the state never shows, then cancel the jobs."""
    own = os.getpid()
    with cluster:
        monkeypatch.setattr("os.getpid", lambda: own + 1)
    assert (cluster.phase, cluster._ending._jobs.ended) == (ClusterPhase.RUNNING, 0)
    monkeypatch.setattr("os.getpid", lambda: own)
    cluster.abort()
    assert cluster._ending._jobs.ended == 1


def test_a_forked_child_is_refused_what_would_wait_in_it_for_ever(cluster, monkeypatch):
    feeding = cluster._feed_service.feeder = Feeding()
    own = os.getpid()
    rows: Any = types.SimpleNamespace(mapPartitionsWithIndex=None)
    monkeypatch.setattr("os.getpid", lambda: own + 1)
    with pytest.raises(PhaseError, match=r"train\(\) .*has forked.* in a thread"):
        cluster.train(rows)
    request = FeedRequest(data=rows, feed="input", feed_timeout_s=1.0)
    cluster._feed_service.check("inference()", request)  # its results come through Spark
    monkeypatch.setattr("os.getpid", lambda: own)
    assert feeding.calls == []
    cluster.abort()


@pytest.mark.parametrize(("given", "fed"), [(0, 1), (2, 2)])
def test_each_batch_of_a_stream_is_fed_once_unless_told_otherwise(cluster, given, fed):
    feeding = cluster._feed_service.feeder = Feeding()
    assert cluster.train(Stream(), num_epochs=given) is None
    assert feeding.calls == [("first", fed, "input"), ("second", fed, "input")]
    cluster.abort()


def test_an_rdd_is_fed_ten_times_unless_told_otherwise(cluster):
    feeding = cluster._feed_service.feeder = Feeding()
    rdd = types.SimpleNamespace(mapPartitionsWithIndex=None)
    cluster.train(dataRDD=rdd)
    assert feeding.calls == [(rdd, 10, "input")]
    cluster.abort()


@pytest.mark.parametrize(
    ("name", "resumes_epochs", "calls"),
    [
        (
            "sql.streaming.queryId",
            True,
            r"foreachBatch\(cluster\.train_batch\) or cluster\.stream\(",
        ),
        ("spark.streaming.internal.batchTime", True, r"cluster\.train\(dstream\)"),
        ("sql.streaming.queryId", False, ""),
        ("spark.scheduler.pool", True, ""),
    ],
)
def test_a_batch_of_a_stream_is_no_epoch_of_a_run_that_resumes(
    cluster, name, resumes_epochs, calls
):
    plan = Checkpoints(directory="/runs/7", resume_epochs=resumes_epochs)
    cluster._reserved.config = ClusterConfig(checkpoints=plan)
    feeding = cluster._feed_service.feeder = Feeding()
    rdd = types.SimpleNamespace(mapPartitionsWithIndex=None)
    cluster._reserved.sc.setLocalProperty(name, "7")
    with pytest.raises(SettingsError, match=calls) if calls else contextlib.nullcontext():
        cluster.train(rdd, 1)
    assert feeding.calls == ([] if calls else [(rdd, 1, "input")])
    cluster.abort()


@pytest.mark.fault("F15")
def test_an_interrupted_shutdown_stops_every_node_at_once(cluster, monkeypatch):
    def interrupt(*args: Any) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster._coordinator, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cluster.shutdown()
    assert cluster.phase is ClusterPhase.CLOSED
    assert cluster._ending._jobs.ended == 1
    cluster.shutdown()


@pytest.mark.fault("F03")
@pytest.mark.parametrize(
    ("kind", "error_type", "is_told"),
    [
        (ZeroDivisionError, "ValueError", True),
        (KeyboardInterrupt, "ValueError", True),
        (KeyboardInterrupt, NODE_JOB_FAILED, False),  # pyspark cancels the node jobs
    ],
)
def test_a_block_that_raises_something_else_is_told_of_the_clusters_failure(
    cluster, capsys, kind, error_type, is_told
):
    def fail(state: ClusterState) -> list[Action]:
        return state.fail(state.members["worker:0"].failure(error_type, "bad row"))

    cluster._coordinator.act(fail)
    with pytest.raises(kind), cluster:
        raise kind
    told = f"which no call has raised: {error_type}: bad row; " in capsys.readouterr().err
    assert told is is_told


def test_a_stream_that_cannot_stop_leaves_no_nodes(cluster):
    def stop(**options: Any) -> None:
        raise OSError("gone")

    never_started = types.SimpleNamespace(getState=lambda: "INITIALIZED")
    with pytest.raises(OSError, match="gone"):
        cluster.shutdown(ssc=types.SimpleNamespace(_jssc=never_started, stop=stop))
    assert cluster._ending._jobs.ended == 1


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, (259_200.0, True)),
        ({"timeout": -1}, (259_200.0, True)),
        ({"timeout": 5}, (5.0, False)),
        ({"timeout": None}, (math.inf, False)),
    ],
)
def test_only_the_default_limit_of_shutdown_counts_from_the_last_step(
    cluster, monkeypatch, options, limit
):
    asked = []

    def wait(_: MainFunWait, timeout_s: float, *, from_last_step: bool) -> bool:
        asked.append((timeout_s, from_last_step))
        return False

    monkeypatch.setattr(MainFunWait, "wait", wait)
    said = "return or make a step" if limit[1] else "return"
    with pytest.raises(ShutdownTimeout, match=f"main_fun did not {said} within"):
        cluster.shutdown(**options)
    assert asked == [limit]


@pytest.mark.parametrize("grace_secs", [0, 0.0, None])
def test_grace_secs_may_be_left_out_or_none(cluster, monkeypatch, grace_secs):
    asked = []
    monkeypatch.setattr(
        cluster._ending, "shutdown", lambda *_, grace_s, **__: asked.append(grace_s)
    )
    cluster.shutdown(grace_secs=grace_secs)
    assert asked == [0.0]


@pytest.mark.parametrize(
    ("options", "bound"),
    [({"grace_secs": "30"}, ">="), ({"grace_secs": -1}, ">="), ({"timeout": 0}, ">")],
)
def test_shutdown_refuses_times_before_it_ends_anything(cluster, options, bound):
    (name,) = options
    with pytest.raises(SettingsError, match=f"{name} must be {bound} 0 seconds, got"):
        cluster.shutdown(**options)
    assert cluster.phase is ClusterPhase.RUNNING
    cluster.abort()


def test_a_saved_model_answers_in_the_place_of_main_fun(cluster, monkeypatch):
    """What it answers is in tests/system/spark/test_predict_column.py."""
    asked: list[tuple[Any, ...]] = []

    def predicted_by(*given: Any) -> str:
        asked.append(given)
        return "the answers"

    monkeypatch.setattr("tfos.predict.column.predicted_by", predicted_by)
    assert cluster.inference("a frame", model="m", columns=["x"], output="y") == "the answers"
    cluster.inference("a frame", model="m", batch_size=8)
    assert asked == [
        ("a frame", "m", ["x"], "y", "error", None),
        ("a frame", "m", None, None, "error", 8),
    ]
    with pytest.raises(SettingsError, match=r"batch_size=8 needs model=: main_fun sets its own"):
        cluster.inference("a frame", batch_size=8)
    for given in ({"feed_timeout": 5}, {"qname": "nosuch"}):
        with pytest.raises(SettingsError, match="with model=: Spark's own tasks compute"):
            cluster.inference("a frame", model="m", **given)
    assert len(asked) == 2
    cluster.abort()


def secrets_of(spark: FakeSpark) -> list[str]:
    return [each for key, each in spark.properties.items() if key.startswith(PREFIX) and each]


def test_an_abort_leaves_no_secret_in_the_threads_local_properties():
    with contextlib.closing(FakeSpark()) as spark:
        cluster = TFCluster.reserve(spark, 2, 1)
        assert secrets_of(spark)
        cluster.abort()
        assert not secrets_of(spark)
        with pytest.raises(KeyError), TFCluster.reserve(spark, 2, 1):
            raise KeyError("the program's own")
        assert not secrets_of(spark)


def test_a_start_that_ends_the_cluster_leaves_no_secret(monkeypatch):
    def fail(reserved: Any, _ending: Any, _pickled: Any) -> None:
        reserved.coordinator.close(ClusterPhase.FAILED)
        raise ReservationTimeout("no node came")

    monkeypatch.setattr("tfos.cluster.start_nodes", fail)
    with contextlib.closing(FakeSpark()) as spark:
        cluster = TFCluster.reserve(spark, 2, 1)
        with pytest.raises(ReservationTimeout):
            cluster.start(lambda args, ctx: None)
        assert not secrets_of(spark)
        cluster.abort()
