"""Row numbers that are kept between a lookup and its push: how many, and which push gets them."""

from __future__ import annotations

import numpy as np
import pytest

from ps.tables import deliveries
from ps.tables.deliveries import RecentLookups

IDS = np.arange(100, 140)


def rows_of(ids: np.ndarray) -> np.ndarray:
    return ids + 7


def kept(made: RecentLookups, *lookups: np.ndarray) -> list[bool]:
    """Whether the rows of each are still there; takes them."""
    found = [made.take(ids) for ids in lookups]
    for ids, rows in zip(lookups, found, strict=True):
        assert rows is None or np.array_equal(rows, rows_of(ids))
    return [rows is not None for rows in found]


def test_each_lookup_is_for_one_push_of_its_ids_in_any_order_of_pushes():
    made = RecentLookups()
    lookups = [IDS, IDS + 1, IDS[:-1], IDS[::-1].copy()]
    for ids in lookups:
        made.keep(ids, rows_of(ids))
    assert kept(made, *reversed(lookups)) == [True] * 4
    assert kept(made, *lookups) == [False] * 4


def test_a_push_of_merged_ids_ends_all_lookups():
    made = RecentLookups()
    for ids in (IDS, IDS + 1):
        made.keep(ids, rows_of(ids))
    assert kept(made, IDS - 1, IDS, IDS + 1) == [False] * 3
    made.keep(IDS, rows_of(IDS))
    assert kept(made, IDS) == [True]


def test_of_two_lookups_of_the_same_ids_the_newer_one_counts():
    made = RecentLookups()
    made.keep(IDS, rows_of(IDS) + 1)
    made.keep(IDS, rows_of(IDS))
    assert kept(made, IDS, IDS) == [True, False]


@pytest.mark.parametrize(
    ("limit", "value"), [("MAX_KEPT_IDS", 3 * IDS.size), ("MAX_KEPT", 3)], ids=["ids", "lookups"]
)
def test_lookups_that_nobody_pushes_for_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
):
    monkeypatch.setattr(deliveries, limit, value)
    made = RecentLookups()
    for start in (0, 1, 1, 2, 3, 4):
        made.keep(IDS + start, rows_of(IDS + start))
    assert kept(made, *(IDS + start for start in (2, 3, 4, 1))) == [True, True, True, False]
    for start in range(3):
        made.keep(IDS + start, rows_of(IDS + start))
    assert kept(made, *(IDS + start for start in range(3))) == [True] * 3, "what was taken is free"


def test_no_ids_and_more_than_the_limit_are_not_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deliveries, "MAX_KEPT_IDS", IDS.size)
    made = RecentLookups()
    made.keep(IDS, rows_of(IDS))
    longer = np.arange(IDS.size + 1)
    for ids in (IDS[:0], longer):
        made.keep(ids, rows_of(ids))
    assert kept(made, IDS, longer, IDS[:0]) == [True, False, False]
