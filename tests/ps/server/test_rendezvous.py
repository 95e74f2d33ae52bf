"""Who is waited for, what is answered on retry, and that memory is bounded."""

from __future__ import annotations

import pytest

from ps.errors import PSSettingsError, ServerPhaseError
from ps.manifest.manifest import WorkerRank
from ps.server import rendezvous as module
from ps.server.rendezvous import MAX_CLOSED_KEYS, MAX_OPEN_KEYS, Rendezvous

W0, W1, W2 = WorkerRank(0), WorkerRank(1), WorkerRank(2)


def test_all_values_meet_when_the_last_one_comes():
    rendezvous = Rendezvous(2)
    assert not rendezvous.arrive("epoch-0", W1, b"b")
    assert rendezvous.result("epoch-0") is None
    assert rendezvous.missing("epoch-0") == (W0,)
    assert rendezvous.arrive("epoch-0", W0, b"a")
    assert rendezvous.result("epoch-0") == {W0: b"a", W1: b"b"}


def test_values_are_in_rank_order():
    rendezvous = Rendezvous(3)
    for worker in (W2, W0, W1):
        rendezvous.arrive("k", worker, b"")
    assert list(rendezvous.result("k") or ()) == [W0, W1, W2]


def test_a_retry_gets_the_same_answer():
    rendezvous = Rendezvous(2)
    rendezvous.arrive("k", W0, b"a")
    rendezvous.arrive("k", W0, b"a")
    rendezvous.arrive("k", W1, b"b")
    assert rendezvous.arrive("k", W0, b"changed")
    assert rendezvous.result("k") == {W0: b"a", W1: b"b"}


def test_a_finished_worker_is_not_waited_for_and_may_not_come():
    rendezvous = Rendezvous(2)
    rendezvous.arrive("k", W0, b"a")
    assert rendezvous.finish(W1) == ("k",)
    assert rendezvous.result("k") == {W0: b"a"}
    with pytest.raises(ServerPhaseError, match="finish"):
        rendezvous.arrive("k2", W1, b"")


def test_a_lost_worker_is_not_waited_for_and_its_value_is_gone():
    rendezvous = Rendezvous(3)
    rendezvous.arrive("k", W0, b"a")
    rendezvous.arrive("k", W1, b"b")
    assert rendezvous.lose(W1) == ()
    assert rendezvous.arrive("k", W2, b"c")
    assert rendezvous.result("k") == {W0: b"a", W2: b"c"}


def test_a_lost_worker_that_comes_back_is_waited_for_again():
    rendezvous = Rendezvous(2)
    rendezvous.lose(W1)
    rendezvous.arrive("k", W1, b"b")
    assert rendezvous.missing("next") == (W0, W1)


def test_several_rendezvous_may_be_open():
    rendezvous = Rendezvous(2)
    rendezvous.arrive("a", W0, b"")
    assert not rendezvous.arrive("b", W1, b"")
    assert rendezvous.arrive("b", W0, b"")
    assert rendezvous.arrive("a", W1, b"")


def test_old_answers_are_forgotten():
    rendezvous = Rendezvous(1)
    for number in range(MAX_CLOSED_KEYS + 1):
        rendezvous.arrive(f"k{number}", W0, b"x")
    assert rendezvous.result("k0") is None
    assert rendezvous.result(f"k{MAX_CLOSED_KEYS}") == {W0: b"x"}


def test_large_answers_are_forgotten_sooner(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_CLOSED_BYTES", 100)
    rendezvous = Rendezvous(1)
    rendezvous.arrive("a", W0, bytes(80))
    rendezvous.arrive("b", W0, bytes(80))
    assert rendezvous.result("a") is None
    assert rendezvous.result("b") is not None


@pytest.mark.attack("A10")
def test_too_many_open_rendezvous_are_refused_with_both_keys():
    rendezvous = Rendezvous(2)
    for number in range(MAX_OPEN_KEYS):
        rendezvous.arrive(f"k{number}", W0, b"")
    with pytest.raises(PSSettingsError, match=r"'k0'.*'one more'"):
        rendezvous.arrive("one more", W0, b"")


@pytest.mark.attack("A10")
def test_all_open_values_together_are_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_OPEN_BYTES", 100)
    rendezvous = Rendezvous(3)
    rendezvous.arrive("k", W0, bytes(60))
    with pytest.raises(PSSettingsError, match="120 bytes"):
        rendezvous.arrive("k", W1, bytes(60))


@pytest.mark.fault("F01")
def test_a_newer_attempt_is_waited_for_from_the_first_key_that_the_others_have_not_passed():
    rendezvous = Rendezvous(2)
    for worker in (W0, W1):
        rendezvous.arrive("build", worker, b"x")
    rendezvous.lose(W1)
    assert rendezvous.arrive("epoch-0", W0, b"a")
    assert rendezvous.arrive("build", W1, b"late"), "its program comes to the old keys again"
    assert rendezvous.result("build") == {W0: b"x", W1: b"x"}
    assert rendezvous.arrive("epoch-1", W0, b"a"), "nobody waits for it yet"
    assert rendezvous.arrive("epoch-0", W1, b"b")
    assert not rendezvous.arrive("epoch-2", W1, b"b")
    assert rendezvous.missing("epoch-2") == (W0,)
    assert rendezvous.arrive("epoch-2", W0, b"a")
    assert not rendezvous.arrive("epoch-3", W0, b"a")
    assert rendezvous.missing("epoch-3") == (W1,)


@pytest.mark.fault("F08")
def test_a_brought_answer_is_that_of_the_key_also_where_somebody_waits():
    rendezvous = Rendezvous(2)
    rendezvous.arrive("k", W1, b"late")
    assert rendezvous.bring("k", {W1: b"b", W0: b"a"})
    assert rendezvous.result("k") == {W0: b"a", W1: b"b"}
    assert rendezvous.open_keys == ()
    assert not rendezvous.bring("k", {W0: b"other"})
    assert not rendezvous.bring("k", None)
    assert rendezvous.result("k") == {W0: b"a", W1: b"b"}


@pytest.mark.fault("F08")
def test_a_key_that_is_brought_without_values_is_over():
    rendezvous = Rendezvous(2)
    rendezvous.arrive("k", W1, b"late")
    assert rendezvous.bring("k", None)
    assert rendezvous.result("k") is None
    with pytest.raises(ServerPhaseError, match=r"'k' is over.*Worker 1 is too late"):
        rendezvous.arrive("k", W1, b"late")
    assert not rendezvous.bring("k", {W0: b"a"})


@pytest.mark.attack("A10")
def test_brought_answers_are_bounded_as_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_CLOSED_BYTES", 100)
    monkeypatch.setattr(module, "MAX_KNOWN_KEYS", 3)
    rendezvous = Rendezvous(2)
    for key in "abcd":
        rendezvous.bring(key, {W0: bytes(80)})
    assert [key for key in "abcd" if rendezvous.result(key)] == ["d"]
    assert not rendezvous.arrive("a", W1, b""), "too old to be known"


@pytest.mark.fault("F01")
def test_a_newer_attempt_that_comes_to_a_forgotten_key_is_refused_and_not_waited_for():
    rendezvous = Rendezvous(2)
    rendezvous.lose(W1)
    for number in range(MAX_CLOSED_KEYS + 1):
        rendezvous.arrive(f"epoch-{number}", W0, b"")
    with pytest.raises(ServerPhaseError, match=r"'epoch-0' is over.*Worker 1 is too late"):
        rendezvous.arrive("epoch-0", W1, b"")
    assert rendezvous.arrive("later", W0, b"")


@pytest.mark.fault("F01")
def test_what_was_agreed_on_once_outlives_the_metrics_of_any_number_of_epochs():
    """A newer attempt builds its model from the first; it never comes to the metrics of then."""
    rendezvous = Rendezvous(1)
    rendezvous.arrive("build/1", W0, bytes(200_000))
    rendezvous.arrive("fit/1/begin", W0, b"x")
    for epoch in range(1100):
        rendezvous.arrive(f"fit/1/{epoch}/metrics", W0, bytes(1024))
        rendezvous.arrive(f"fit/1/{epoch}/decision", W0, b"")
    assert rendezvous.result("build/1") == {W0: bytes(200_000)}
    assert rendezvous.result("fit/1/begin") == {W0: b"x"}
    assert rendezvous.result("fit/1/1099/decision") == {W0: b""}
    assert rendezvous.result("fit/1/0/metrics") is None
