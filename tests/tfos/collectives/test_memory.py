"""Memory that is used again: never while somebody looks at it, and not without end."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.rank_threads import Ranks
from tfos.collectives import memory
from tfos.collectives.group import FEW_BYTES, RankGroup
from tfos.collectives.memory import ReusedMemory

COUNT = FEW_BYTES  # of float32: more than few bytes


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_that_nobody_refers_to_is_lent_again():
    lender = ReusedMemory()
    first = lender.take(1 << 20)
    at = address(first)
    part = first.view(np.float32).reshape(2, -1)[1, 3:]
    del first
    second = lender.take(1 << 20)
    assert address(second) != at, "a part of the first is still in use"
    del part
    assert address(lender.take(1 << 20)) == at


def test_memory_that_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(memory, "KEPT_BYTES", 3 << 20)
    lender = ReusedMemory()
    used = [lender.take(1 << 20) for _ in range(5)]
    places = [address(each) for each in used]
    del used
    again = [lender.take(1 << 20) for _ in range(3)]
    assert {address(each) for each in again} == set(places[2:])


def test_memory_beyond_the_bound_is_not_kept(monkeypatch):
    monkeypatch.setattr(memory, "KEPT_BYTES", 1 << 20)
    lender = ReusedMemory()
    lender.take(2 << 20)
    assert not lender._lent


@pytest.mark.socket
def test_a_result_that_is_kept_is_never_changed_by_later_calls(tmp_path):
    ranks = Ranks(2, str(tmp_path))

    def reduce(group: RankGroup) -> list[np.ndarray]:
        kept = []
        for number in range(4):
            made = group.allreduce(np.full(COUNT, number, np.float32))
            kept.append(made[7:9])  # a part: the whole is dropped
            del made
        return kept

    found = ranks.run(reduce)
    ranks.close()
    for kept in found:
        assert [each.tolist() for each in kept] == [[2.0 * n, 2.0 * n] for n in range(4)]


@pytest.mark.socket
@pytest.mark.parametrize("call", ["allreduce", "allgather", "broadcast"])
def test_a_loop_that_drops_its_results_takes_no_new_memory(tmp_path, call):
    ranks = Ranks(2, str(tmp_path))

    def reduce(group: RankGroup) -> list[int]:
        places = []
        for _ in range(4):
            made = getattr(group, call)(np.ones(COUNT, np.float32))
            theirs = made[1 - group.rank] if call == "allgather" else made
            places.append(address(theirs))
            del made, theirs
        return places

    found = ranks.run(reduce)
    ranks.close()
    for rank, places in enumerate(found):
        if (call, rank) != ("broadcast", 0):  # the root has a copy of its own
            assert len(set(places)) == 1, (call, rank)
