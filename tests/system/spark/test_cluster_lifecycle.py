"""How clusters end: in any order of calls, after failures of workers, servers and starts."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.support.waiting import JVM_PAUSE_S, wait_until
from tfos import ClusterConfig, InputMode, TFCluster
from tfos.errors import (
    FeedJobError,
    NodeFailedError,
    NotEnoughSlots,
    NotPicklable,
    PhaseError,
    ReservationTimeout,
    SettingsError,
    ShutdownTimeout,
)
from tfos.phases import ClusterPhase

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),  # the context starts in the first test's setup
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]

ABORT_S = 30.0
"""The product's own abort_s is 10 s; the rest is for a loaded machine."""
GONE_S = 20.0
"""A supervisor says goodbye, then removes its files and ends."""
AT_ONCE_S = 15.0
"""More than slot_settle_s, which is 4 s, and far less than slot_wait_s, which is 60 s."""


def drain(args, ctx):
    """Take the whole feed."""
    ctx.ps_client()  # this test is about rows: nothing is learned
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(16)


def nothing(args, ctx):
    """Return at once."""


def sleep_long(args, ctx):
    """Never return by itself."""
    time.sleep(600)


def raise_in_worker_1(args, ctx):
    """Raise after the first batch, in one worker."""
    ctx.ps_client()  # this test is about rows: nothing is learned
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(16)
        if ctx.task_index == 1:
            raise ZeroDivisionError("the marker of this test")


def die(args, ctx):
    """End worker:1 in the way that args says; the chief goes on."""
    ctx.ps_client()  # this test is about rows: nothing is learned
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(16)
        if ctx.task_index == 1:
            print("last words", flush=True)  # noqa: T201  # what the driver must show
            if args == "exit":
                os._exit(1)
            if args == "segv":
                ctypes.string_at(0)
            os.kill(os.getpid(), signal.Signals[args])


def _rows(sc, count=20_000, partitions=4):
    return sc.parallelize(range(count), partitions)


@pytest.fixture(autouse=True)
def _end_clusters(monkeypatch):
    """A failed test must not leave nodes that take the next one's slots."""
    made: list[TFCluster] = []
    reserve = TFCluster.reserve.__func__  # type: ignore[attr-defined]  # of the classmethod

    def noting(cls, *args, **kwargs):
        cluster = reserve(cls, *args, **kwargs)
        made.append(cluster)
        return cluster

    monkeypatch.setattr(TFCluster, "reserve", classmethod(noting))
    yield
    for cluster in made:
        cluster.abort("the test is over")


def _reserve(sc, **options) -> TFCluster:
    return TFCluster.reserve(sc, 3, 1, input_mode=InputMode.SPARK, **options)


def _pids(cluster: TFCluster) -> list[int]:
    return [node.pid for node in cluster.status().nodes if node.pid]


def _await_idle(sc) -> None:
    """Wait until no task of an earlier test runs any more."""
    scheduler = sc._jsc.sc().taskScheduler()

    def is_idle() -> bool:
        running = str(scheduler.runningTasksByExecutors().values().mkString(" "))
        return not set(running.split()) - {"0"}

    wait_until(is_idle, "the end of an earlier test's tasks", pause_s=JVM_PAUSE_S)


def _await_gone(pids: list[int], within_s: float) -> None:
    def left() -> list[int]:
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    wait_until(lambda: not left(), lambda: f"the end of {left()}", within_s)


@pytest.mark.fault("F03")
@pytest.mark.fault("F17")
@pytest.mark.fault("F36")
def test_a_workers_exception_is_the_cause_at_the_driver_and_the_next_cluster_works(spark):
    cluster = _reserve(spark, config=ClusterConfig(max_inflight_bytes=4096))
    cluster.start(raise_in_worker_1, None)
    pids = _pids(cluster)
    started = time.monotonic()
    with pytest.raises(NodeFailedError) as caught:
        cluster.train(_rows(spark), num_epochs=3)
    assert time.monotonic() - started < ABORT_S
    error = caught.value
    first = error.failures[0]
    assert (first.node.name, first.error_type) == ("worker:1", "ZeroDivisionError")
    assert "raise_in_worker_1" in str(error.__cause__)
    assert "the marker of this test" in str(error).splitlines()[0]
    assert f"raised in worker:1 (executor {first.executor_id}, {first.host}, pid" in str(error)
    _await_gone(pids, ABORT_S)
    assert cluster.phase is ClusterPhase.FAILED
    cluster.shutdown()  # it was raised already
    assert cluster.status().phase == "CLOSED"

    with _reserve(spark) as cluster:
        cluster.start(drain, None)
        report = cluster.train(_rows(spark, 1000), num_epochs=1)
    assert report is not None
    assert report.trained_rows == 1000
    assert cluster.failures == ()


@pytest.mark.long
@pytest.mark.fault("F03")
def test_an_exception_without_a_feed_is_raised_by_shutdown(spark):
    def fail(args, ctx):
        raise KeyError("nobody feeds")

    with (
        pytest.raises(NodeFailedError, match="KeyError: 'nobody feeds'"),
        TFCluster.reserve(spark, 2, 1) as cluster,
    ):
        cluster.start(fail, None)


@pytest.mark.fault("F04")
@pytest.mark.parametrize(
    ("how", "text"),
    [
        pytest.param("exit", "code 1", marks=pytest.mark.long),
        ("segv", "SIGSEGV"),
        pytest.param("SIGABRT", "SIGABRT", marks=pytest.mark.long),
    ],
)
def test_a_crash_fails_the_cluster_with_its_kind_and_last_lines(spark, how, text):
    cluster = _reserve(spark)
    cluster.start(die, how)
    started = time.monotonic()
    with pytest.raises(NodeFailedError) as caught:
        cluster.train(_rows(spark), num_epochs=3)
    assert time.monotonic() - started < ABORT_S
    assert text in str(caught.value)
    assert any("last words" in line for line in caught.value.failures[0].log_tail)
    cluster.shutdown()


@pytest.mark.fault("F01")
def test_a_killed_worker_is_a_warning_and_the_others_finish(spark):
    with _reserve(spark) as cluster:
        cluster.start(die, "SIGKILL")
        report = cluster.train(_rows(spark), num_epochs=2)
        assert [failure.node.name for failure in cluster.failures] == ["worker:1"]
    assert report is not None
    assert report.epochs[1].fed_rows == 20_000
    assert report.epochs[1].per_worker["worker:0"] == 20_000
    assert report.epochs[1].dropped_rows == 0


@pytest.mark.long
@pytest.mark.fault("F16")
def test_shutdown_works_in_every_phase_twice_and_from_another_thread(spark):
    reserved = _reserve(spark)
    reserved.shutdown()
    reserved.shutdown()
    assert reserved.phase is ClusterPhase.CLOSED

    cluster = _reserve(spark)
    cluster.start(drain, None)
    pids = _pids(cluster)
    threads = [threading.Thread(target=cluster.shutdown) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_S)
        assert not thread.is_alive()
    cluster.shutdown()
    assert cluster.phase is ClusterPhase.CLOSED
    _await_gone(pids, GONE_S)
    with pytest.raises(
        PhaseError, match=r"train\(\) needs the cluster to be RUNNING; it is CLOSED"
    ):
        cluster.train(_rows(spark))


@pytest.mark.long
@pytest.mark.fault("F16")
def test_calls_out_of_order_name_the_phase(spark):
    with _reserve(spark) as cluster:
        with pytest.raises(PhaseError, match="RESERVED"):
            cluster.train(_rows(spark))
        cluster.start(nothing, None)
        with pytest.raises(PhaseError, match=r"start\(\) needs the cluster to be RESERVED"):
            cluster.start(nothing, None)
        with pytest.raises(SettingsError, match="qname='other' is not a feed"):
            cluster.train(_rows(spark), qname="other")
        with pytest.raises(SettingsError, match=r"RDD or a Spark DataFrame, got builtins\.list"):
            cluster.train([1, 2, 3])


@pytest.mark.long
@pytest.mark.fault("F16")
def test_shutdown_during_train_ends_both(spark):
    cluster = _reserve(spark, config=ClusterConfig(max_inflight_bytes=4096))
    cluster.start(sleep_long, None)
    errors: list[BaseException] = []

    def feed():
        try:
            cluster.train(_rows(spark), num_epochs=1)
        except PhaseError as error:
            errors.append(error)

    thread = threading.Thread(target=feed)
    thread.start()
    cluster.abort("the test wants it")
    thread.join(ABORT_S)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [PhaseError]


def test_a_main_fun_that_does_not_return_is_stopped_at_the_timeout(spark):
    cluster = TFCluster.reserve(spark, 2, 1)
    cluster.start(sleep_long, None)
    pids = _pids(cluster)
    late = r"did not return within 1 s on worker:0(?!.*feed)(.|\n)*timeout=.*None for no limit"
    with pytest.raises(ShutdownTimeout, match=late):
        cluster.shutdown(timeout=1)
    _await_gone(pids, GONE_S)


def test_an_exception_in_the_block_stops_all_at_once(spark):
    cluster = TFCluster.reserve(spark, 2, 1)
    cluster.start(sleep_long, None)
    pids = _pids(cluster)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="the user's own"), cluster:
        raise RuntimeError("the user's own")
    assert time.monotonic() - started < ABORT_S
    _await_gone(pids, GONE_S)


@pytest.mark.long
@pytest.mark.fault("F15")
@pytest.mark.parametrize(
    "cancel",
    [
        lambda spark: spark.cancelAllJobs(),
        lambda spark: spark.cancelJobsWithTag("of-the-user"),
        lambda spark: spark.cancelJobGroup("of-the-user"),
    ],
    ids=["all", "tag", "group"],
)
def test_cancelling_every_job_of_the_context_tag_or_group_ends_the_cluster(spark, cancel):
    spark.addJobTag("of-the-user")
    spark.setJobGroup("of-the-user", "a cell")
    try:
        cluster = _reserve(spark, config=ClusterConfig(max_inflight_bytes=4096))
        cluster.start(sleep_long, None)
    finally:
        spark.clearJobTags()
        spark.setLocalProperty("spark.jobGroup.id", None)
    pids = _pids(cluster)
    canceller = threading.Timer(1.0, cancel, (spark,))
    canceller.start()
    started = time.monotonic()
    with pytest.raises((NodeFailedError, FeedJobError), match="cancelled"):
        cluster.train(_rows(spark), num_epochs=1)
    cluster.abort()
    assert time.monotonic() - started < 1.0 + ABORT_S
    _await_gone(pids, GONE_S)


@pytest.mark.fault("F18")
def test_too_few_slots_fail_at_once_with_the_arithmetic(spark):
    _await_idle(spark)
    started = time.monotonic()
    with pytest.raises(NotEnoughSlots) as caught:
        TFCluster.reserve(spark, 4, 1)
    assert time.monotonic() - started < AT_ONCE_S
    assert "need 4 task slots at once (1 ps + 3 workers), Spark offers 3" in str(caught.value)


@pytest.mark.long
@pytest.mark.fault("F18")
def test_a_slot_that_another_job_holds_does_not_count(spark, tmp_path):
    _await_idle(spark)
    with _Holder(spark, tmp_path):
        started = time.monotonic()
        with pytest.raises(NotEnoughSlots, match="1 of them held by running tasks"):
            TFCluster.reserve(spark, 3, 1)
        assert time.monotonic() - started < AT_ONCE_S


@pytest.mark.fault("F19")
def test_a_node_that_does_not_come_is_named_at_the_timeout(spark, tmp_path):
    cluster = TFCluster.reserve(spark, 3, 1, config=ClusterConfig(reservation_timeout_s=4))
    with _Holder(spark, tmp_path):
        with pytest.raises(ReservationTimeout) as caught:
            cluster.start(nothing, None)
        text, missing = str(caught.value), caught.value.missing
        assert any(f"{name} (never registered)" in text for name in missing)
        listed = text.partition("present: ")[2].partition(".")[0]
        present = set() if listed == "none" else set(listed.split(", "))
        assert present | set(missing) == {"ps:0", "worker:0", "worker:1"}
    cluster.shutdown()
    with TFCluster.reserve(spark, 3, 1) as again:
        again.start(nothing, None)


@pytest.mark.long
@pytest.mark.fault("F56")
def test_what_cannot_be_pickled_is_named_before_any_node_starts(spark):
    with _reserve(spark) as cluster:

        def captures(args, ctx):
            return spark

        with pytest.raises(NotPicklable, match=r"refers to 'spark' \(SparkContext\) at test_clus"):
            cluster.start(captures, None)
        assert all(node.status == "not registered" for node in cluster.status().nodes)
        cluster.start(drain, None)


@pytest.mark.fault("F56")
def test_a_module_that_executors_lack_fails_the_start_and_is_named(spark, tmp_path, monkeypatch):
    tmp_path.joinpath("only_on_the_driver.py").write_text("def work(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("only_on_the_driver")

    def needs_it(args, ctx):
        module.work()

    cluster = TFCluster.reserve(spark, 2, 1)
    with pytest.raises(NodeFailedError, match="No module named 'only_on_the_driver'"):
        cluster.start(needs_it, None)
    cluster.shutdown()


class _Holder:
    """A user's job that holds one slot until the block ends."""

    def __init__(self, sc, directory: Path) -> None:
        self._sc = sc
        self._stop = directory / "stop"
        self._begun = directory / "begun"

    def __enter__(self) -> None:
        stop, begun = self._stop, self._begun

        def hold(_):
            begun.touch()
            deadline = time.monotonic() + 60
            while not stop.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            yield 0

        rdd = self._sc.parallelize([0], 1).mapPartitions(hold)
        self._thread = threading.Thread(target=rdd.collect)
        self._thread.start()
        wait_until(begun.exists, "the task that holds a slot")

    def __exit__(self, *exc_info: object) -> None:
        self._stop.touch()
        self._thread.join(60)
