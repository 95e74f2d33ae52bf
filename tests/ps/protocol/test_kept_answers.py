"""Which answers of rendezvous are forgotten first."""

from __future__ import annotations

from ps.protocol.kept_answers import KeptAnswers


def test_what_was_agreed_on_once_stays_beside_a_series_that_overflows():
    kept: KeptAnswers[str] = KeptAnswers(max_answers=100, max_bytes=100, max_keys=200)
    kept.keep("first", "agreed", 60)
    for number in range(10):
        kept.keep(f"epoch/{number}", str(number), 10)
    assert kept.get("first") == "agreed"
    assert [kept.get(f"epoch/{number}") for number in range(10)] == [None] * 6 + [*"6789"]


def test_single_answers_give_way_where_no_series_has_more_than_one():
    kept: KeptAnswers[str] = KeptAnswers(max_answers=100, max_bytes=100, max_keys=200)
    kept.keep("small", "a", 10)
    kept.keep("large", "b", 60)
    kept.keep("epoch/0", "c", 20)
    kept.keep("epoch/1", "d", 90)
    assert [kept.get(key) for key in ("small", "large", "epoch/0", "epoch/1")] == [
        "a",
        None,
        None,
        "d",
    ]


def test_the_newest_stays_whatever_its_size():
    kept: KeptAnswers[str] = KeptAnswers(max_answers=100, max_bytes=100, max_keys=200)
    kept.keep("epoch/0", "a", 50)
    kept.keep("epoch/1", "b", 500)
    assert kept.get("epoch/0") is None
    assert kept.get("epoch/1") == "b"


def test_what_a_series_has_given_up_no_longer_counts_for_it():
    kept: KeptAnswers[str] = KeptAnswers(max_answers=100, max_bytes=100, max_keys=200)
    for number in range(10):
        kept.keep(f"epoch/{number}", str(number), 10)
    kept.keep("validation/0", "a", 40)  # for four epochs
    kept.keep("validation/1", "b", 40)  # 80 bytes are more than the 60 of epochs
    assert [kept.get(f"epoch/{number}") for number in range(10)] == [None] * 4 + [*"456789"]
    assert kept.get("validation/0") is None


def test_keys_whose_answers_were_never_known_are_bounded_too():
    kept: KeptAnswers[str] = KeptAnswers(max_answers=1, max_bytes=100, max_keys=3)
    for number in range(5):
        kept.forget(f"epoch/{number}")
    assert [key for key, _ in kept] == ["epoch/2", "epoch/3", "epoch/4"]
