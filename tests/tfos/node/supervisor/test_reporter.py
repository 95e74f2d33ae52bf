"""A supervisor's reporter opens the control plane beside the start of the node's child."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from rpc.endpoint import Endpoint
from tests.support.waiting import WAIT_S, wait_until
from tests.support.watched_job import WatchedJob
from tfos.control import messages
from tfos.control.restarts.node_end import is_from_outside
from tfos.errors import ControlFailed, ControlUnavailable
from tfos.failure import NodeId, is_symptom
from tfos.node.supervisor.reporter import HeartbeatState, Registered, Reporter, Unwanted


def reporter(connect, notices):
    register = messages.Register(node=NodeId("worker", 0, 0), executor_id="0", host="h", pid=1)
    return Reporter(connect, register, vitals=HeartbeatState, post=notices.put)


def test_the_control_plane_is_opened_on_another_thread():
    threads: queue.SimpleQueue[int] = queue.SimpleQueue()

    def connect():
        threads.put(threading.get_ident())
        raise OSError("no descriptors")

    each = reporter(connect, queue.SimpleQueue())
    assert threads.empty()
    each.start()
    assert threads.get(timeout=WAIT_S) != threading.get_ident()
    each.finish(WAIT_S)


def test_a_control_plane_that_cannot_be_opened_ends_the_node_with_the_reason():
    notices: queue.SimpleQueue[Unwanted] = queue.SimpleQueue()

    def connect():
        raise ImportError("no gRPC here")

    each = reporter(connect, notices)
    each.start()
    text = "cannot open the control plane: ImportError: no gRPC here"
    assert notices.get(timeout=WAIT_S) == Unwanted(text)
    each.finish(WAIT_S)


def test_a_reporter_that_was_not_started_can_be_finished():
    def connect():
        raise AssertionError("nothing is to be sent")

    reporter(connect, queue.SimpleQueue()).finish(WAIT_S)


class CutOff:
    """The client of a driver that no packet reaches."""

    def __init__(self) -> None:
        self.waited_s: list[float] = []

    def register(self, _register: messages.Register, *, timeout_s: float) -> None:
        self.waited_s.append(timeout_s)
        threading.Event().wait(timeout_s)
        raise ControlUnavailable("Register of worker:0 to the driver at driver-host:7077: timeout")

    def close(self) -> None:
        pass


@pytest.mark.fault("F14")
def test_a_driver_out_of_reach_ends_the_node_in_time_with_its_address_and_what_to_set(monkeypatch):
    monkeypatch.setattr("tfos.node.supervisor.reporter.REGISTER_WINDOW_S", 0.2)
    notices: queue.SimpleQueue[Unwanted] = queue.SimpleQueue()
    client = CutOff()
    each = reporter(lambda: client, notices)
    each.start()
    notice = notices.get(timeout=WAIT_S)
    assert notice.is_cut_off
    assert notice.reason.startswith("h did not reach the driver in 0.2 s: Register of worker:0")
    assert "driver-host:7077" in notice.reason
    assert "TFOS_SERVER_HOST" in notice.reason
    assert "spark.driver.bindAddress" in notice.reason
    assert max(client.waited_s) <= 0.2
    each.finish(WAIT_S)


class Refusing(CutOff):
    """The client of a port at which no driver answers; its first call has the reason."""

    def register(self, _register: messages.Register, *, timeout_s: float) -> None:
        self.waited_s.append(timeout_s)
        raise ControlUnavailable("the handshake failed" if len(self.waited_s) == 1 else "timeout")


@pytest.mark.fault("F14")
def test_a_driver_that_fails_every_call_at_once_is_asked_in_turns_and_the_first_reason_stays(
    monkeypatch,
):
    monkeypatch.setattr("tfos.node.supervisor.reporter.REGISTER_WINDOW_S", 1.0)
    monkeypatch.setattr("tfos.node.supervisor.reporter._RETRY_S", 0.4)
    notices: queue.SimpleQueue[Unwanted] = queue.SimpleQueue()
    client = Refusing()
    each = reporter(lambda: client, notices)
    each.start()
    assert "in 1 s: the handshake failed; " in notices.get(timeout=WAIT_S).reason
    assert 1 < len(client.waited_s) <= 4
    each.finish(WAIT_S)


@dataclass
class PlayedDriver:
    """The client of a driver that wants some of the output."""

    output: messages.Output
    beats: int = 0
    lines: list[str] = field(default_factory=list)
    dropped: int = 0

    def register(self, _register: messages.Register, **_: Any) -> messages.RegisterReply:
        return messages.RegisterReply(accepted=True, heartbeat_s=0.01)

    def heartbeat(self, _beat: messages.Heartbeat) -> messages.HeartbeatReply:
        self.beats += 1
        return messages.HeartbeatReply(output=self.output)

    def log(self, batch: messages.LogBatch, **_: Any) -> None:
        self.lines += batch.lines
        self.dropped += batch.dropped

    def orders(self, *_: Any) -> None:
        """There are none."""

    def close(self) -> None:
        """Nothing is open."""

    def wait_beats(self) -> None:
        """Wait until what was logged before has been thought about."""
        before = self.beats
        wait_until(lambda: self.beats > before + 2, "heartbeats", WAIT_S)


@contextmanager
def reports_to(driver: PlayedDriver) -> Iterator[Reporter]:
    each = reporter(lambda: driver, queue.SimpleQueue())
    each.start()
    try:
        yield each
    finally:
        each.finish(WAIT_S)


def test_output_that_nobody_reads_stays_until_somebody_does_or_the_node_ends():
    driver = PlayedDriver("none")
    with reports_to(driver) as each:
        each.log(tuple(map(str, range(300))), 0)
        driver.wait_beats()
        assert driver.lines == []
        driver.output = "piece"
        wait_until(lambda: bool(driver.lines), "the newest lines", WAIT_S)
        assert driver.lines == [str(number) for number in range(200, 300)]
        driver.output = "none"
        driver.wait_beats()
        each.log(("the last",), 0)
        driver.wait_beats()
        assert driver.lines[-1] == "299"
    assert driver.lines[-1] == "the last"


def test_a_driver_that_shows_all_output_gets_all_of_it():
    driver = PlayedDriver("all")
    with reports_to(driver) as each:
        driver.wait_beats()
        each.log(tuple(map(str, range(300))), 7)
    assert driver.lines == list(map(str, range(300)))
    assert driver.dropped == 7


class DriverWhoseAcksAreLost(PlayedDriver):
    """Each event arrives, and the ack of its first try does not."""

    def __init__(self) -> None:
        super().__init__("none")
        self.reports: list[tuple[int, messages.Event]] = []

    def report(self, event: messages.Event, seq: int, **_: Any) -> None:
        is_first = (seq, event) not in self.reports
        self.reports.append((seq, event))
        if is_first:
            raise ControlUnavailable("Report: DEADLINE_EXCEEDED")


@pytest.mark.fault("F26")
def test_an_event_whose_ack_is_lost_comes_again_under_its_number(monkeypatch):
    monkeypatch.setattr("tfos.node.supervisor.reporter._RETRY_S", 0.01)
    driver = DriverWhoseAcksAreLost()
    epoch, done = messages.EpochTrained(1, 0, {}), messages.Done()
    with reports_to(driver) as each:
        for event in (epoch, epoch, done):
            each.report(event)
    numbered = [(1, epoch), (2, epoch), (3, done)]
    assert driver.reports == [report for report in numbered for _ in range(2)]


class DriverThatIsAway(PlayedDriver):
    """Each report fails at once, until it is back."""

    def __init__(self) -> None:
        super().__init__("none")
        self.is_back = threading.Event()
        self.tries: list[float] = []
        self.reports: list[messages.Event] = []

    def report(self, event: messages.Event, seq: int, **_: Any) -> None:
        self.tries.append(time.monotonic())
        if not self.is_back.is_set():
            raise ControlUnavailable("Report: UNAVAILABLE")
        self.reports.append(event)


@pytest.mark.fault("F03")
def test_the_last_event_is_offered_in_turns_until_the_driver_is_back(monkeypatch):
    monkeypatch.setattr("tfos.node.supervisor.reporter._RETRY_S", 0.05)
    driver = DriverThatIsAway()
    each = reporter(lambda: driver, queue.SimpleQueue())
    each.start()
    driver.wait_beats()
    each.report(messages.Done())
    ending = threading.Thread(target=each.finish, args=(WAIT_S,), daemon=True)
    ending.start()
    wait_until(lambda: len(driver.tries) >= 8, "tries", WAIT_S)
    assert driver.tries[7] - driver.tries[2] > 3 * 0.05, "each try is followed by a pause"
    driver.is_back.set()
    ending.join(WAIT_S)
    assert driver.reports == [messages.Done()]


class DriverThatCannotHandleEpochs(PlayedDriver):
    """A defect of its handler: each report of an epoch raises there."""

    def __init__(self) -> None:
        super().__init__("none")
        self.job = WatchedJob()
        self.num_tries = 0

    def report(self, event: messages.Event, seq: int, **_: Any) -> None:
        if isinstance(event, messages.EpochTrained):
            self.num_tries += 1
            raise ControlFailed("Report: UNKNOWN: Exception calling application: no such feed")
        self.job.coordinator.on_report(messages.EventReport(NodeId("worker", 0), seq, event))


@pytest.mark.fault("F26")
def test_an_event_that_the_driver_cannot_handle_ends_the_node_with_the_drivers_text(monkeypatch):
    """The driver would wait for ever for the end of main_fun, whose report stands behind it."""
    monkeypatch.setattr("tfos.node.supervisor.reporter._RETRY_S", 0.01)
    monkeypatch.setattr("tfos.node.supervisor.reporter._MOST_FAILURES_S", 1.0)
    driver = DriverThatCannotHandleEpochs()
    notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
    each = reporter(lambda: driver, notices)
    each.start()
    each.report(messages.PhaseChanged("main_fun"))
    each.report(messages.EpochTrained(1, 0, {}))
    each.report(messages.Done())
    try:
        wanted = [notices.get(timeout=WAIT_S) for _ in range(2)]
        assert isinstance(wanted[1], Unwanted)
        assert "could not handle EpochTrained for 1 s" in wanted[1].reason
        assert "no such feed" in wanted[1].reason
        assert driver.num_tries > 3
        error = driver.job.coordinator.error()
        assert error is not None
        assert error.failures[0].message == wanted[1].reason
        assert not is_symptom(error.failures[0])
        assert not is_from_outside(error.failures[0]), "else it is started again, and repeats it"
    finally:
        each.finish(0.1)


class DriverThatFailsForAMoment(DriverThatCannotHandleEpochs):
    """It has no memory left, and a moment later it has."""

    def report(self, event: messages.Event, seq: int, **_: Any) -> None:
        self.num_tries += 1
        if self.num_tries <= 5:
            raise ControlFailed("Report: UNKNOWN: Exception calling application: MemoryError")


@pytest.mark.fault("F26")
def test_a_driver_that_cannot_handle_an_event_for_a_moment_ends_no_node(monkeypatch):
    monkeypatch.setattr("tfos.node.supervisor.reporter._RETRY_S", 0.01)
    driver = DriverThatFailsForAMoment()
    with reports_to(driver) as each:
        each.report(messages.EpochTrained(1, 0, {}))
        wait_until(lambda: driver.num_tries == 6, "the event is taken", WAIT_S)


class DriverThatCannotRegister(CutOff):
    """It answers, so it is reached."""

    def register(self, _register: messages.Register, *, timeout_s: float) -> None:
        del timeout_s
        raise ControlFailed("Register: UNKNOWN: Exception calling application: KeyError")


def test_a_driver_that_cannot_handle_a_registration_is_not_told_as_one_out_of_reach(monkeypatch):
    monkeypatch.setattr("tfos.node.supervisor.reporter.REGISTER_WINDOW_S", 0.2)
    monkeypatch.setattr("tfos.node.supervisor.reporter._RETRY_S", 0.01)
    notices: queue.SimpleQueue[Unwanted] = queue.SimpleQueue()
    each = reporter(DriverThatCannotRegister, notices)
    each.start()
    notice = notices.get(timeout=WAIT_S)
    assert not notice.is_cut_off
    assert "could not handle the registration: Register: UNKNOWN" in notice.reason
    assert "TFOS_SERVER_HOST" not in notice.reason
    each.finish(WAIT_S)


class DriverThatIsNotLeft(PlayedDriver):
    """Where gRPC's pool can start no thread, the channel is never closed."""

    def __init__(self) -> None:
        super().__init__("all")
        self.asked_to_close, self.may_close = threading.Event(), threading.Event()

    def close(self) -> None:
        self.asked_to_close.set()
        self.may_close.wait(WAIT_S)


def test_a_connection_that_does_not_close_keeps_no_node(monkeypatch):
    monkeypatch.setattr("tfos.node.supervisor.reporter._CLOSE_S", 0.1)
    driver = DriverThatIsNotLeft()
    each = reporter(lambda: driver, queue.SimpleQueue())
    each.start()
    ending = threading.Thread(target=each.finish, args=(WAIT_S,))
    ending.start()
    assert driver.asked_to_close.wait(WAIT_S)
    ending.join(WAIT_S / 4)
    has_ended = not ending.is_alive()
    driver.may_close.set()
    assert has_ended


class DriverThatTakesNoLines(PlayedDriver):
    """Its standard error is full: a call with lines is never answered."""

    def __init__(self) -> None:
        super().__init__("all")
        self.asked = threading.Event()
        self.answers = threading.Event()

    def log(self, batch: messages.LogBatch, **_: Any) -> None:
        self.asked.set()
        self.answers.wait(WAIT_S)
        if self.dropped == 0 and not self.lines:
            self.dropped -= len(batch.lines)
            raise ControlUnavailable("Log: DEADLINE_EXCEEDED")
        super().log(batch)


def test_lines_that_the_driver_does_not_take_delay_no_heartbeat():
    driver = DriverThatTakesNoLines()
    with reports_to(driver) as each:
        driver.wait_beats()
        each.log(("one", "two"), 0)
        assert driver.asked.wait(WAIT_S)
        driver.wait_beats()
        driver.answers.set()
        each.log(("three",), 0)
    assert driver.lines == ["three"]
    assert driver.dropped == 0  # told: the two that were lost


class DriverThatTakesNoEvents(PlayedDriver):
    """It answers heartbeats only."""

    def report(self, event: messages.Event, seq: int, **_: Any) -> None:
        del event, seq
        raise ControlUnavailable("Report: DEADLINE_EXCEEDED")


def test_an_event_that_the_driver_does_not_take_stops_no_heartbeat():
    driver = DriverThatTakesNoEvents("none")
    each = reporter(lambda: driver, queue.SimpleQueue())
    each.start()
    each.report(messages.Listening(Endpoint("h", 1)))
    driver.wait_beats()
    each.finish(0.1)


class DriverOfRareBeats(PlayedDriver):
    """It hears of a node once, and then when something happens there."""

    def __init__(self) -> None:
        super().__init__("all")
        self.reports: list[messages.Event] = []

    def register(self, _register: messages.Register, **_: Any) -> messages.RegisterReply:
        return messages.RegisterReply(accepted=True, heartbeat_s=10 * WAIT_S)

    def report(self, event: messages.Event, seq: int, **_: Any) -> None:
        del seq
        self.reports.append(event)


def test_events_and_lines_wait_for_no_heartbeat():
    driver = DriverOfRareBeats()
    with reports_to(driver) as each:
        waiting: Any = each._changed
        wait_until(lambda: len(waiting._waiters) == 2, "both threads at rest", WAIT_S)
        each.report(messages.Done())
        wait_until(lambda: driver.reports == [messages.Done()], "the event", WAIT_S)
        wait_until(lambda: len(waiting._waiters) == 2, "both threads at rest", WAIT_S)
        each.log(("one",), 0)
        wait_until(lambda: driver.lines == ["one"], "the line", WAIT_S)
    assert driver.beats == 1


class DriverThatRefuses(PlayedDriver):
    """It has this attempt already, or no such node."""

    def register(self, _register: messages.Register, **_: Any) -> messages.RegisterReply:
        return messages.RegisterReply(accepted=False, reason="a newer attempt runs")


def test_a_node_that_the_driver_refuses_ends_with_its_words_and_sends_no_heartbeat():
    notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
    driver = DriverThatRefuses("all")
    each = reporter(lambda: driver, notices)
    each.start()
    assert notices.get(timeout=WAIT_S) == Unwanted("a newer attempt runs")
    each.finish(WAIT_S)
    assert (driver.beats, notices.empty()) == (0, True)


class DriverThatReplaces(PlayedDriver):
    """It gives orders, and then the attempt up."""

    def orders(self, post: Any, lost: Any) -> None:
        post("an order")
        lost("the stream of orders broke")

    def heartbeat(self, _beat: messages.Heartbeat) -> messages.HeartbeatReply:
        return messages.HeartbeatReply(fenced=True)


def test_the_node_hears_of_its_registration_of_orders_and_of_its_replacement():
    notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
    each = reporter(lambda: DriverThatReplaces("none"), notices)
    each.start()
    first, order, lost, replaced = (notices.get(timeout=WAIT_S) for _ in range(4))
    assert isinstance(first, Registered)
    assert first.reply.accepted
    assert (order, lost) == ("an order", Unwanted("the stream of orders broke"))
    assert "a newer one replaced it" in replaced.reason
    each.finish(WAIT_S)
