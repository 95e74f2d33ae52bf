"""Rows of one clock: merged, weighed and applied once, whatever one table or segment refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ps.checkpoint.snapshot import CopyOnWrite
from ps.dense.shard import DenseShard
from ps.errors import IdError, ShapeError, TableFull
from ps.exactly_once import CompletionLog, RequestId
from ps.manifest.manifest import SGD, Hyper, WorkerRank
from ps.server import row_updates
from ps.server.row_updates import PushedRows, RowUpdates
from ps.server.table_intake import TablePart
from ps.tables.quota import Elsewhere, NoRoom
from ps.tables.routing import Router
from ps.tables.table import Table, make_tables
from tests.support.tables import table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]
pytestmark = pytest.mark.usefixtures("table_kernels_loaded")

HYPER = Hyper(1.0)


class Bed:
    """The tables of one server, without a server."""

    def __init__(self, *specs: Any) -> None:
        manifest = with_tables(*specs)
        self.tables = make_tables(manifest, rank=0, num_servers=1)
        dense = DenseShard(manifest, rank=0, num_servers=1, num_workers=2)
        self.updates = RowUpdates(CopyOnWrite(dense, self.tables, CompletionLog(9)))

    def rows(self, **ids: list[int]) -> PushedRows:
        """A staged push of ones."""
        rows = PushedRows([])
        for at, (name, numbers) in enumerate(ids.items()):
            (owner,) = (each for each in self.tables if each.spec.name == name)
            unique = Router(owner.spec, 1).route(np.unique(numbers)).unique
            arranged = np.concatenate([np.repeat(one, numbers.count(one)) for one in unique])
            rows.parts = [*rows.parts, TablePart(owner, 2 * at, arranged, owner.split(arranged))]
            rows.gradients.append(np.ones((arranged.size, 4), np.float32))
        return rows

    def values(self, at: int, *ids: int) -> list[float]:
        """The first number of each row."""
        return [value_of(self.tables[at], number) for number in ids]


def value_of(owner: Table, number: int) -> float:
    out = np.empty((1, 4), np.float32)
    ids = np.array([number])
    owner.lookup(int(owner.parts_of(ids)[0]), ids, out)
    return float(out[0, 0])


def test_ids_of_all_workers_are_updated_once_by_their_weighted_sum():
    bed = Bed(table(rule=SGD()))
    pushes = [bed.rows(user=[1, 2]), None, bed.rows(user=[2, 3])]
    assert bed.updates.reduce(pushes, [0.25, 0.5, 0.5], HYPER) is None
    assert bed.values(0, 1, 2, 3, 4) == [-0.25, -0.75, -0.5, 0.0]
    assert [segment.version for segment in bed.tables[0].segments] == [1, 1]


def test_a_single_push_is_taken_as_it_is():
    bed = Bed(table(rule=SGD()))
    assert bed.updates.reduce([bed.rows(user=[1])], [7.0], HYPER) is None
    assert bed.values(0, 1) == [-1.0]


@pytest.mark.fault("F47")
def test_an_id_that_is_twice_in_a_push_changes_its_table_nowhere_and_others_go_on():
    bed = Bed(table(rule=SGD()), table("item", SGD()))
    pushes = [bed.rows(user=[1, 1, 2], item=[1]), bed.rows(user=[1], item=[1])]
    error = bed.updates.reduce(pushes, [1.0, 1.0], HYPER)
    assert isinstance(error, IdError)
    assert "id 1 occurs twice in one push" in error.message
    assert bed.values(0, 1, 2) == [0.0, 0.0]
    assert bed.values(1, 1) == [-2.0]


@pytest.mark.fault("F48")
def test_a_full_table_is_told_and_the_others_rows_are_updated():
    bed = Bed(table(rule=SGD(), max_rows=1, segments=1), table("item", SGD()))
    pushes = [bed.rows(user=[1, 2], item=[1]), bed.rows(user=[3])]
    assert isinstance(bed.updates.reduce(pushes, [1.0, 1.0], HYPER), TableFull)
    assert bed.values(0, 1, 2, 3) == [0.0, 0.0, 0.0]
    assert bed.values(1, 1) == [-1.0]


def test_a_push_whose_ids_make_room_in_other_segments_is_reduced_too():
    """Least recently pushed rows of all segments go, those of the clock stay."""
    bed = Bed(table(rule=SGD(), max_rows=8, when_full="lru", segments=4))
    for first in range(0, 400, 4):
        ids = list(range(first, first + 4))
        pushes = [bed.rows(user=ids), bed.rows(user=ids[2:])]
        assert bed.updates.reduce(pushes, [1.0, 1.0], HYPER) is None
        assert bed.values(0, *ids) == [-1.0, -1.0, -2.0, -2.0]


def test_a_copy_of_a_push_that_was_faster_while_it_makes_room_is_not_applied_again(
    monkeypatch: pytest.MonkeyPatch,
):
    """The segment's lock is free between the first attempt and that of all locks."""
    bed = Bed(table(rule=SGD(), max_rows=4, when_full="lru", segments=2))
    (owner,) = bed.tables
    parts = owner.parts_of(np.arange(100))
    bed.updates.reduce([bed.rows(user=np.nonzero(parts == 0)[0][:4].tolist())], [1.0], HYPER)
    number = int(np.nonzero(parts == 1)[0][0])
    pushed, log = bed.rows(user=[number]), CompletionLog(2)
    tickets = [log.begin(RequestId(WorkerRank(0), 0, session=1, sequence=1)) for _ in range(2)]

    def push() -> None:
        bed.updates._update(pushed.parts[0], 1, pushed.gradients[0], HYPER, tickets.pop())

    make_room = owner.room_elsewhere

    def overtaken(error: NoRoom, *kept: Any) -> Elsewhere:
        if tickets:
            push()
        return make_room(error, *kept)

    monkeypatch.setattr(owner, "room_elsewhere", overtaken)
    push()
    assert (tickets, bed.values(0, number)) == ([], [-1.0])


@pytest.mark.attack("A10")
def test_more_gradients_than_may_wait_for_a_clock_are_refused(monkeypatch: pytest.MonkeyPatch):
    bed = Bed(table())
    rows = bed.rows(user=[1, 2])
    rows.check_staged()
    monkeypatch.setattr(row_updates, "MAX_STAGED_BYTES", 31)
    with pytest.raises(ShapeError, match=r"brings 32 bytes .* the limit is 31: push fewer"):
        rows.check_staged()
