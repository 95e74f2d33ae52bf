"""Pushes beside the next steps: in order, each error told, no thread left."""

import threading

import pytest

from ps.errors import RequestTimeout
from tfos.keras.step.exchange import pipeline
from tfos.keras.step.exchange.pipeline import InFlight


@pytest.fixture
def pushes():
    line: InFlight[object] = InFlight(lambda: 20.0)
    yield line
    line.close()
    for thread in push_threads():
        thread.join(20)
    assert not push_threads()


def push_threads():
    return [thread for thread in threading.enumerate() if thread.name == "tfos-push"]


def raising(error):
    def send():
        raise error

    return send


def test_results_come_in_order_and_from_one_thread(pushes):
    for number in range(5):
        pushes.submit(lambda number=number: (number, threading.current_thread().name))
    assert len(pushes) == 5
    assert len(push_threads()) == 1
    assert [pushes.oldest() for _ in range(5)] == [(n, "tfos-push") for n in range(5)]
    assert not pushes
    pushes.raise_failed()


def test_nothing_is_sent_behind_an_error_and_then_it_begins_anew(pushes):
    sent = []
    pushes.submit(lambda: sent.append(0))
    pushes.submit(raising(OSError("cut")))
    pushes.submit(lambda: sent.append(2))
    pushes.oldest()
    with pytest.raises(OSError, match="cut"):
        pushes.oldest()
    assert (sent, len(pushes)) == ([0], 0)
    pushes.submit(lambda: "again")
    assert pushes.oldest() == "again"


def test_a_failure_is_told_without_waiting_for_anything(pushes):
    gate = threading.Event()
    pushes.submit(gate.wait)
    pushes.raise_failed()
    pushes.submit(raising(ValueError("late")))
    behind = pushes._pushes[1]
    gate.set()
    assert behind._done.wait(20)
    with pytest.raises(ValueError, match="late"):
        pushes.raise_failed()


def test_an_interrupted_wait_forgets_no_push():
    waits = iter([KeyboardInterrupt(), 20.0, 20.0])

    def timeout_s():
        if isinstance(wait := next(waits), BaseException):
            raise wait
        return wait

    line: InFlight[str] = InFlight(timeout_s)
    line.submit(lambda: "first")
    line.submit(lambda: "second")
    with pytest.raises(KeyboardInterrupt):
        line.oldest()
    assert [line.oldest(), line.oldest()] == ["first", "second"]
    (thread,) = push_threads()
    line.close()
    thread.join(20)
    assert not thread.is_alive()


def test_a_push_beyond_its_own_deadline_is_an_error(monkeypatch):
    monkeypatch.setattr(pipeline, "GRACE_S", 0.0)
    gate = threading.Event()
    line: InFlight[bool] = InFlight(lambda: 0.01)
    line.submit(gate.wait)
    (thread,) = push_threads()
    with pytest.raises(RequestTimeout, match="no answer after"):
        line.oldest()
    gate.set()
    thread.join(20)
    assert not thread.is_alive()
