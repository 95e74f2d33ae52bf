"""A server's share of a table: which ids are its, and rows that move to other servers."""

from __future__ import annotations

import numpy as np
import pytest

from ps import table as table_module
from ps.errors import TableFull
from ps.params import Adagrad, Hyper
from ps.table import Table
from ps.table_routing import Router
from ps.table_spec import RandomNormal
from tests.tables_bed import ones, table, table_kernels_loaded

__all__ = ["table_kernels_loaded"]
pytestmark = pytest.mark.usefixtures("table_kernels_loaded")

IDS = np.random.default_rng(0).choice(10**15, 3000, replace=False)
SPEC = table(rule=Adagrad(), initializer=RandomNormal(), segments=3)


def push(tables: list[Table], ids, value: float = 1.0) -> None:
    routed = Router(tables[0].spec, len(tables)).route(ids)
    for rank, share in enumerate(tables):
        own = routed.unique[routed.own(rank)]
        for at, part in enumerate(share.cut(own)):
            with share.segments[at].lock:
                share.push(at, own[part], ones(own[part], value=value), Hyper(0.1))


def values(tables: list[Table], ids):
    routed = Router(tables[0].spec, len(tables)).route(ids)
    out = np.empty((routed.unique.size, 4), np.float32)
    for rank, share in enumerate(tables):
        own, place = routed.unique[routed.own(rank)], out[routed.own(rank)]
        for at, part in enumerate(share.cut(own)):
            share.lookup(at, own[part], place[part])
    return routed.expand(out)


def shares(num_servers: int, spec=SPEC) -> list[Table]:
    return [Table(spec, rank=rank, num_servers=num_servers) for rank in range(num_servers)]


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
    monkeypatch.setattr(table_module, "DUMPED_AT_ONCE", 97)
    before, after = shares(saved), shares(restored)
    push(before, IDS)
    push(before, IDS[:100], 3.0)
    taken = sum(new.load(batch) for old in before for batch in old.dump() for new in after)
    assert taken == IDS.size == sum(share.num_rows for share in after)
    for made in (before, after):
        push(made, IDS[50:150], -2.0)
    assert np.array_equal(values(after, IDS), values(before, IDS))


def test_a_delta_holds_what_was_pushed_since():
    (made,) = shares(1)
    push([made], IDS)
    versions = {at: segment.version for at, segment in enumerate(made.segments)}
    push([made], IDS[:40])
    found = np.concatenate([batch.ids for batch in made.dump(versions)])
    assert sorted(found.tolist()) == sorted(IDS[:40].tolist())


def test_rows_that_do_not_fit_are_not_taken_over():
    (full,) = shares(1)
    push([full], IDS)
    (small,) = shares(1, table(rule=Adagrad(), max_rows=100))
    batches = list(full.dump())
    with pytest.raises(TableFull, match="at most 100 rows"):
        small.load(batches[0])
