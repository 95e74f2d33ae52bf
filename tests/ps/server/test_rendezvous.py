"""Who is waited for, what is answered on retry, and that memory is bounded."""

from __future__ import annotations

import pytest

from ps.errors import PSSettingsError, ServerPhaseError
from ps.manifest.manifest import WorkerRank
from ps.server import rendezvous as module
from ps.server.rendezvous import MAX_CLOSED_KEYS, MAX_OPEN_KEYS, MAX_VALUE_BYTES, Rendezvous

W0, W1, W2 = WorkerRank(0), WorkerRank(1), WorkerRank(2)


def test_all_values_meet_when_the_last_one_comes():
    meetings = Rendezvous(2)
    assert not meetings.arrive("epoch-0", W1, b"b")
    assert meetings.result("epoch-0") is None
    assert meetings.missing("epoch-0") == (W0,)
    assert meetings.arrive("epoch-0", W0, b"a")
    assert meetings.result("epoch-0") == {W0: b"a", W1: b"b"}


def test_values_are_in_rank_order():
    meetings = Rendezvous(3)
    for worker in (W2, W0, W1):
        meetings.arrive("k", worker, b"")
    assert list(meetings.result("k") or ()) == [W0, W1, W2]


def test_a_retry_gets_the_same_answer():
    meetings = Rendezvous(2)
    meetings.arrive("k", W0, b"a")
    meetings.arrive("k", W0, b"a")
    meetings.arrive("k", W1, b"b")
    assert meetings.arrive("k", W0, b"changed")
    assert meetings.result("k") == {W0: b"a", W1: b"b"}


def test_a_finished_worker_is_not_waited_for_and_may_not_come():
    meetings = Rendezvous(2)
    meetings.arrive("k", W0, b"a")
    assert meetings.finish(W1) == ("k",)
    assert meetings.result("k") == {W0: b"a"}
    with pytest.raises(ServerPhaseError, match="finish"):
        meetings.arrive("k2", W1, b"")


def test_a_lost_worker_is_not_waited_for_and_its_value_is_gone():
    meetings = Rendezvous(3)
    meetings.arrive("k", W0, b"a")
    meetings.arrive("k", W1, b"b")
    assert meetings.lose(W1) == ()
    assert meetings.arrive("k", W2, b"c")
    assert meetings.result("k") == {W0: b"a", W2: b"c"}


def test_a_lost_worker_that_comes_back_is_waited_for_again():
    meetings = Rendezvous(2)
    meetings.lose(W1)
    meetings.arrive("k", W1, b"b")
    assert meetings.missing("next") == (W0, W1)


def test_several_meetings_may_be_open():
    meetings = Rendezvous(2)
    meetings.arrive("a", W0, b"")
    assert not meetings.arrive("b", W1, b"")
    assert meetings.arrive("b", W0, b"")
    assert meetings.arrive("a", W1, b"")


def test_old_answers_are_forgotten():
    meetings = Rendezvous(1)
    for number in range(MAX_CLOSED_KEYS + 1):
        meetings.arrive(f"k{number}", W0, b"x")
    assert meetings.result("k0") is None
    assert meetings.result(f"k{MAX_CLOSED_KEYS}") == {W0: b"x"}


def test_large_answers_are_forgotten_sooner(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_CLOSED_BYTES", 100)
    meetings = Rendezvous(1)
    meetings.arrive("a", W0, bytes(80))
    meetings.arrive("b", W0, bytes(80))
    assert meetings.result("a") is None
    assert meetings.result("b") is not None


@pytest.mark.attack("A10")
def test_too_many_open_meetings_are_refused_with_both_keys():
    meetings = Rendezvous(2)
    for number in range(MAX_OPEN_KEYS):
        meetings.arrive(f"k{number}", W0, b"")
    with pytest.raises(PSSettingsError, match=r"'k0'.*'one more'"):
        meetings.arrive("one more", W0, b"")


@pytest.mark.attack("A10")
@pytest.mark.parametrize(
    ("key", "value", "text"),
    [("", b"", "1..256"), ("k" * 257, b"", "got 257"), ("k", bytes(MAX_VALUE_BYTES + 1), "bytes")],
)
def test_keys_and_values_are_limited(key: str, value: bytes, text: str):
    with pytest.raises(PSSettingsError, match=text):
        Rendezvous(1).arrive(key, W0, value)


@pytest.mark.attack("A10")
def test_all_open_values_together_are_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_OPEN_BYTES", 100)
    meetings = Rendezvous(3)
    meetings.arrive("k", W0, bytes(60))
    with pytest.raises(PSSettingsError, match="120 bytes"):
        meetings.arrive("k", W1, bytes(60))
