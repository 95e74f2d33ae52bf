"""Memory that is used again: never while somebody looks at it, and not without end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rpc.auth.handshake import Identity, Role
from rpc.endpoint import Endpoint
from tests.support.rank_threads import CREDENTIALS, Ranks
from tfos.collectives import memory
from tfos.collectives.fetching import RankPeer, Wanted
from tfos.collectives.group import FEW_BYTES, PIECE_BYTES, RankGroup
from tfos.collectives.memory import ReusedMemory
from tfos.collectives.offers import Offers

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
            made = group.allreduce(np.full(COUNT, number, np.float32), "sum")
            kept.append(made[7:9])  # a part: the whole is dropped
            del made
        return kept

    found = ranks.run(reduce)
    ranks.close()
    for kept in found:
        assert [each.tolist() for each in kept] == [[2.0 * n, 2.0 * n] for n in range(4)]


@pytest.mark.socket
@pytest.mark.parametrize(
    ("call", "more"), [("allreduce", ["sum"]), ("allgather", []), ("broadcast", [])]
)
def test_a_loop_that_drops_its_results_takes_no_new_memory(tmp_path, call, more):
    ranks = Ranks(2, str(tmp_path))

    def reduce(group: RankGroup) -> list[int]:
        places = []
        for _ in range(4):
            made = getattr(group, call)(np.ones(COUNT, np.float32), *more)
            theirs = made[1 - group.rank] if call == "allgather" else made
            places.append(address(theirs))
            del made, theirs
        return places

    found = ranks.run(reduce)
    ranks.close()
    for rank, places in enumerate(found):
        if (call, rank) != ("broadcast", 0):  # the root has a copy of its own
            assert len(set(places)) == 1, (call, rank)


class PlayedLinks:
    """Links to peers whose arrays are ones and who have fetched what they need."""

    def __init__(self, offers: Offers) -> None:
        self._offers = offers

    def open(self, deadline_s: float) -> None:
        pass

    def begin(self, wanted: Sequence[Wanted]) -> None:
        for each in wanted:
            assert each.into is not None
            np.frombuffer(each.into, np.float32)[:] = 1.0
            if each.fetch.last:
                offer: Any = self._offers._current
                offer.fetchers.discard(each.rank)

    def finish(self, wanted: Sequence[Wanted], deadline_s: float, timeout_s: float) -> None:
        pass


def group_of(size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[RankGroup, list[int]]:
    """Return rank 0 of so many, and the list of the memory that it takes."""
    offers, taken = Offers(0), list[int]()
    identities = [Identity(Role.WORKER, rank) for rank in range(size)]
    peers = {who.rank: RankPeer(who, Endpoint("nowhere", 1)) for who in identities[1:]}
    group = RankGroup(identities[0], CREDENTIALS, offers, peers)
    monkeypatch.setattr(group, "_links", PlayedLinks(offers))
    take = group._memory.take

    def noted(num_bytes: int) -> np.ndarray:
        taken.append(num_bytes)
        return take(num_bytes)

    monkeypatch.setattr(group._memory, "take", noted)
    return group, taken


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 16, 100])
def test_pieces_on_their_way_take_a_bounded_memory_however_many_ranks_there_are(size, monkeypatch):
    group, taken = group_of(size, monkeypatch)
    made = group.allreduce(np.full(16 << 20, 2.0, np.float32), "sum")
    assert made[: (16 << 20) // size].min() == made[: (16 << 20) // size].max() == size + 1.0
    assert taken[0] == made.nbytes
    assert all(num_bytes <= 64 << 20 for num_bytes in taken[1:])
    if size == 2:
        assert taken[1:] == [2 * 2 * PIECE_BYTES]


@pytest.mark.slow
def test_a_loop_among_many_ranks_takes_no_new_memory_either(monkeypatch):
    group, _ = group_of(64, monkeypatch)
    array = np.ones(32 << 20, np.float32)
    group.allreduce(array, "sum")
    kept = [each for each, _ in group._memory._lent]  # not their addresses: new memory has them too
    made = group.allreduce(array, "sum")
    assert address(made) in [address(each) for each in kept]
    assert {id(each) for each, _ in group._memory._lent} == {id(each) for each in kept}
