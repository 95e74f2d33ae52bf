"""Hybrid: dense groups wait at the barrier, rows are applied on arrival under a worker's permits.

Covers: who may look up rows to train on, the queue, the release of permits.
Does not: hold rows or gradients, wait, or answer anybody (ps.consistency.gate). Pure: no locks,
clock or I/O.

A batch is under way from the lookup of its rows until its gradients are applied:

    lookup ──► a permit is free ──► HELD ──► gradients applied, refused or given up ──► OVER
       │                             ▲
       └──► none is: IN LINE ────────┘  as soon as an older batch is over

Each worker has `bound` permits at each server, so its rows are at most that many of its own batches
old, and the cluster has bound * workers of them under way. The barrier keeps the workers in step
meanwhile. One pool for all workers would end in a deadlock: those that hold the last permits wait
at the barrier for one that waits for a permit.

Source: Lian et al., Persia: An Open, Hybrid System Scaling Deep Learning-based Recommenders up to
100 Trillion Parameters, KDD 2022. There the permits live in the workers; here the servers keep
them, so a worker's bug cannot exceed the bound and nobody has to be asked when one dies.
"""

from __future__ import annotations

from collections.abc import Collection

from ps.consistency.bsp import BSP
from ps.consistency.policy import Action, Grant, OnLost, RecallLookups
from ps.errors import PSSettingsError
from ps.exactly_once import RequestId
from ps.manifest.manifest import WorkerRank


class Permits:
    """The batches of all workers that are under way or in line.

    A batch bears the name of the request that looked it up.

    Args:
        bound: permits of each worker.
    """

    def __init__(self, bound: int) -> None:
        if bound < 1:
            raise PSSettingsError(f"a worker needs at least 1 permit, got staleness_bound={bound}")
        self.bound = bound
        self._held: dict[WorkerRank, set[RequestId]] = {}
        self._line: dict[WorkerRank, list[RequestId]] = {}

    def held(self, worker: WorkerRank) -> frozenset[RequestId]:
        """The worker's batches that are under way."""
        return frozenset(self._held.get(worker, ()))

    def on_lookup(self, batch: RequestId, still_open: Collection[int]) -> list[Action]:
        """Give a permit or a place in line; a repeated lookup gets no second one.

        Args:
            batch: its name.
            still_open: the sequences of its session that its worker has under way, this one
                included. Others are over, though no request of the server said so.
        """
        held = self._held.setdefault(batch.worker, set())
        line = self._line.setdefault(batch.worker, [])
        if batch in held:
            return [Grant(batch)]

        def is_over(other: RequestId) -> bool:
            # A later one may arrive first: lookups and pushes have connections of their own.
            is_older = other[:3] == batch[:3] and other.sequence < batch.sequence
            return other.generation != batch.generation or (
                is_older and other.sequence not in still_open
            )

        held.difference_update([one for one in held if is_over(one)])
        recalled = [one for one in line if is_over(one)]
        line[:] = [one for one in line if one not in recalled]
        if batch not in line:
            line.append(batch)
        recall: list[Action] = [RecallLookups(tuple(recalled))] if recalled else []
        return recall + self._serve(batch.worker)

    def on_lookup_ended(self, batch: RequestId) -> None:
        """Nobody waits for this lookup any more."""
        line = self._line.get(batch.worker, [])
        if batch in line:
            line.remove(batch)

    def on_batch_over(self, batch: RequestId, following: RequestId | None = None) -> list[Action]:
        """Its gradients are applied, refused or given up: serve the next in line.

        Args:
            batch: its name.
            following: the batch that takes its permit over, before any in line: the push that ends
                the one begins the other, and is answered only then. None: there is none.
        """
        held = self._held.get(batch.worker, set())
        if batch in held:
            held.remove(batch)
            held.update(() if following is None else (following,))
        return self._serve(batch.worker)

    def on_gone(self, worker: WorkerRank) -> list[Action]:
        """Take all its permits back and end the waits of its lookups."""
        self._held.pop(worker, None)
        line = self._line.pop(worker, None)
        return [RecallLookups(tuple(line))] if line else []

    def on_broken(self) -> list[Action]:
        """No gradient will be applied any more, so nobody in line gets a permit."""
        return [action for worker in sorted(self._line) for action in self.on_gone(worker)]

    def _serve(self, worker: WorkerRank) -> list[Action]:
        held, line = self._held.get(worker, set()), self._line.get(worker, [])
        granted: list[Action] = []
        while line and len(held) < self.bound:
            batch = line.pop(0)
            held.add(batch)
            granted.append(Grant(batch))
        return granted


class Hybrid(BSP):
    """The barrier for dense groups, permits for rows; a membership event concerns both.

    Args:
        num_workers: number of workers in the cluster.
        bound: permits of each worker.
        on_lost: what a lost worker does to the barrier.
        clock: barriers so far, of a restored shard; its permits are all free.
    """

    def __init__(
        self, num_workers: int, bound: int, *, on_lost: OnLost = "fail", clock: int = 0
    ) -> None:
        super().__init__(num_workers, on_lost=on_lost, clock=clock)
        self.permits = Permits(bound)

    def on_lookup(self, batch: RequestId, still_open: Collection[int]) -> list[Action]:
        """A member asks for rows to train on.

        Args:
            batch: identifies the lookup.
            still_open: sequences of its session that its worker has under way, this one included.

        Raises:
            ServerPhaseError: it has left or finished.
            WorkerLost: the barrier is broken.
        """
        self.admit(batch.worker)
        return self.permits.on_lookup(batch, still_open)

    def on_leave(self, worker: WorkerRank) -> list[Action]:
        """Wait for it no more, and take its permits back."""
        return self.permits.on_gone(worker) + super().on_leave(worker)

    def on_lost(self, worker: WorkerRank) -> list[Action]:
        """Break the barrier or drop the worker from it, and take its permits back."""
        actions = self.permits.on_gone(worker) + super().on_lost(worker)
        return actions if self._broken_by is None else actions + self.permits.on_broken()
