"""A server's share of a table: which ids are its, and rows that move to other servers."""

from __future__ import annotations

import numpy as np
import pytest

from ps.checkpoint import snapshot
from ps.checkpoint.snapshot import SegmentSnapshot
from ps.manifest.initializer_spec import RandomNormal
from ps.manifest.manifest import SGD, Adagrad, Adam, Hyper
from ps.tables import eviction
from ps.tables.routing import Router
from ps.tables.rows import Dropped, RowBatch
from ps.tables.table import Table
from tests.support.tables import ones, table, table_kernels_loaded

__all__ = ["table_kernels_loaded"]
pytestmark = pytest.mark.usefixtures("table_kernels_loaded")

IDS = np.random.default_rng(0).choice(10**15, 3000, replace=False)
SPEC = table(rule=Adagrad(), initializer=RandomNormal(), segments=3)


def push(tables: list[Table], ids, value: float = 1.0) -> None:
    routed = Router(tables[0].spec, len(tables)).route(ids)
    for rank, share in enumerate(tables):
        own = routed.unique[routed.own(rank)]
        for at, part in enumerate(share.split(own)):
            with share.segments[at].lock:
                share.push(at, own[part], ones(own[part], value=value), Hyper(0.1))


def values(tables: list[Table], ids):
    routed = Router(tables[0].spec, len(tables)).route(ids)
    out = np.empty((routed.unique.size, 4), np.float32)
    for rank, share in enumerate(tables):
        own, place = routed.unique[routed.own(rank)], out[routed.own(rank)]
        for at, part in enumerate(share.split(own)):
            share.lookup(at, own[part], place[part])
    return routed.expand(out)


def shares(num_servers: int, spec=SPEC) -> list[Table]:
    return [Table(spec, rank=rank, num_servers=num_servers) for rank in range(num_servers)]


def copies(share: Table, takes: dict[int, int] | None = None) -> list[SegmentSnapshot]:
    return [
        SegmentSnapshot(share, (0, at), (takes or {}).get(at), lambda: None)
        for at in range(len(share.segments))
    ]


def rows_of(share: Table, takes: dict[int, int] | None = None) -> list[RowBatch]:
    """What a save of a table that drops nothing has."""
    found = [batch for copy in copies(share, takes) for batch in copy.batches()]
    return [batch for batch in found if isinstance(batch, RowBatch)]


@pytest.mark.parametrize("num_servers", [1, 2, 5])
def test_servers_share_the_ids_evenly(num_servers: int):
    made = shares(num_servers)
    push(made, IDS)
    assert sum(share.num_rows for share in made) == IDS.size
    for share in made:
        assert share.num_rows == pytest.approx(IDS.size / num_servers, rel=0.15)


@pytest.mark.parametrize(("saved", "restored"), [(1, 3), (3, 2), (2, 2)])
def test_rows_move_to_any_number_of_servers_and_train_on_in_the_same_bits(
    saved: int, restored: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(snapshot, "ROWS_AT_ONCE", 97)
    before, after = shares(saved), shares(restored)
    push(before, IDS)
    push(before, IDS[:100], 3.0)
    for batch in (batch for old in before for batch in rows_of(old)):
        for new in after:
            new.load(batch)
    assert sum(share.num_rows for share in after) == IDS.size
    for made in (before, after):
        push(made, IDS[50:150], -2.0)
    assert np.array_equal(values(after, IDS), values(before, IDS))


@pytest.mark.parametrize("rule", [SGD(), Adam()])
def test_each_push_has_the_rate_and_the_step_of_its_own(rule):
    made = shares(1, table(rule=rule, segments=1))
    for rate in (0.1, 0.5, 0.5):
        for share in made:
            with share.segments[0].lock:
                share.push(0, IDS[:1], ones(IDS[:1]), Hyper(rate))
    np.testing.assert_allclose(values(made, IDS[:1]), -1.1, rtol=1e-5)


def test_a_save_that_ends_before_a_segments_turn_keeps_no_row_of_it():
    """As where a push has just found it open: it marks the segment all the same."""
    (made,) = shares(1)
    push([made], IDS)
    for segment, copy in zip(made.segments, copies(made), strict=True):
        copy.release()
        with segment.lock:
            assert copy.begin().stop == 0


def test_a_delta_holds_what_was_pushed_since():
    (made,) = shares(1)
    push([made], IDS)
    base = copies(made)
    assert all(list(copy.batches()) for copy in base)
    push([made], IDS[:40])
    takes = {at: copy.take for at, copy in enumerate(base)}
    found = np.concatenate([batch.ids for batch in rows_of(made, takes)])
    assert sorted(found.tolist()) == sorted(IDS[:40].tolist())


def test_a_copy_has_the_rows_that_a_load_names_meanwhile():
    (made,) = shares(1, table(segments=1))
    push([made], IDS[:9])
    (copy,) = copies(made)
    copy.begin()
    push([made], IDS[9:10])
    assert made.load_new(0, IDS[:9], ones(IDS[:9])) == 0
    (found,) = [batch for batch in copy.batches() if batch.ids.size]
    assert sorted(found.ids.tolist()) == sorted(IDS[:9].tolist())


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_copy_is_of_one_moment_while_rows_change_come_and_go(
    is_delta: bool, monkeypatch: pytest.MonkeyPatch
):
    """Between any two batches rows are pushed, new ones come, and old ones are evicted."""
    monkeypatch.setattr(snapshot, "ROWS_AT_ONCE", 29)
    spec = table(rule=Adagrad(), max_rows=400, when_full="lru", segments=1)
    (made,) = shares(1, spec)
    push([made], IDS[:300])
    base: int | None = None
    applied: list[RowBatch | Dropped] = []
    if is_delta:
        (first,) = copies(made)
        applied += first.batches()
        base = first.take
        push([made], IDS[250:450])
    at_cut: list[tuple[list[int], np.ndarray]] = []

    def cut() -> None:
        rows = made.segments[0].dump(1000, 1000)[0]
        order = np.argsort(rows.ids)
        at_cut.append((rows.ids[order].tolist(), rows.rows[order]))

    copy = SegmentSnapshot(made, (0, 0), base, cut)
    random = np.random.default_rng(0)
    for batch in copy.batches():
        applied.append(batch)
        push([made], np.unique(random.choice(IDS[:900], 30)))
    assert copy.is_whole is not is_delta
    found: dict[int, bytes] = {}
    for batch in applied:
        if isinstance(batch, RowBatch):
            found.update(zip(batch.ids.tolist(), map(bytes, batch.rows), strict=True))
        else:
            found = {number: found[number] for number in found.keys() - batch.ids.tolist()}
    ((ids, rows),) = at_cut
    assert found == dict(zip(ids, map(bytes, rows), strict=True))


def test_a_push_that_meets_a_cut_as_it_is_given_up_marks_nothing():
    (made,) = shares(1, table(segments=1))
    push([made], IDS[:300])
    (copy,) = copies(made)
    copy.release()
    with made.segments[0].lock:
        assert copy.begin().stop == 0
    push([made], IDS[:300])
    cut = made.segments[0].snapshot
    assert cut is not None
    assert cut.take() is None


def test_a_save_that_failed_or_dropped_too_much_is_followed_by_a_whole_one(
    monkeypatch: pytest.MonkeyPatch,
):
    (made,) = shares(1, table(max_rows=40, when_full="lru", segments=1))
    push([made], IDS[:40])
    (first,) = copies(made)
    assert [batch.ids.size for batch in first.batches()] == [40]
    takes = {0: first.take}
    (broken,) = copies(made, takes)
    push([made], IDS[:10])
    next(broken.batches()).ids  # noqa: B018 - given up: the generator is closed
    (after,) = copies(made, takes)
    assert [batch.ids.size for batch in after.batches()] == [40]
    assert after.is_whole
    monkeypatch.setattr(eviction, "MAX_KEPT", 5)
    push([made], IDS[100:110])
    (last,) = copies(made, {0: after.take})
    list(last.batches())
    assert last.is_whole
