"""The driver feeds again what is lost with a worker: orders and counts; jobs are played."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from feeding.config import FeedConfig
from feeding.protocol.row_ranges import AcceptedRows
from feeding.sender.shuffle import Shuffle
from feeding.sender.task import FeedReport, FeedTask
from feeding.sender.worker_link import LostWorker, process_key
from rpc.auth.handshake import Credentials
from rpc.endpoint import Endpoint
from tfos.config import Checkpoints, ClusterConfig, Restarts
from tfos.console.console import Console
from tfos.console.progress import TrainingProgress
from tfos.control import messages
from tfos.control.state.actions import Action, Send
from tfos.control.state.cluster_state import ClusterState
from tfos.control.state.cluster_view import ClusterView
from tfos.driver.preflight import VALIDATION_FEED
from tfos.errors import FeedJobError, FeedTimeout, NodeFailedError, PoisonRows, SettingsError
from tfos.failure import NodeFailure, NodeId
from tfos.feed.cluster_feeder import ClusterFeeder
from tfos.feed.epoch import EpochFeed, targets_of
from tfos.feed.epoch_feeder import EpochFeeder
from tfos.feed.micro_batch import BatchKnown, MicroBatch, answer_to
from tfos.feed.request import EpochNumbers, FeedCall, FeedRequest
from tfos.feed.sources import source_of
from tfos.feed.watch import FeedWatch
from tfos.monitor.reports import EpochReport
from tfos.phases import ClusterPhase
from tfos.topology import plan

ROWS = 30
REQUEST = FeedRequest(
    data=types.SimpleNamespace(mapPartitionsWithIndex=None), feed="input", feed_timeout_s=5.0
)


def node(name: str) -> NodeId:
    role, index = name.split(":")
    return NodeId(role, int(index), 0)


class Played:
    """A coordinator of three workers and a server; something happens when a wait begins."""

    def __init__(
        self, config: ClusterConfig | None = None, num_workers: int = 3, num_servers: int = 1
    ) -> None:
        self.config = config or ClusterConfig()
        self.state = ClusterState(plan(num_workers + num_servers, num_servers), self.config)
        self.state.move(ClusterPhase.RESERVED)
        for at, name in enumerate(self.state.members):
            self.state.on_register(messages.Register(node(name), "0", "host", 1000 + at), 0.0)
        for name in self.state.members:
            self.state.on_event(node(name), messages.Listening(Endpoint("127.0.0.1", 1)), 0.0)
        self.happens: list[tuple[str, messages.Event]] = []
        self.flushed: list[tuple[str, int]] = []
        """Who was told to end the epoch, after how many rounds of feeding again."""
        self.counts: list[int] = []
        """What the chief was told that each such end counts to."""
        self.warned: list[str] = []
        """Who was told that lost rows are fed again."""
        self.batch_orders: list[Any] = []
        """About micro-batches, and the ends of epochs at the chief."""

    @property
    def phase(self) -> ClusterPhase:
        return self.state.phase

    def now_s(self) -> float:
        return 0.0

    def read(self, question: Callable[[ClusterView], Any]) -> Any:
        return question(self.state)

    def act(self, decide: Callable[[ClusterState], list[Action]]) -> None:
        for action in decide(self.state):
            if isinstance(action, Send) and isinstance(action.order, messages.Flush):
                self.flushed.append((action.node.name, action.order.rounds))
                if action.node.name == "worker:0":
                    self.counts.append(action.order.num_fed)
                    self.batch_orders.append(action.order)
            if isinstance(action, Send) and isinstance(
                action.order, messages.TrainBatch | messages.LeaveBatch | messages.ComeTo
            ):
                self.batch_orders.append(action.order)
            if isinstance(action, Send) and action.order == messages.FeedAgain("input", 0):
                self.warned.append(action.node.name)

    def wait(self, done: Callable[[ClusterView], bool], timeout_s: float) -> bool:
        while self.happens and not done(self.state):
            name, event = self.happens.pop(0)
            self.state.on_event(self.state.members[name].node, event, 0.0)
        return done(self.state)

    def lose(self, name: str) -> None:
        lost = NodeFailure(node(name), "host", 1, signal=9, message="killed")
        self.happens.append((name, messages.Failed(lost)))

    def reach(self, name: str, trained_rows: int) -> None:
        rows = messages.EpochRowCounts(0, trained_rows, trained_rows)
        stats = messages.FeedSnapshot("input", trained_rows=trained_rows, epochs=(rows,))
        self.happens.append((name, messages.FlushReached("input", 0, stats)))


def jobs(played: Any, feed: Callable[[FeedTask], list[FeedReport]]) -> ClusterFeeder:
    console = Console(enabled=False)
    of_all = (played, Credentials.generate(), played.config, console)
    watch = FeedWatch(played, played.config, console)
    epochs = EpochFeeder(None, *of_all, watch)
    epochs._feed = lambda run, task: feed(task)  # type: ignore[method-assign]
    return ClusterFeeder("c", epochs, watch, played, played.config, console)


def fed(task: FeedTask) -> list[FeedReport]:
    """Each worker has accepted a third of the rows, or one of them what is fed again."""
    if task.again is None:
        thirds = {rank: AcceptedRows([(rank * 10, 10, 0)]).pack() for rank in range(3)}
        return [FeedReport(0, rows=ROWS, partition_rows=ROWS, accepted=thirds)]
    assert (task.again, task.round_number) == ({0: ((20, 30),)}, 1)
    first = task.targets[0].worker
    return [
        FeedReport(
            0, rows=10, partition_rows=ROWS, accepted={first: AcceptedRows([(20, 10, 10)]).pack()}
        )
    ]


@pytest.mark.fault("F01")
def test_rows_lost_after_the_order_to_end_the_epoch_are_fed_again_and_the_epoch_ends():
    played = Played()
    played.reach("worker:1", 10)
    played.lose("worker:2")
    played.reach("worker:0", 20)
    (epoch,) = jobs(played, fed).train(REQUEST).epochs
    assert (epoch.fed_rows, epoch.trained_rows, epoch.dropped_rows) == (ROWS, ROWS, 0)
    assert epoch.repeated_rows == 10
    everybody = [("worker:0", 0), ("worker:1", 0), ("worker:2", 0)]
    assert played.flushed == [*everybody, ("worker:0", 1), ("worker:1", 1)]
    assert played.warned == ["worker:0", "worker:1"]


def test_rows_that_went_to_others_when_a_connection_to_a_living_worker_broke_are_told():
    warned: list[str] = []
    resent = (LostWorker(1, "worker:1", "reset", 16), LostWorker(2, "worker:2", "reset", 16))

    def breaks(task: FeedTask) -> list[FeedReport]:
        (report,) = fed(task)
        if task.again:
            return [report]
        return [dataclasses.replace(report, lost=resent), FeedReport(1, lost=resent[:1])]

    played = Played()
    played.reach("worker:1", 10)
    played.lose("worker:2")
    played.reach("worker:0", 20)
    made = jobs(played, breaks)
    made._epochs._console = types.SimpleNamespace(warn=warned.append, line=lambda _: None)  # type: ignore[assignment]
    made.train(REQUEST)
    text = "; ".join(each for each in warned if "connection" in each)
    assert "32 rows were on their way to worker:1 when a feed task lost its connection" in text
    assert "worker:2" not in text, "it was lost, so its rows were fed again"


@pytest.mark.fault("F01")
def test_who_joins_behind_rows_that_were_fed_again_learns_what_validates_their_epoch():
    played = Played()
    played.lose("worker:2")
    for feed in ("input", VALIDATION_FEED):
        stats = messages.FeedSnapshot(feed)
        for name in ("worker:0", "worker:1"):
            played.happens.append((name, messages.FlushReached(feed, 0, stats)))
    request = dataclasses.replace(REQUEST, validation=REQUEST.data)
    no_rows = [FeedReport(0, rows=0)]
    jobs(played, lambda task: fed(task) if task.feed == "input" else no_rows).train(request)
    ends = [each for each in played.batch_orders if isinstance(each, messages.Flush)]
    told = [(each.rounds, each.validation) for each in ends if each.feed == "input"]
    checked_by = (VALIDATION_FEED, 0)
    assert told == [(0, checked_by), (1, checked_by)], "who joins now gets the last one alone"


@pytest.mark.fault("F01")
def test_feeding_again_that_fails_or_is_interrupted_leaves_no_epoch_open():
    def fails(task: FeedTask) -> list[FeedReport]:
        if task.again is not None:
            raise FeedJobError("epoch 0 of 'input' was interrupted")
        return fed(task)

    played = Played()
    played.lose("worker:2")
    with pytest.raises(FeedJobError, match="was interrupted"):
        jobs(played, fails).train(REQUEST)
    everybody = [("worker:0", 0), ("worker:1", 0), ("worker:2", 0)]
    assert played.flushed == [*everybody, ("worker:0", 1), ("worker:1", 1)]
    assert played.counts == [1, 0], "a run that resumes would leave the failed epoch out"


@pytest.mark.fault("F01")
def test_a_micro_batch_whose_lost_rows_cannot_be_fed_again_is_revoked_before_its_epoch_ends():
    def fails(task: FeedTask) -> list[FeedReport]:
        if task.again is not None:
            raise FeedJobError("the source file is gone")
        return fed(task)

    played = Played()
    played.happens.append(("worker:0", messages.BatchReport("input", 1, False, {})))
    played.lose("worker:2")
    batch = MicroBatch(feed="input", query="q", batch_id=7, number=1, holds=True, saves=True)
    with pytest.raises(FeedJobError, match="is gone"):
        jobs(played, fails).train_batch(REQUEST, batch, lambda: False)
    left = messages.LeaveBatch("input", 1, in_part=True)
    ends = [messages.Flush("input", 0, rounds=number) for number in (0, 1)]
    assert played.batch_orders[1:] == [ends[0], left, ends[1]]


@pytest.mark.fault("F01")
def test_the_chief_hears_that_a_batch_is_over_once_its_lost_rows_are_trained():
    played = Played()
    played.happens.append(("worker:0", messages.BatchReport("input", 1, False, {})))
    played.reach("worker:1", 10)
    played.lose("worker:2")
    played.reach("worker:0", 20)
    played.happens.append(("worker:0", messages.BatchReport("input", 1, True, {"q": 7})))
    batch = MicroBatch(feed="input", query="q", batch_id=7, number=1, holds=True, saves=True)
    report = jobs(played, fed).train_batch(REQUEST, batch, lambda: False)
    assert report is not None
    assert (report.trained_rows, report.repeated_rows) == (ROWS, 10)
    ends = [messages.Flush("input", 0, rounds=number) for number in (0, 1)]
    assert played.batch_orders[1:] == [*ends, messages.ComeTo("input", 1)]


def test_a_micro_batch_that_the_chief_knows_as_trained_is_not_fed():
    played = Played()
    played.happens.append(("worker:0", messages.BatchReport("input", 1, False, {"q": 7})))
    batch = MicroBatch(feed="input", query="q", batch_id=7, number=1, holds=True, saves=True)
    tasks: list[FeedTask] = []

    def feed(task: FeedTask) -> list[FeedReport]:
        tasks.append(task)
        raise FeedJobError("it was to be skipped")

    made = jobs(played, feed)
    with contextlib.suppress(BatchKnown, FeedJobError):
        made.train_batch(REQUEST, batch, lambda: False)
    assert tasks == []
    assert played.batch_orders[1:] == [messages.LeaveBatch("input", 1, in_part=False)]
    with made._calls.enter("input", lambda: False, 5.0) as call:
        assert call.epochs.take() == 0, "no rows came and no end, so the epoch is still to be fed"


def test_the_answers_of_the_chief_to_two_orders_do_not_replace_each_other():
    state = Played().state
    for number in (2, 1):
        state.on_event(node("worker:0"), messages.BatchReport("input", number, True, {}), 0.0)
    for number in (1, 2):
        answer = answer_to(state, "input", number)
        assert answer is not None
        assert answer.number == number


def test_epochs_count_to_those_that_train_has_fed_whole():
    """Not a failed one, and none of a stream, though they have numbers of the feed too."""

    class GoesOn(Played):
        def wait(self, done: Callable[[ClusterView], bool], timeout_s: float) -> bool:
            for worker in self.state.workers:
                ended = messages.FlushReached("input", len(self.counts) - 1)
                self.state.on_event(worker.node, ended, 0.0)
            for number in (1, 2):
                answer = messages.BatchReport("input", number, True, {})
                self.state.on_event(node("worker:0"), answer, 0.0)
            return done(self.state)

    def feed(task: FeedTask) -> list[FeedReport]:
        if task.epoch == 2:
            raise FeedJobError("interrupted")
        return ten_each(task)

    played = GoesOn()
    made = jobs(played, feed)
    batch = MicroBatch(feed="input", query="q", batch_id=7, number=1, holds=True, saves=True)
    made.train_batch(REQUEST, batch, lambda: False)
    made.train(REQUEST)
    with pytest.raises(FeedJobError):
        made.train(REQUEST)
    made.train(dataclasses.replace(REQUEST, num_epochs=2))
    made.train_batch(REQUEST, dataclasses.replace(batch, batch_id=8, number=2), lambda: False)
    made.train(REQUEST)
    assert played.counts == [0, 1, 0, 2, 3, 0, 4]


class GoesOn(Played):
    """Workers end each epoch at once of which a task was fed."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[FeedTask] = []

    def wait(self, done: Callable[[ClusterView], bool], timeout_s: float) -> bool:
        for worker in self.state.workers:
            for ended in self.tasks:
                reached = messages.FlushReached(ended.feed, ended.epoch)
                self.state.on_event(worker.node, reached, 0.0)
        return done(self.state)

    def feed(self, task: FeedTask) -> list[FeedReport]:
        self.tasks.append(task)
        return ten_each(task)


@pytest.mark.parametrize("why", ["rows that fail", "an interrupt before validation"])
def test_workers_wait_for_no_validation_that_a_call_has_announced_and_does_not_feed(why):
    """They would read no row of the next call until its end, or until its time is up."""
    played = GoesOn()
    request = dataclasses.replace(REQUEST, validation=REQUEST.data)

    def feed(task: FeedTask) -> list[FeedReport]:
        if why == "rows that fail" and not played.tasks:
            played.tasks.append(task)
            raise FeedJobError("the source file is gone")
        return played.feed(task)

    made = jobs(played, feed)
    with pytest.raises(FeedJobError, match=r"is gone|epoch 1 of 'validation' was interrupted"):
        made.train(request, lambda: messages.ComeTo("input", 1) in played.batch_orders)
    ends = [each for each in played.batch_orders if isinstance(each, messages.Flush)]
    assert [(each.feed, each.epoch) for each in ends] == [("input", 0), (VALIDATION_FEED, 0)]
    made.train(request)
    fed_epochs = [(task.feed, task.epoch) for task in played.tasks[1:]]
    assert fed_epochs == [("input", 1), (VALIDATION_FEED, 1)]


@pytest.mark.parametrize("validation", [None, REQUEST.data], ids=["rows", "validation"])
def test_a_call_that_ends_before_its_first_row_leaves_its_epoch_to_the_next(validation):
    """Its end would never be ordered, and workers read no row of an epoch behind it."""
    played = GoesOn()
    made, tasks = jobs(played, played.feed), played.tasks
    request = dataclasses.replace(REQUEST, validation=validation)
    with pytest.raises(FeedJobError, match="epoch 1 of 'input' was interrupted"):
        made.train(request, lambda: True)
    assert tasks == []
    made.train(request)
    assert [task.epoch for task in tasks if task.feed == "input"] == [0]


@pytest.mark.fault("F01")
def test_rows_lost_while_an_epoch_is_fed_are_fed_again_before_any_worker_ends_it():
    played = Played()

    def loses_one(task: FeedTask) -> list[FeedReport]:
        if task.again is None:
            lost = NodeFailure(node("worker:2"), "host", 1, signal=9, message="killed")
            played.act(lambda state: state.on_event(lost.node, messages.Failed(lost), 0.0))
        return fed(task)

    played.reach("worker:1", 10)
    played.reach("worker:0", 20)
    (epoch,) = jobs(played, loses_one).train(REQUEST).epochs
    assert (epoch.fed_rows, epoch.trained_rows) == (ROWS, ROWS)
    assert played.flushed == [("worker:0", 1), ("worker:1", 1)]


@pytest.mark.fault("F01")
def test_a_worker_that_is_lost_behind_its_last_row_ends_no_epoch_for_the_others():
    played = Played()
    played.reach("worker:2", 10)
    played.lose("worker:2")
    played.reach("worker:0", 10)
    played.reach("worker:1", 10)
    (epoch,) = jobs(played, fed).train(REQUEST).epochs
    assert (epoch.fed_rows, epoch.trained_rows, epoch.repeated_rows) == (ROWS, ROWS, 0)


@pytest.mark.fault("F01")
@pytest.mark.parametrize("is_lost", [True, False])
def test_rows_that_no_worker_took_are_an_error_unless_one_of_the_workers_was_lost(is_lost):
    """They would be fed again and again."""
    played = Played()
    made: Any = jobs(played, fed)
    untaken = FeedReport(0, ROWS, ROWS, no_worker="partition 0 has no worker left to go to")

    def feed(run: EpochFeed, task: FeedTask) -> list[FeedReport]:
        if is_lost:
            played.lose("worker:2")
        made._epochs._check_unsent(run, task, [untaken])
        raise Checked

    made._epochs._feed = feed
    with pytest.raises(Checked if is_lost else FeedJobError, match=r"^$|no worker left to go to"):
        made.train(REQUEST)


class Checked(Exception):
    """The check let the reports pass."""


@pytest.mark.parametrize(
    ("seed", "shuffle_rows", "shuffle"),
    [
        (None, None, None),
        (None, 1, None),
        (5, None, Shuffle(5, 16_384)),
        (5, 1, Shuffle(5, 1)),
        (0, 7, Shuffle(0, 7)),
    ],
)
def test_rows_are_shuffled_as_the_call_asks_for(seed, shuffle_rows, shuffle):
    played = GoesOn()
    request = dataclasses.replace(REQUEST, seed=seed, shuffle_rows=shuffle_rows)
    jobs(played, played.feed).train(request)
    assert played.tasks[0].shuffle == shuffle


@pytest.mark.fault("F01")
def test_rows_lost_when_every_other_main_fun_has_returned_are_dropped():
    def only_once(task: FeedTask) -> list[FeedReport]:
        assert task.again is None
        return fed(task)

    played = Played()
    played.lose("worker:2")
    final = [messages.EpochRowCounts(0, 10, 10)]
    for name in ("worker:0", "worker:1"):
        snapshot = messages.FeedSnapshot("input", trained_rows=10, epochs=tuple(final))
        played.happens.append((name, messages.Done((snapshot,))))
    told: list[str] = []
    made: Any = jobs(played, only_once)
    made._console.warn = told.append

    def at_once(done: Callable[[ClusterView], bool], timeout_s: float) -> bool:
        for name, event in played.happens:
            played.state.on_event(node(name), event, 0.0)
        played.happens.clear()
        return done(played.state)

    played.wait = at_once  # type: ignore[method-assign]
    (epoch,) = made.train(REQUEST).epochs
    assert (epoch.fed_rows, epoch.trained_rows, epoch.dropped_rows) == (ROWS, 20, 10)
    assert "10 of 10 rows that were lost with worker:2 count as dropped" in told[0]


@pytest.mark.fault("F01")
@pytest.mark.parametrize("found", [[], [29], [31]], ids=["gone", "shorter", "longer"])
def test_a_partition_that_is_cut_otherwise_when_fed_again_counts_as_dropped(found):
    """Rows 20 to 29 of it are others than before: they are repeated rows, and those are lost."""

    def changed(task: FeedTask) -> list[FeedReport]:
        if task.again is None:
            return fed(task)
        (report,) = fed(task)
        return [
            FeedReport(0, rows=10, partition_rows=rows, accepted=report.accepted) for rows in found
        ]

    played = Played()
    played.lose("worker:2")
    played.reach("worker:0", 20 if found else 10)
    played.reach("worker:1", 10)
    (epoch,) = jobs(played, changed).train(REQUEST).epochs
    assert (epoch.fed_rows, epoch.trained_rows, epoch.dropped_rows) == (ROWS, 20, 10)
    assert epoch.repeated_rows == (10 if found else 0)


# ---- rows that crash their worker ----


class Crashing(Played):
    """One worker that is started again; each of its attempts crashes before it trains a row."""

    def __init__(self, restarts: int, crashes: int = 99) -> None:
        super().__init__(ClusterConfig(restarts=Restarts(workers=restarts)), num_workers=1)
        self._left = crashes

    def raised_error(self) -> NodeFailedError:
        return NodeFailedError(self.state.fatal)

    def wait(self, done: Callable[[ClusterView], bool], timeout_s: float) -> bool:
        """Crash, and be started again, or train all rows; whichever is next."""
        while not done(self.state) and (self._left or self.happens):
            if not self._left:
                super().wait(done, timeout_s)
            else:
                self.crash()
        return done(self.state)

    def crash(self) -> None:
        self._left -= 1
        old = self.state.members["worker:0"].node
        lost = NodeFailure(old, "host", 1, signal=11, message="worker:0 killed by SIGSEGV")
        self.state.on_event(old, messages.Failed(lost), 0.0)
        new = NodeId("worker", 0, old.attempt + 100)
        self.state.on_register(messages.Register(new, "0", "host", 1 + new.attempt), 0.0)
        self.state.on_event(new, messages.Listening(Endpoint("127.0.0.1", 1)), 0.0)


def accepted_by_all_of(task: FeedTask) -> list[FeedReport]:
    """The first target takes all rows of two partitions that are to be fed."""
    rows = task.again or {0: ((0, 20),), 1: ((0, 10),)}
    totals = {0: 20, 1: 10}
    found = []
    for partition, spans in rows.items():
        entries = AcceptedRows([(low, high - low, low) for low, high in spans])
        packed = {task.targets[0].process: entries.pack()}
        count = entries.num_rows
        found.append(
            FeedReport(partition, rows=count, partition_rows=totals[partition], accepted=packed)
        )
    return found


@pytest.mark.fault("F54")
@pytest.mark.parametrize("restarts", [2, 5], ids=["the last restart", "restarts left"])
def test_rows_at_three_crashes_end_the_feed_with_their_numbers(restarts):
    played = Crashing(restarts)
    with pytest.raises(PoisonRows) as caught:
        jobs(played, accepted_by_all_of).train(REQUEST)
    assert str(caught.value).startswith(
        "epoch 1 of 'input': rows 0 to 19 of partition 0, rows 0 to 9 of partition 1 were at 3 "
        "crashes (worker:0 killed by SIGSEGV; "
    )
    assert caught.value.rows == {0: ((0, 20),), 1: ((0, 10),)}
    assert len(played.state.failures) == 3
    assert (played.state.phase is ClusterPhase.FAILED) == (restarts == 2)


@pytest.mark.fault("F54")
def test_a_crash_that_fails_the_cluster_counts_while_rows_are_fed_again():
    played = Crashing(restarts=2)

    def fed_until_then(task: FeedTask) -> list[FeedReport]:
        if task.round_number == 2:
            played.crash()
            raise played.raised_error()
        return accepted_by_all_of(task)

    with pytest.raises(PoisonRows, match=r"rows 0 to 19 of partition 0.* were at 3 crashes"):
        jobs(played, fed_until_then).train(REQUEST)
    assert played.state.phase is ClusterPhase.FAILED


@pytest.mark.fault("F54")
@pytest.mark.parametrize(("num_fed", "blamed"), [(3, {4: ((0, 5),)}), (2, None)])
def test_rows_of_a_round_that_has_not_ended_are_of_the_crashes_of_its_workers_alone(
    num_fed, blamed
):
    played = Played(ClusterConfig(restarts=Restarts(workers=5)))
    state = played.state
    task = FeedTask(
        targets=targets_of(state)[3 - num_fed :],  # the others have crashed before it began
        credentials=Credentials.generate,
        epoch=0,
        config=FeedConfig(),
        again={4: ((0, 5),)},
    )
    call = FeedCall("input", 0.0, lambda: False, EpochNumbers(), 5.0, 5.0)
    run = EpochFeed(source_of(REQUEST), task, call, TrainingProgress(1), counts=False)
    run.running = task
    for name in ("worker:0", "worker:1", "worker:2"):
        lost = NodeFailure(node(name), "host", 1, signal=11, message=f"{name} killed by SIGSEGV")
        state.on_event(node(name), messages.Failed(lost), 0.0)
    run.take_crashes(state)
    poison = run.poison(state)
    assert (poison and poison.rows) == blamed


@pytest.mark.fault("F54")
def test_rows_at_three_crashes_are_dropped_where_they_are_to_be_skipped():
    """Here all 30 rows are: the crashes tell nothing more, so nothing is left to feed."""
    played = Crashing(restarts=5, crashes=3)
    played.config = ClusterConfig(restarts=Restarts(workers=5, on_poison="skip"))
    played.happens.append(("worker:0", messages.FlushReached("input", 0, trained_by(0))))
    told: list[str] = []
    made: Any = jobs(played, accepted_by_all_of)
    made._console.warn = told.append
    (epoch,) = made.train(REQUEST).epochs
    assert (epoch.fed_rows, epoch.trained_rows, epoch.dropped_rows) == (ROWS, 0, ROWS)
    assert len(told) == 1
    assert f"They are skipped: {ROWS} rows count as dropped" in told[0]
    assert epoch.skipped_rows == ROWS


@pytest.mark.fault("F54")
def test_two_crashes_are_the_restarts_business():
    played = Crashing(restarts=5, crashes=2)
    played.happens.append(("worker:0", messages.FlushReached("input", 0, trained_by(ROWS))))
    (epoch,) = jobs(played, accepted_by_all_of).train(REQUEST).epochs
    assert (epoch.fed_rows, epoch.trained_rows, epoch.dropped_rows) == (ROWS, ROWS, 0)


@pytest.mark.fault("F01")
def test_rows_that_no_worker_was_left_to_take_are_fed_to_the_one_that_is_started_again():
    played = Crashing(restarts=5, crashes=1)
    tasks: list[FeedTask] = []

    def cut_short(task: FeedTask) -> list[FeedReport]:
        tasks.append(task)
        if task.again is not None:
            return accepted_by_all_of(task)
        assert task.keeps_unsent
        taken = {task.targets[0].process: AcceptedRows([(0, 5, 0)]).pack()}
        played.crash()
        return [
            FeedReport(
                *(0, 20, 20),
                dropped_rows=15,
                accepted=taken,
                unsent=((5, 20),),
                no_worker="partition 0 has no worker left to go to",
            ),
            FeedReport(1, 10, 10, dropped_rows=10, unsent=((0, 10),), no_worker="the same"),
        ]

    played.happens.append(("worker:0", messages.FlushReached("input", 0, trained_by(ROWS))))
    (epoch,) = jobs(played, cut_short).train(REQUEST).epochs
    assert [task.again for task in tasks] == [None, {0: ((0, 20),), 1: ((0, 10),)}]
    assert (epoch.fed_rows, epoch.trained_rows, epoch.dropped_rows) == (ROWS, ROWS, 0)


@pytest.mark.fault("F01")
def test_rows_that_come_again_after_the_others_have_ended_wait_for_the_worker_that_is_back():
    """It begins without the order to end the epoch: it would end it before its rows come."""
    config = ClusterConfig(restarts=Restarts(workers=1))
    played = Played(config, num_workers=2)
    told: list[Any] = []
    rounds: list[list[int]] = []

    def accepted_by_one(task: FeedTask) -> list[FeedReport]:
        rounds.append([target.process for target in task.targets])
        if task.again is None:
            packed = AcceptedRows([(0, 20, 0)]).pack()
            return [FeedReport(0, rows=20, partition_rows=20, accepted={1: packed})]
        if task.round_number == 1:  # the chief had read the end, and its report is on its way
            played.reach("worker:0", 0)
            return [FeedReport(0, 20, 20, dropped_rows=20, unsent=((0, 20),), ended=(0,))]
        packed = AcceptedRows([(0, 20, 0)]).pack()
        played.reach("worker:1", 20)
        return [
            FeedReport(0, rows=20, partition_rows=20, accepted={task.targets[0].process: packed})
        ]

    def comes_back() -> None:
        new = NodeId("worker", 1, 100)
        played.state.on_register(messages.Register(new, "0", "host", 7), 0.0)
        told.extend(played.state.on_event(new, messages.Listening(Endpoint("127.0.0.1", 1)), 0.0))

    first_wait = played.wait

    def wait(done: Callable[[ClusterView], bool], timeout_s: float) -> bool:
        if len(rounds) == 2 and not told:
            comes_back()
        return first_wait(done, timeout_s)

    played.wait = wait  # type: ignore[method-assign]
    played.lose("worker:1")
    (epoch,) = jobs(played, accepted_by_one).train(REQUEST).epochs
    second = process_key(1, 100)
    assert rounds == [[0, 1], [0], [second]]
    assert not [each for each in told if isinstance(getattr(each, "order", 0), messages.Flush)]
    assert (epoch.fed_rows, epoch.trained_rows, epoch.dropped_rows) == (20, 20, 0)


@pytest.mark.fault("F01")
def test_a_worker_that_a_task_could_not_reach_takes_the_rows_of_one_lost_in_the_same_round():
    """The other taker of that round has ended the epoch; this one's connection broke."""
    played = Played(ClusterConfig(restarts=Restarts(workers=1)))
    rounds: list[list[int]] = []

    def one_link_breaks(task: FeedTask) -> list[FeedReport]:
        rounds.append([target.process for target in task.targets])
        if task.again is None:
            packed = AcceptedRows([(0, 20, 0)]).pack()
            return [FeedReport(0, rows=20, partition_rows=20, accepted={2: packed})]
        if task.round_number == 1:
            played.reach("worker:0", 0)
            return [FeedReport(0, 20, 20, dropped_rows=20, unsent=((0, 20),), ended=(0,))]
        packed = AcceptedRows([(0, 20, 0)]).pack()
        played.reach("worker:1", 20)
        return [FeedReport(0, rows=20, partition_rows=20, accepted={1: packed})]

    played.lose("worker:2")
    epochs: Sequence[EpochReport] = ()
    with contextlib.suppress(FeedTimeout):
        epochs = jobs(played, one_link_breaks).train(REQUEST).epochs
    assert rounds == [[0, 1, 2], [0, 1], [1]]
    (epoch,) = epochs
    assert (epoch.fed_rows, epoch.trained_rows, epoch.dropped_rows) == (20, 20, 0)


def trained_by(rows: int) -> messages.FeedSnapshot:
    counts = messages.EpochRowCounts(0, rows, rows)
    return messages.FeedSnapshot("input", trained_rows=rows, epochs=(counts,))


@pytest.mark.parametrize(
    ("num_rows", "warning"),
    [
        (0, "epoch 1 of 'input': the data has no rows, so nothing was trained"),
        (
            30,
            "30 of 30 rows were not trained: main_fun had called terminate() or returned on every "
            "worker; to train them, it must read the feed to its end",
        ),
    ],
)
def test_an_epoch_that_trains_nothing_is_a_warning(num_rows, warning):
    played = Played()
    for rank in range(3):
        played.happens.append((f"worker:{rank}", messages.Done(())))
    told: list[str] = []
    made: Any = jobs(played, lambda task: [FeedReport(0, rows=num_rows, dropped_rows=num_rows)])
    made._console.warn = told.append
    made.train(REQUEST)
    (text,) = told
    assert warning in text


def test_rows_after_a_stop_that_was_asked_for_are_no_warning():
    played = Played()
    played.state.stop_training("the operator asked for it")
    for rank in range(3):
        played.happens.append((f"worker:{rank}", messages.Done(())))
    told: list[str] = []
    made: Any = jobs(played, lambda task: [FeedReport(0, rows=30, dropped_rows=30)])
    made._console.warn = made._console.line = told.append
    made.train(dataclasses.replace(REQUEST, num_epochs=3))
    assert told == [
        "epoch 1 of 'input': 30 of 30 rows came after the requested stop",
        "the training was stopped on request after 0 of 3 epochs of 'input': the rest was not fed",
    ]


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("", "batch 7 of 'input': 30 of 30 rows were not trained: main_fun had called terminate()"),
        ("the operator asked", "batch 7 of 'input': 30 of 30 rows came after the requested stop"),
    ],
)
def test_rows_of_a_micro_batch_that_nobody_trained_are_told(stop, said):
    played = Played()
    chief_takes_it = messages.BatchReport("input", 1, False, {})
    played.happens.append(("worker:0", chief_takes_it))
    for rank in range(3):
        played.happens.append((f"worker:{rank}", messages.Done(())))
    if stop:
        played.state.stop_training(stop)
    told: list[str] = []
    made: Any = jobs(played, lambda task: [FeedReport(0, rows=30, dropped_rows=30)])
    made._console.warn = made._console.line = told.append
    batch = MicroBatch(feed="input", query="q", batch_id=7, number=1, holds=False, saves=False)
    made.train_batch(REQUEST, batch, lambda: False)
    (text,) = told
    assert said in text


# ---- fits that end before their epochs do ----

ALL = (0, 1, 2)


def drain(played: Played, rank: int, *, is_terminated: bool = True) -> None:
    """Let a worker tell that its main_fun reads no more rows: it has terminated, or returned."""
    at = played.state.members[f"worker:{rank}"].node
    feeds = (messages.FeedSnapshot("input", is_drained=True, is_terminated=is_terminated),)
    played.state.on_heartbeat(messages.Heartbeat(at, 1, "answers", feeds=feeds), 0.0)


class EndingFit:
    """Feeds a fit that ends within an epoch.

    Args:
        played: the cluster.
        last: the epoch by whose end workers read no more rows.
        ended: their ranks.
        untrained: ranks of those that have trained nothing of it.
        is_terminated: whether main_fun terminates the feed; False: it returns.
    """

    def __init__(
        self,
        played: Played,
        last: int,
        ended: tuple[int, ...] = ALL,
        untrained: tuple[int, ...] = (),
        *,
        is_terminated: bool = True,
    ) -> None:
        self._played, self._last, self._ended, self._untrained = played, last, ended, untrained
        self._is_terminated = is_terminated
        self.validated: list[int] = []
        self.epochs: list[int] = []
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def train(self, num_epochs: int = 5, *, validation: Any = None) -> Any:
        made: Any = jobs(self._played, self._feed)
        made._console.line, made._console.warn = self.lines.append, self.warnings.append
        request = dataclasses.replace(REQUEST, num_epochs=num_epochs, validation=validation)
        return made.train(request)

    def _feed(self, task: FeedTask) -> list[FeedReport]:
        if task.feed == VALIDATION_FEED:
            self.validated.append(task.epoch)
            for rank in ALL:
                reached = messages.FlushReached(task.feed, task.epoch)
                self._played.happens.append((f"worker:{rank}", reached))
            return ten_each(task)
        self.epochs.append(task.epoch)
        is_last = task.epoch == self._last
        for rank in ALL:
            trained = 0 if is_last and rank in self._untrained else 10
            counts = (messages.EpochRowCounts(task.epoch, 10, trained),)
            stats = messages.FeedSnapshot("input", trained_rows=trained, epochs=counts)
            reached = messages.FlushReached("input", task.epoch, stats)
            self._played.happens.append((f"worker:{rank}", reached))
        for rank in self._ended if is_last else ():
            drain(self._played, rank, is_terminated=self._is_terminated)
        return ten_each(task)


@pytest.mark.parametrize("last", [0, 2])
def test_a_fit_that_ends_early_ends_its_feeding(last):
    """As by EarlyStopping in an estimator: its workers wait for who fetches the model."""
    fit = EndingFit(Played(), last)
    assert len(fit.train().epochs) == last + 1
    assert fit.epochs == [*range(last + 1)]
    assert fit.lines == [
        f"feeding ended after epoch {last + 1} of 5: no worker reads further rows of 'input'"
    ]
    assert fit.warnings == []


def test_a_fit_that_ends_with_its_last_epoch_is_nothing_to_tell():
    fit = EndingFit(Played(), last=1)
    fit.train(num_epochs=2)
    assert (fit.epochs, fit.lines) == ([0, 1], [])


@pytest.mark.parametrize("num_epochs", [3, 5])
def test_an_epoch_that_was_fed_before_the_end_of_the_fit_was_known_is_no_warning(num_epochs):
    """What workers tell of an end comes seconds after it."""
    fit = EndingFit(Played(), last=2, untrained=ALL)
    fit.train(num_epochs)
    assert fit.epochs == [0, 1, 2]
    (line,) = fit.lines
    assert line.startswith(f"feeding ended after epoch 2 of {num_epochs}: ")
    assert fit.warnings == []


@pytest.mark.parametrize(("last", "untrained"), [(1, (2,)), (0, ALL)])
def test_rows_that_a_fit_leaves_within_an_epoch_stay_a_warning(last, untrained):
    fit = EndingFit(Played(), last, untrained=untrained)
    fit.train()
    assert fit.epochs == [*range(last + 1)]
    (warning,) = fit.warnings
    count = 10 * len(untrained)
    assert f"epoch {last + 1} of 'input': {count} of 30 rows were not trained" in warning
    if untrained == ALL:
        assert fit.lines == [
            "feeding ended before epoch 1 of 5 had trained a row: no worker reads further rows "
            "of 'input'"
        ]


def test_an_epoch_that_came_after_the_end_of_the_fit_is_not_validated():
    """Nobody would read its rows, so their feeding would never end."""
    played = Played()
    fit = EndingFit(played, last=2, untrained=ALL)
    report = fit.train(validation=REQUEST.data)
    assert (fit.epochs, fit.validated) == ([0, 1, 2], [0, 1])
    assert len(report.validation) == 2
    assert played.counts == [1, 0, 2, 0, 3], "what validates is no epoch that was trained"


def test_a_first_epoch_that_nobody_reads_is_not_validated():
    fit = EndingFit(Played(), last=0, untrained=ALL)
    assert fit.train(validation=REQUEST.data).validation == ()
    assert (fit.epochs, fit.validated) == ([0], [])


@pytest.mark.parametrize("untrained", [(), ALL])
def test_a_main_fun_that_has_returned_is_a_warning_also_while_it_closes(untrained):
    """As of fit(epochs=2) and train(num_epochs=5): its worker runs on for some seconds."""
    fit = EndingFit(Played(), 1 + bool(untrained), untrained=untrained, is_terminated=False)
    fit.train()
    assert fit.epochs == [0, 1, 2][: 2 + bool(untrained)]
    assert fit.lines == []
    *_, warning = fit.warnings
    assert warning.startswith("main_fun has returned on every worker after 2 of 5 epochs of ")
    assert "fit(ctx.dataset(...), epochs=n) does for train(..., num_epochs=n)" in warning
    assert len(fit.warnings) == 1 + bool(untrained)


def test_a_feed_that_was_terminated_is_no_warning_once_main_fun_has_returned():
    """The same end, told in the same way whenever main_fun returns after it."""
    played = Played()
    fit = EndingFit(played, last=2)
    feed = fit._feed

    def feed_or_return(task: FeedTask) -> list[FeedReport]:
        reports = feed(task)
        if task.epoch == 1:
            counts = (messages.EpochRowCounts(1, 10, 10),)
            ended = messages.FeedSnapshot("input", 10, 10, 0, 0, 0.0, 10, counts, True, True)
            played.happens = [(f"worker:{rank}", messages.Done((ended,))) for rank in ALL]
        return reports

    fit._feed = feed_or_return  # type: ignore[method-assign]
    fit.train()
    assert fit.epochs == [0, 1]
    assert fit.warnings == []
    assert fit.lines[0].startswith("feeding ended after epoch 2 of 5: ")


def test_a_feed_that_has_ended_is_not_fed_again():
    fit = EndingFit(Played(), last=1)
    fit.train()
    del fit.lines[:]
    report = fit.train()
    assert (fit.epochs, report.epochs, fit.lines) == ([0, 1], (), [])
    (warning,) = fit.warnings
    assert warning == (
        "nothing of 'input' was fed: main_fun has called terminate() on every worker, so no "
        "worker reads further rows of it"
    )


def test_a_stop_that_was_asked_for_is_why_the_rest_is_not_fed():
    played = Played()
    played.state.stop_training("the operator asked for it")
    fit = EndingFit(played, last=1)
    fit.train()
    assert fit.epochs == [0, 1]
    assert fit.lines == [
        "the training was stopped on request after 2 of 5 epochs of 'input': the rest was not fed"
    ]


def test_feeding_goes_on_while_one_worker_reads():
    fit = EndingFit(Played(), last=0, ended=(0, 2))
    fit.train(num_epochs=3)
    assert fit.epochs == [0, 1, 2]


def test_a_worker_that_is_started_again_reads_whatever_its_last_attempt_did():
    played = Played(ClusterConfig(restarts=Restarts(workers=1)))
    for rank in ALL:
        drain(played, rank)
    assert not played.state.reading("input")
    lost = NodeFailure(node("worker:1"), "host", 1, signal=9, message="killed")
    played.state.on_event(node("worker:1"), messages.Failed(lost), 0.0)
    new = NodeId("worker", 1, 100)
    for happens in (
        lambda: None,
        lambda: played.state.on_register(messages.Register(new, "0", "host", 7), 0.0),
        lambda: played.state.on_event(new, messages.Listening(Endpoint("127.0.0.1", 1)), 0.0),
    ):
        happens()
        assert [each.name for each in played.state.reading("input")] == ["worker:1"]
    drain(played, 1)
    assert not played.state.reading("input")


class Frame:
    """What a user has instead of an RDD."""


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        ("pandas.core.frame", r"spark\.createDataFrame\(data\)"),
        ("builtins", r"sc\.parallelize\(rows\)"),
    ],
)
def test_data_that_spark_does_not_have_yet_is_refused_with_the_call_that_makes_it(
    module, advice, monkeypatch
):
    monkeypatch.setattr(Frame, "__module__", module)
    request = dataclasses.replace(REQUEST, data=Frame())
    with pytest.raises(SettingsError, match=advice):
        source_of(request)
    with pytest.raises(SettingsError, match=rf"got {module}\.Frame"):
        source_of(request)


# ---- metrics of fit ----

READS = ("worker:0", messages.FitReading("input"))
TRAINED = messages.EpochTrained(
    1, 0, {"loss": 0.25, "val_auc": 0.75}, steps=9, rows=30, seconds=1.5, feed="input", fed_epoch=0
)


def ten_each(task: FeedTask) -> list[FeedReport]:
    thirds = {rank: AcceptedRows([(rank * 10, 10, 0)]).pack() for rank in range(3)}
    return [FeedReport(0, rows=ROWS, partition_rows=ROWS, accepted=thirds)]


def read_by_fit() -> Played:
    """All workers have trained the rows of the epoch; its end in `fit` is still to come."""
    played = Played()
    played.happens.append(READS)
    for rank in range(3):
        played.reach(f"worker:{rank}", 10)
    return played


def test_the_report_waits_for_the_metrics_of_the_last_epoch():
    played = read_by_fit()
    earlier = ("worker:0", messages.EpochTrained(1, 7, {"loss": 9.0}, feed="other", fed_epoch=7))
    played.happens += [earlier, ("worker:0", TRAINED)]
    report = jobs(played, ten_each).train(REQUEST)
    assert report.trained_rows == ROWS
    assert dict(report.history) == {
        "loss": [0.25],
        "val_auc": [0.75],
        "seconds": [1.5],
        "steps": [9],
        "rows": [30],
    }
    assert played.happens == []


@pytest.mark.parametrize(
    "event", [messages.FitReading("input", is_over=True), messages.Done()], ids=["fit", "main_fun"]
)
def test_a_fit_that_ends_without_this_epoch_is_not_waited_for(event):
    played = read_by_fit()
    names = ["worker:0"] if isinstance(event, messages.FitReading) else list(played.state.members)
    played.happens += [(name, event) for name in names if name != "ps:0"]
    made, told = jobs(played, ten_each), list[str]()
    made._console.warn = told.append  # type: ignore[method-assign, assignment]
    assert not made.train(REQUEST).history
    assert (played.happens, told) == ([], [])


def test_rows_that_a_loop_of_the_user_reads_have_no_history():
    played = read_by_fit()
    played.happens.remove(READS)
    assert not jobs(played, ten_each).train(REQUEST).history


def test_an_end_of_an_epoch_that_lasts_too_long_leaves_the_metrics_out():
    played: Any = read_by_fit()
    played.now_s = lambda: 0.0
    told: list[str] = []
    made: Any = jobs(played, ten_each)
    made._console.warn = told.append
    report = made.train(dataclasses.replace(REQUEST, feed_timeout_s=0.02))
    assert (report.trained_rows, len(report.history)) == (ROWS, 0)
    assert "the metrics of epoch 1 of 'input' are not in the report" in told[0]


def test_a_failure_at_the_end_of_the_last_epoch_is_raised_by_train():
    played: Any = read_by_fit()
    failed = NodeFailure(node("worker:0"), "host", 1, error_type="ValueError", message="callback")
    played.happens.append(("worker:0", messages.Failed(failed)))
    played.raised_error = lambda: NodeFailedError(played.state.fatal)
    with pytest.raises(NodeFailedError, match="ValueError: callback"):
        jobs(played, ten_each).train(REQUEST)


def resuming(epochs: dict[str, int]) -> tuple[Played, list[FeedTask], Any]:
    """A run that resumes an interrupted one, which had trained so many epochs of feeds."""
    played, tasks = read_by_fit(), []
    begun = messages.BatchReport("", 0, True, {}, epochs=epochs)
    played.happens.insert(0, ("worker:0", begun))
    played.happens.append(("worker:0", TRAINED))

    def fed(task: FeedTask) -> list[FeedReport]:
        tasks.append(task)
        return ten_each(task)

    made: Any = jobs(played, fed)
    plan = Checkpoints(directory="/saves", resume=True)
    made._config = dataclasses.replace(made._config, checkpoints=plan)
    made.told = []
    made._console.line = made.told.append
    return played, tasks, made


def test_epochs_that_an_interrupted_run_had_trained_are_not_fed_again():
    _, tasks, made = resuming({"input": 5})
    assert made.train(dataclasses.replace(REQUEST, num_epochs=3, seed=1)).epochs == ()
    report = made.train(dataclasses.replace(REQUEST, num_epochs=3, seed=1))
    (task,) = tasks
    assert task.shuffle is not None
    assert (task.epoch, task.shuffle.first_epoch) == (0, 5)
    assert report.trained_rows == ROWS
    assert str(report).startswith("epoch 6 of input: ")
    assert made.told == [
        "'input': the run that this one resumes had trained 3 of 3 epochs; they are not fed again "
        "(they are with resume_epochs=False)",
        "'input': the run that this one resumes had trained 2 of 3 epochs; they are not fed again "
        "(they are with resume_epochs=False)",
    ]


def test_a_call_whose_epochs_were_all_trained_before_waits_for_the_end_of_none():
    played, tasks, made = resuming({"input": 1})
    played.happens.insert(0, READS)
    assert made.train(REQUEST).epochs == ()
    assert tasks == []
    assert played.happens[-1] == ("worker:0", TRAINED), "it comes with what is fed next"


def test_a_resumed_run_whose_main_fun_returns_before_it_restores_is_not_waited_for():
    played, tasks, made = resuming({})
    played.happens[:] = [(f"worker:{rank}", messages.Done()) for rank in ALL]
    warned: list[str] = []
    made._console.warn = warned.append
    assert made.train(REQUEST).epochs == ()
    assert tasks == []
    (warning,) = warned
    assert warning.startswith("main_fun has returned on every worker after 0 of 1 epochs of ")


def test_the_validation_of_a_resumed_run_is_that_of_its_epoch():
    played, tasks, made = resuming({"input": 2})
    request = dataclasses.replace(REQUEST, validation=REQUEST.data, num_epochs=3)
    with pytest.raises(FeedJobError, match="epoch 3 of 'validation' was interrupted"):
        made.train(request, lambda: messages.ComeTo("input", 1) in played.batch_orders)
    with pytest.raises(FeedJobError, match="epoch 2 of 'validation' was interrupted"):
        made.train(dataclasses.replace(REQUEST, feed="validation"), lambda: len(tasks) > 1)
    others = [line for line in made.told if not line.startswith("'input': ")]
    assert others == [], "the interrupted run had trained no other feed"


@pytest.mark.parametrize("why", ["epochs", "stream", "resume_epochs"])
def test_no_row_is_fed_before_the_chief_has_restored(why):
    played, _, made = resuming({"input": 1})
    if why == "resume_epochs":
        plan = dataclasses.replace(made._config.checkpoints, resume_epochs=False)
        made._config = dataclasses.replace(made._config, checkpoints=plan)
    has_begun: list[bool] = []

    def fed(task: FeedTask) -> list[FeedReport]:
        has_begun.append(answer_to(played.state, "", 0) is not None)
        return ten_each(task)

    made._epochs._feed = lambda run, task: fed(task)
    num_epochs = 2 if why == "epochs" else 1
    made.train(dataclasses.replace(REQUEST, num_epochs=num_epochs, is_interval=why == "stream"))
    assert has_begun == [True]


class StandingStill(Played):
    """What happens comes after 100 waits of a second each."""

    def __init__(
        self, config: ClusterConfig, monkeypatch: pytest.MonkeyPatch, num_servers: int
    ) -> None:
        super().__init__(config, num_servers=num_servers)
        self.clock_s = 0.0
        self.still_s = 0
        monkeypatch.setattr("tfos.feed.watch.time.monotonic", lambda: self.clock_s)

    def wait(self, done: Callable[[ClusterView], bool], timeout_s: float) -> bool:
        if self.still_s:
            self.still_s -= 1
            self.clock_s += 1.0
            return done(self.state)
        return super().wait(done, timeout_s)


def standing_still(
    monkeypatch: Any,
    late: str,
    num_servers: int = 1,
    restarts: Restarts = Restarts(),  # noqa: B008 - it does not change
    **plan: Any,
) -> tuple[Any, list[float]]:
    """A cluster whose chief saves or restores before this."""
    config = ClusterConfig(checkpoints=Checkpoints(directory="/saves", **plan), restarts=restarts)
    played = StandingStill(config, monkeypatch, num_servers)
    played.happens.append(READS)
    limits: list[float] = []

    def fed(task: FeedTask) -> list[FeedReport]:
        played.wait(lambda state: not played.happens, 1.0)
        limits.append(task.config.feed_timeout_s)
        for rank in range(3):
            played.reach(f"worker:{rank}", 10)
        played.happens.append(("worker:0", TRAINED))
        if late == "rows":
            played.still_s = 100
        return ten_each(task)

    made: Any = jobs(played, fed)
    if late == "metrics":
        made._warn_untrained = lambda *_: setattr(played, "still_s", 100)
    return made, limits


@pytest.mark.parametrize("late", ["metrics", "rows"])
def test_a_chief_that_saves_the_best_checkpoint_may_take_its_time(late, monkeypatch):
    made, limits = standing_still(monkeypatch, late, keep_best="val_loss")
    report = made.train(REQUEST)
    assert (report.trained_rows, dict(report.history).get("loss")) == (ROWS, [0.25])
    assert limits == [made._config.checkpoints.limit_s], "the tasks that feed wait as long"


def test_workers_that_serve_their_own_shards_may_restore_while_they_are_fed(monkeypatch):
    made, limits = standing_still(monkeypatch, "rows", num_servers=0, resume=True)
    begun = messages.BatchReport("", 0, True, {}, epochs={})  # before main_fun, that restores
    made._watch._coordinator.happens.insert(0, ("worker:0", begun))
    assert made.train(REQUEST).trained_rows == ROWS
    assert limits == [made._config.checkpoints.limit_s]


@pytest.mark.parametrize("steps", [0.0, 1.0])
def test_workers_that_have_restored_their_shards_keep_to_feed_timeout(steps, monkeypatch):
    made, limits = standing_still(monkeypatch, "", num_servers=0, resume=True)
    played = made._watch._coordinator
    begun = messages.BatchReport("", 0, True, {}, epochs={})
    played.happens.insert(0, ("worker:0", begun))

    def fed(task: FeedTask) -> list[FeedReport]:
        limits.append(task.config.feed_timeout_s)
        stats = messages.FeedSnapshot("input")
        reached = messages.FlushReached("input", task.epoch, stats, {"steps": steps})
        played.happens += [(f"worker:{rank}", reached) for rank in range(3)]
        return ten_each(task)

    made._epochs._feed = lambda run, task: fed(task)
    made._await_metrics = lambda *_: None
    made.train(dataclasses.replace(REQUEST, num_epochs=2))
    restoring_s = made._config.checkpoints.limit_s
    assert limits == [restoring_s, REQUEST.feed_timeout_s if steps else restoring_s]


@pytest.mark.parametrize("resume", [False, True])
def test_a_fed_worker_waits_for_no_other_save_or_restore(resume, monkeypatch):
    made, limits = standing_still(monkeypatch, "rows", resume=resume)
    begun = messages.BatchReport("", 0, True, {}, epochs={})
    made._watch._coordinator.happens.insert(0, ("worker:0", begun))
    with pytest.raises(FeedTimeout, match="no worker took a row or made a step for 5 s"):
        made.train(REQUEST)
    assert limits == [REQUEST.feed_timeout_s]


def test_a_server_that_is_started_again_may_restore_while_workers_are_fed(monkeypatch):
    made, limits = standing_still(monkeypatch, "rows", timeout_s=1200.0)
    monkeypatch.setattr(ClusterView, "has_stepped", True)
    with contextlib.suppress(FeedTimeout):
        made.train(REQUEST)
    assert limits == [1500.0]


def test_the_chief_may_save_rows_that_it_has_loaded_while_workers_are_fed(monkeypatch):
    restarts = Restarts(ps=0)
    made, limits = standing_still(monkeypatch, "rows", restarts=restarts, timeout_s=1200.0)
    assert made.train(REQUEST).trained_rows == ROWS
    assert limits == [made._config.checkpoints.limit_s]


@pytest.mark.parametrize("why", ["other feed", "stream", "resume", "resume_epochs"])
def test_without_a_record_every_epoch_is_fed(why):
    _, tasks, made = resuming({"other" if why == "other feed" else "input": 1})
    if why.startswith("resume"):
        plan = dataclasses.replace(made._config.checkpoints, **{why: False})
        made._config = dataclasses.replace(made._config, checkpoints=plan)
    made.train(dataclasses.replace(REQUEST, is_interval=why == "stream"))
    assert len(tasks) == 1
    assert made.told == []
