"""Calls that come at once, too early, too late, or with a Ctrl-C in between, on a played Spark."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.cluster_states import report_to
from tests.support.fake_spark import FakeRdd, FakeSpark
from tests.support.waiting import wait_until
from tfos import ClusterConfig, InputMode, Restarts, TFCluster
from tfos.control import messages
from tfos.errors import NodeFailedError, NotEnoughSlots, PhaseError, SettingsError, UnsupportedError
from tfos.failure import NodeFailure, NodeId
from tfos.feed import cluster_feeder
from tfos.node.spec import NodeBundle
from tfos.phases import ClusterPhase
from tfos.spark import interruptible
from tfos.spark.facts import SparkFacts

pytestmark = pytest.mark.socket

WAIT_S = 30.0
CONFIG = ClusterConfig(verbose=False, abort_s=2.0, slot_settle_s=0.2)
PATIENT = ClusterConfig(verbose=False, abort_s=WAIT_S, slot_settle_s=WAIT_S)


def main_fun(args, ctx):
    """Never called: nodes are played."""


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSpark]:
    monkeypatch.setattr(interruptible, "_UNWIND_S", WAIT_S)
    made = FakeSpark()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield made
    signal.signal(signal.SIGINT, before)
    made.close()


def _reserve(spark: FakeSpark, **options: Any) -> TFCluster:
    return TFCluster.reserve(
        spark, 3, 1, **{"input_mode": InputMode.SPARK, "config": CONFIG, **options}
    )


@pytest.fixture
def cluster(spark: FakeSpark) -> Iterator[TFCluster]:
    with _reserve(spark, queues=["input", "second"]) as made:
        made.start(main_fun)
        yield made


def _interrupt_when(condition: Callable[[], bool]) -> threading.Thread:
    """Send Ctrl-C to the main thread once something is so."""

    def watch() -> None:
        wait_until(condition)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def _blocked(spark: FakeSpark) -> FakeRdd:
    rdd = FakeRdd(spark, [1, 2, 3])
    rdd.gate.clear()
    return rdd


@pytest.mark.fault("F18")
def test_two_reserves_at_once_do_not_count_a_slot_twice(spark):
    spark.slots = 5
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(_reserve, spark) for _ in range(2)]
        errors = [each.exception(WAIT_S) for each in made]
    (refused,) = [error for error in errors if error is not None]
    assert isinstance(refused, NotEnoughSlots)
    assert "Spark offers 2 (executor driver: 1 x 5 slots, 3 claimed by clusters" in str(refused)
    (fits,) = [each.result() for each in made if each.exception() is None]
    with fits:
        fits.start(main_fun)


@pytest.mark.fault("F18")
def test_a_cluster_that_ends_or_is_dropped_gives_its_claimed_slots_back(spark):
    spark.slots = 3
    _reserve(spark).shutdown()
    _reserve(spark).abort()
    _reserve(spark, config=PATIENT)  # dropped at once
    with _reserve(spark, config=PATIENT) as cluster:
        cluster.start(main_fun)


@pytest.mark.fault("F18")
def test_slots_of_a_cluster_that_runs_are_not_claimed_as_well(spark):
    spark.slots = 6
    with _reserve(spark) as first, _reserve(spark) as second:
        first.start(main_fun)
        second.start(main_fun)


def test_a_second_train_on_a_feed_is_refused_and_one_on_another_feed_is_not(spark, cluster):
    rdd = _blocked(spark)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cluster.train, rdd, 1)
        assert rdd.started.wait(WAIT_S)
        with pytest.raises(
            PhaseError, match=r"train\(\) on 'input': a train\(\) that began \d+ s ago"
        ):
            cluster.train(FakeRdd(spark, [1]), 1)
        other = cluster.train(FakeRdd(spark, [1, 2]), 1, qname="second")
        rdd.gate.set()
        assert first.result(WAIT_S).fed_rows == 3
    assert other.fed_rows == 2
    assert cluster.train(FakeRdd(spark, [1]), 1).epochs[0].epoch == 1


@pytest.mark.parametrize("given", [1, "no", None])
def test_a_flag_that_nodes_would_not_read_is_refused_before_anything_is_fed(spark, cluster, given):
    with pytest.raises(SettingsError, match=f"exactly_once must be True or False, got {given!r}"):
        cluster.train(FakeRdd(spark, [1]), 1, exactly_once=given)


@pytest.mark.fault("F15")
def test_an_interrupted_train_cancels_its_job_and_the_feed_can_be_fed_again(spark, cluster):
    rdd = _blocked(spark)
    watcher = _interrupt_when(rdd.started.is_set)
    with pytest.raises(KeyboardInterrupt):
        cluster.train(rdd, 1)
    watcher.join(WAIT_S)
    assert cluster.phase is ClusterPhase.RUNNING
    assert cluster.train(FakeRdd(spark, [1]), 1).fed_rows == 1


@pytest.mark.fault("F15")
def test_an_interrupted_wait_for_slots_leaves_nothing(spark):
    spark.busy = 6
    looked = threading.Event()
    spark.on_look = looked.set
    watcher = _interrupt_when(looked.is_set)
    with pytest.raises(KeyboardInterrupt):
        _reserve(spark, config=PATIENT)
    watcher.join(WAIT_S)


@pytest.mark.fault("F15")
def test_a_second_interrupt_ends_the_wait_for_nodes_that_do_not_stop(spark):
    cluster = _reserve(spark, config=PATIENT)
    cluster.start(main_fun)
    workers = [node for node in spark.nodes if node.name != "ps:0"]
    for worker in workers:
        worker.returns = worker.stops = False

    def all_heard(kind: type[messages.Order]) -> bool:
        return all(any(isinstance(each, kind) for each in node.heard) for node in workers)

    first = _interrupt_when(lambda: all_heard(messages.FinishFeed))
    second = _interrupt_when(lambda: all_heard(messages.Stop))
    with pytest.raises(KeyboardInterrupt):
        cluster.shutdown()
    assert cluster.phase is ClusterPhase.RUNNING  # nobody waited until it was over
    first.join(WAIT_S)
    second.join(WAIT_S)
    for worker in workers:
        worker.stop()
    assert cluster._coordinator.wait(lambda state: state.phase is ClusterPhase.CLOSED, WAIT_S)


def test_jobs_run_in_the_scheduler_pool_of_the_users_thread(spark):
    spark.setLocalProperty("spark.scheduler.pool", "mine")
    with _reserve(spark) as cluster:
        cluster.start(main_fun)
        cluster.train(FakeRdd(spark, [1]), 1)
    assert spark.pools == ["mine"] * 3


def test_the_job_of_a_new_attempt_runs_in_the_scheduler_pool_of_the_users_thread(spark):
    spark.setLocalProperty("spark.scheduler.pool", "mine")
    config = dataclasses.replace(CONFIG, restarts=Restarts(workers=1))
    with _reserve(spark, config=config) as cluster:
        cluster.start(main_fun)
        before = list(spark.nodes)
        lost = NodeId("worker", 1)
        failure = NodeFailure(lost, "h", 7, signal=9, message="killed by SIGKILL")
        report_to(cluster._reserved.coordinator, lost, messages.Failed(failure))
        wait_until(
            lambda: any(node.started.is_set() for node in spark.nodes if node not in before),
            "the new attempt",
        )
    assert spark.pools == ["mine"] * 3


def test_a_second_start_that_is_refused_takes_no_charge_of_lost_nodes(spark):
    """They would be started again with its main_fun, or with none."""
    config = dataclasses.replace(CONFIG, restarts=Restarts(workers=1))
    refused: list[str] = []

    def starts_too(bundle: NodeBundle) -> None:
        if bundle.name == "worker:0":
            with pytest.raises(PhaseError) as refusal:
                mine.start(main_fun)
            refused.append(str(refusal.value))

    spark.register = starts_too
    with _reserve(spark, config=config) as mine:
        mine.start(main_fun)
        first = spark.nodes.copy()
        lost = NodeId("worker", 1)
        failure = NodeFailure(lost, "h", 7, signal=9, message="killed by SIGKILL")
        report_to(mine._reserved.coordinator, lost, messages.Failed(failure))
        wait_until(lambda: len(spark.nodes) > len(first), "the new attempt")
        assert spark.nodes[-1]._bundle.main_fun
    assert refused == ["start() was called before; make a new cluster for another run"]


def test_a_context_that_was_stopped_after_reserve_is_named(spark):
    with _reserve(spark) as cluster:
        spark.stop()
        with pytest.raises(UnsupportedError, match="the SparkContext is stopped; create a new one"):
            cluster.start(main_fun)
    assert cluster.phase is ClusterPhase.CLOSED


@pytest.mark.fault("F15")
def test_a_last_save_that_fails_is_a_warning_with_the_path_and_in_time(spark, tmp_path, capsys):
    config = ClusterConfig(verbose=False, abort_s=2.0, save_on_interrupt=str(tmp_path))
    cluster = _reserve(spark, config=config)
    cluster.start(main_fun)  # its server listens nowhere
    cluster.abort()
    warning = rf"the parameters were not saved to {tmp_path}: ps:0.* for [01]\.\d+ s"
    assert re.search(warning, capsys.readouterr().err)
    assert cluster.phase is ClusterPhase.CLOSED


@pytest.mark.fault("F15")
def test_jobs_that_others_cancel_end_the_cluster_in_order_workers_first(spark):
    cluster = _reserve(spark, config=PATIENT)
    cluster.start(main_fun)
    (server,) = [node for node in spark.nodes if node.name == "ps:0"]
    (worker,) = [node for node in spark.nodes if node.name == "worker:0"]
    worker.stops = False
    spark.cancelAllJobs()
    assert cluster._coordinator.wait(lambda state: state.is_ending, WAIT_S)
    assert not any(isinstance(order, messages.Stop) for order in server.heard)
    worker.stop()
    server.join()
    with pytest.raises(NodeFailedError, match="Job 1 cancelled"):
        cluster.shutdown()


def _then(watcher: threading.Thread, answer: threading.Event) -> None:
    watcher.join(WAIT_S)
    answer.set()


def _slow_rdd(rdd: FakeRdd, asked: threading.Event, answer: threading.Event) -> Any:
    """Return an RDD that is asked what it can do, and answers later."""

    class Slow:
        @property
        def mapPartitionsWithIndex(self) -> Any:
            asked.set()
            assert answer.wait(WAIT_S)
            return rdd.mapPartitionsWithIndex

    return Slow()


@pytest.mark.fault("F15")
def test_a_train_that_is_interrupted_before_it_feeds_gives_its_feed_back(spark, cluster):
    asked, answer = threading.Event(), threading.Event()
    rdd = _blocked(spark)
    watcher = _interrupt_when(asked.is_set)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_then, watcher, answer)
        with pytest.raises(KeyboardInterrupt):
            cluster.train(_slow_rdd(rdd, asked, answer), 1)
    assert cluster.train(FakeRdd(spark, [1]), 1).fed_rows == 1


@pytest.mark.fault("F15")
def test_an_interrupted_train_does_not_end_the_one_of_another_thread(spark, cluster):
    asked, answer = threading.Event(), threading.Event()
    rdd = _blocked(spark)
    watcher = _interrupt_when(asked.is_set)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(cluster.train, rdd, 1)
        assert rdd.started.wait(WAIT_S)
        pool.submit(_then, watcher, answer)
        with pytest.raises(KeyboardInterrupt):
            cluster.train(_slow_rdd(FakeRdd(spark, [1]), asked, answer), 1)
        rdd.gate.set()
        assert other.result(WAIT_S).fed_rows == 3


def test_the_first_trains_of_two_threads_share_their_accounts(spark, cluster, monkeypatch):
    made = []
    both = threading.Barrier(2)
    make = cluster_feeder.ClusterFeeder.__init__

    def slowly(self: cluster_feeder.ClusterFeeder, *args: Any) -> None:
        made.append(self)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        make(self, *args)

    monkeypatch.setattr(cluster_feeder.ClusterFeeder, "__init__", slowly)
    with ThreadPoolExecutor(2) as pool:
        for feed in ("input", "second"):
            pool.submit(cluster.train, FakeRdd(spark, [1]), 1, qname=feed)
    assert len(made) == 1
    reports = [cluster.train(FakeRdd(spark, [1]), 1, qname=feed) for feed in ("input", "second")]
    assert [report.epochs[0].epoch for report in reports] == [1, 1]


@pytest.mark.parametrize(
    ("slots", "mode", "is_told"),
    [
        (4, InputMode.SPARK, True),
        (5, InputMode.SPARK, False),  # a free slot for each worker: their tasks stay
        (4, InputMode.TENSORFLOW, False),
    ],
)
def test_fed_workers_whose_executors_spark_may_remove_are_warned_of(
    spark, monkeypatch, capsys, slots, mode, is_told
):
    monkeypatch.setattr(SparkFacts, "may_have_more", True)
    spark.slots = slots
    config = ClusterConfig(allow_dynamic=True, abort_s=2.0, slot_settle_s=0.2)
    _reserve(spark, input_mode=mode, config=config).abort()
    assert ("executorIdleTimeout=60s" in capsys.readouterr().err) is is_told


@pytest.mark.fault("F15")
def test_a_last_save_of_a_cluster_without_servers_is_none(spark, tmp_path, capsys):
    config = ClusterConfig(abort_s=2.0, save_on_interrupt=str(tmp_path))
    cluster = TFCluster.reserve(spark, 2, 0, input_mode=InputMode.SPARK, config=config)
    told = capsys.readouterr().err
    assert f"save_on_interrupt={str(tmp_path)!r} saves nothing with num_ps=0" in told
    assert f"go to {tmp_path}" not in told
    cluster.start(main_fun)
    cluster.abort()
    assert cluster.phase is ClusterPhase.CLOSED
    for node in spark.nodes:
        node.join()
    assert spark.busy == 0
    assert "not saved" not in capsys.readouterr().err


@pytest.mark.fault("F18")
def test_a_reserve_waits_for_nodes_that_start_and_so_are_counted_twice(spark):
    spark.slots = 6
    arrived, go = threading.Semaphore(0), threading.Event()

    def register(bundle: NodeBundle) -> None:
        arrived.release()
        assert go.wait(WAIT_S)

    spark.register = register
    looked_s: list[float] = []

    def look() -> None:
        looked_s.append(time.monotonic())
        if looked_s[-1] - looked_s[0] > 2 * CONFIG.slot_settle_s:
            go.set()

    with _reserve(spark) as first, ThreadPoolExecutor(1) as pool:
        starting = pool.submit(first.start, main_fun)
        for _ in range(3):
            assert arrived.acquire(timeout=WAIT_S)
        spark.on_look = look
        with _reserve(spark) as second:
            starting.result(WAIT_S)
            second.start(main_fun)
    assert go.is_set()


@pytest.mark.fault("F15")
def test_a_shutdown_whose_jobs_are_cancelled_while_workers_train_saves(
    spark, tmp_path, capsys, monkeypatch
):
    config = ClusterConfig(verbose=False, abort_s=2.0, save_on_interrupt=str(tmp_path))
    cluster = _reserve(spark, config=config)
    cluster.start(main_fun)
    workers = [node for node in spark.nodes if node.name != "ps:0"]
    for worker in workers:
        worker.returns = False
    with ThreadPoolExecutor(1) as pool:
        shutdown = pool.submit(cluster.shutdown)
        finished = cluster._coordinator.wait(
            lambda _: all(messages.FinishFeed("input") in node.heard for node in workers), WAIT_S
        )
        # The job's own thread or this shutdown() ends it: here the latter.
        monkeypatch.setattr(cluster._ending, "abort", lambda reason: None)
        spark.cancelAllJobs()
        assert isinstance(shutdown.exception(WAIT_S), NodeFailedError)
    assert finished
    assert f"the parameters were not saved to {tmp_path}" in capsys.readouterr().err


@pytest.mark.fault("F15")
def test_grace_secs_is_also_the_time_for_what_main_fun_leaves(spark, monkeypatch):
    monkeypatch.setattr("tfos.driver.shutdown._ORDERLY_S", 0.1)
    cluster = _reserve(spark)
    cluster.start(main_fun)
    cluster.shutdown(grace_secs=0.3)
    stops = [
        order for node in spark.nodes for order in node.heard if isinstance(order, messages.Stop)
    ]
    assert [stop.grace_s for stop in stops] == [0.3] * 3


@pytest.mark.fault("F18")
def test_a_second_cluster_without_slots_is_told_which_one_of_this_program_runs(spark):
    spark.slots = 3
    with _reserve(spark) as first:
        first.start(main_fun)
        with pytest.raises(NotEnoughSlots) as caught:
            _reserve(spark)
        assert f"Cluster {first.cluster_id} of this program runs" in str(caught.value)
        assert "shutdown()" in str(caught.value)
        assert f"tfos stop --job {first.cluster_id}" in str(caught.value)
