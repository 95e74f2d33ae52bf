"""A cut of a shard: what pushes change after it is copied first, and freed when it is written."""

from __future__ import annotations

import numpy as np
import pytest

from ps.checkpoint import snapshot
from ps.checkpoint.format import new_arrays
from ps.checkpoint.snapshot import CopyOnWrite, ShardSnapshot, UnitKey
from ps.dense.shard import DenseShard
from ps.exactly_once import CompletionLog, RequestId
from ps.manifest.manifest import Adam, Hyper, WorkerRank
from tests.support.ps_cluster import make_manifest

MANIFEST = make_manifest(1000, rule=Adam())
HYPER = Hyper(0.1)
REQUEST = RequestId(WorkerRank(0), 0, 7, 1)


def aside_bytes(cut: ShardSnapshot) -> int:
    """Return the bytes of the buckets that are copied and not written yet."""
    return sum(array.nbytes for _, arrays in tuple(cut._aside.values()) for array in arrays)


class Bench:
    """A shard without tables whose values are the numbers of their elements."""

    def __init__(self) -> None:
        self.dense = DenseShard(MANIFEST, rank=0, num_servers=1, num_workers=1)
        self.record = CompletionLog(len(self.dense.buckets))
        self.guard = CopyOnWrite(self.dense, (), self.record)
        for bucket in self.dense.buckets:
            self.dense.set_values(bucket.id, np.arange(bucket.num_elements, dtype=np.float32))

    def cut(self, base: dict[UnitKey, int] | None = None) -> ShardSnapshot:
        self.guard.open(ShardSnapshot(self.guard, 5, "save", base or {}))
        assert self.guard.snapshot is not None
        return self.guard.snapshot

    def push(self, *units: int) -> None:
        self.ticket = self.record.begin(REQUEST)
        for unit in units:
            with self.dense.owned[unit].lock:
                self.guard.before(unit)
                gradient = np.ones(self.dense.buckets[unit].num_elements, np.float32)
                self.dense.apply(unit, gradient, HYPER)
                self.ticket.mark(unit)

    def taken(self, cut: ShardSnapshot) -> list[tuple[int, list[np.ndarray]]]:
        found = []
        for bucket in cut.buckets:
            if not cut.is_unchanged(bucket.id):
                arrays = new_arrays(cut.layout, cut.manifest, bucket.id)
                found.append((cut.dump(bucket.id, arrays), arrays))
        return found


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_cut_is_of_its_moment_whatever_is_pushed_before_each_bucket_is_taken(bench: Bench):
    bench.push(0)
    before = [bench.dense.values(i).copy() for i in bench.dense.bucket_ids]
    cut = bench.cut()
    bench.push(*range(1, len(before)))
    bench.ticket.complete()
    taken = bench.taken(cut)
    assert [step for step, _ in taken] == [1] + [0] * (len(before) - 1)
    for (_, arrays), values in zip(taken, before, strict=True):
        assert np.array_equal(arrays[0], values)
    assert [session.applied for session in cut.sessions()] == [(1, *[0] * (len(before) - 1))]
    assert cut.versions() == {i: 2 if i == 0 else 1 for i in bench.dense.bucket_ids}


def test_what_changes_after_a_cut_is_not_counted_in_it(bench: Bench):
    """So a save that lacks anything is never taken for the shard as it is."""
    bench.guard.metadata.put("at", "1")
    before = bench.guard.num_changes(5)
    cut = bench.cut()
    bench.push(1)
    bench.guard.metadata.put("at", "2")
    bench.taken(cut)
    assert cut.num_changes() == before
    assert bench.guard.num_changes(5) == before + 2
    bench.guard.close()
    later = bench.cut()
    bench.taken(later)
    assert later.num_changes() == before + 2
    bench.guard.metadata.put("at", "2")
    bench.guard.metadata.put("never", "null")
    assert bench.guard.num_changes(5) == before + 2, "they were so already"


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_push_in_all_buckets_counts_though_it_was_not_completed(bench: Bench, is_whole: bool):
    bench.push(*range(len(bench.dense.buckets) - (not is_whole)))
    cut = bench.cut()
    bench.ticket.complete()
    bench.taken(cut)
    assert cut.num_updates() == (6 if is_whole else 5)
    bench.guard.close()
    later = bench.cut()
    bench.taken(later)
    assert later.num_updates() == 5, "by now the clock has it"


def test_copies_are_made_once_and_freed_when_they_are_written(bench: Bench):
    cut = bench.cut()
    sizes = [3 * bucket.nbytes for bucket in cut.buckets]  # values and two slots
    for _ in range(3):
        bench.push(0, 2)
    assert aside_bytes(cut) == sizes[0] + sizes[2]
    cut.dump(0, new_arrays(cut.layout, cut.manifest, 0))
    assert aside_bytes(cut) == sizes[2]
    bench.push(0)
    assert aside_bytes(cut) == sizes[2], "what was written needs no copy"
    bench.push(*range(len(sizes)))
    assert aside_bytes(cut) == sum(sizes) - sizes[0]
    bench.taken(cut)
    assert aside_bytes(cut) == 0


def test_what_the_base_has_is_neither_written_nor_copied(bench: Bench):
    base: dict[UnitKey, int] = {i: bench.dense.version(i) for i in bench.dense.bucket_ids}
    bench.push(0)
    cut = bench.cut(base)
    bench.push(0, 1, 2)
    assert aside_bytes(cut) == 3 * cut.buckets[0].nbytes
    unchanged = [cut.is_unchanged(bucket.id) for bucket in cut.buckets]
    assert unchanged == [False] + [True] * (len(base) - 1)
    assert len(bench.taken(cut)) == 1
    assert cut.versions() == {**base, 0: 2}
    bench.guard.close()
    later = bench.cut(cut.versions())
    assert len(bench.taken(later)) == 3, "a delta has what was pushed after the cut of its base"


def test_a_cut_that_is_given_up_holds_nothing_and_nobody(bench: Bench):
    cut = bench.cut()
    bench.push(0)
    bench.guard.close()
    assert (aside_bytes(cut), bench.guard.snapshot) == (0, None)
    bench.push(1)
    cut.keep(2)  # of a push that had looked before
    assert aside_bytes(cut) == 0
    assert not cut.begin_writing()


def test_another_cut_takes_the_place_of_one_that_was_not_written(bench: Bench):
    first = bench.cut()
    bench.push(0)
    second = bench.cut()
    assert aside_bytes(first) == 0
    assert np.array_equal(bench.taken(second)[0][1][0], bench.dense.values(0))


@pytest.mark.fault("F10")
def test_a_cut_whose_saver_does_not_come_is_released_by_the_next_push(bench: Bench, monkeypatch):
    monkeypatch.setattr(snapshot, "UNWRITTEN_S", 0.0)
    forgotten = bench.cut()
    bench.push(0)
    assert not forgotten.begin_writing()
    written = bench.cut()
    assert written.begin_writing()
    bench.push(0)
    assert aside_bytes(written) == 3 * written.buckets[0].nbytes, "it is being written"
