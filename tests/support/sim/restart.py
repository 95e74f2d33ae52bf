"""In a simulated world: all servers are saved at one moment; later one dies and is started again.

The new one goes on from the save, as a supervisor's child does: with the record of what was applied
by then, and told which workers have ended or were lost. What was pushed since is lost there alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ps.checkpoint.choice import AS_SAVED, read_manifest
from ps.checkpoint.reader import open_chain
from ps.checkpoint.storage import storage_at
from ps.checkpoint.writer import commit
from ps.manifest.manifest import WorkerRank
from ps.protocol import messages
from ps.server.handlers import Service
from tests.support.sim.network import Network
from tests.support.sim.world import Task, World

SAVE_ID = "simulated"
STEP = 1


class Restart:
    """One restart of one server.

    Args:
        network: replaced there.
        rank: which server.
        make: a new server in its place.
        workers: the tasks of the workers, by rank.
        lost: ranks that were declared lost so far.
        count: tells how many pushes of each worker have been answered.
        look: tells which workers are about to end.
    """

    def __init__(
        self,
        network: Network,
        rank: int,
        make: Callable[[], Service],
        workers: Sequence[Task],
        lost: set[int],
        count: Callable[[], list[int]],
        look: Callable[[], list[bool]],
    ) -> None:
        self.rank = rank
        self.happened = False
        self.saved = np.empty(0)
        """What this server's buckets were at the save."""
        self.acknowledged: list[int] = []
        """Pushes of each worker that were answered before it died."""
        self.ending: list[bool] = []
        """Which workers may have made their last request by then."""
        self._count = count
        self._look = look
        self._network = network
        self._make = make
        self._workers = workers
        self._lost = lost

    def run(self) -> None:
        world = self._network.world
        world.sleep(world.random.choice((0.0, 0.1, 0.5, 2.0)))
        world.block(self._may_save, 30.0)
        if not self._may_save():
            return
        with tempfile.TemporaryDirectory(prefix="tfos-simulated-") as directory:
            self._save(world, directory)
            self._network.note("saves")
            world.sleep(world.random.choice((0.0, 0.0, 0.1, 0.5, 2.0, 5.0)))
            self._start_again(Path(directory))
        self._tell_who_ends(world)

    def _may_save(self) -> bool:
        """Whether all are at one clock, if their mode has one, and between no two rounds."""
        shards = [served.life.shard for served in self._network.services]
        if not all(shard is not None and shard.reduction.is_settled for shard in shards):
            return False
        has_barrier = any(shard and shard.manifest.has_barrier for shard in shards)
        clocks = {shard.gate.clock for shard in shards if shard is not None}
        return len(clocks) == 1 or not has_barrier

    def _save(self, world: World, directory: str) -> None:
        """Save all at one moment: nobody else has a turn meanwhile."""
        rate, world.switch_rate = world.switch_rate, 0.0
        records = []
        for served in self._network.services:
            shard = served.life.loaded()
            made = served._saving.take_snapshot(
                shard, messages.TakeSnapshot(SAVE_ID), lambda: False
            )
            assert made.is_made
            saved = served._saving.save(shard, messages.Save(directory, SAVE_ID), lambda: False)
            records.append(saved.shard)
        manifest = served.life.loaded().manifest
        commit(storage_at(directory), SAVE_ID, step=STEP, manifest=manifest, shards=records)
        dense = self._network.services[self.rank].life.loaded().dense
        values = [dense.values(bucket.id).copy() for bucket in dense.buckets]
        self.saved = np.concatenate(values) if values else np.empty(0)
        world.switch_rate = rate

    def _start_again(self, directory: Path) -> None:
        root = storage_at(directory)
        served = self._make()
        chain = open_chain(root, read_manifest(root, STEP), served.settings)
        assert served.serve(served.read(chain, AS_SAVED, resumes=False))
        self.happened = True
        self.acknowledged = self._count()
        self.ending = self._look()
        self._network.replace(self.rank, served)

    def _tell_who_ends(self, world: World) -> None:
        served = self._network.services[self.rank]
        told: set[int] = set()
        while len(told) < len(self._workers):
            for rank, task in enumerate(self._workers):
                if rank not in told and (task.done or rank in self._lost):
                    told.add(rank)
                    if rank in self._lost or task.error is not None:
                        served.worker_lost(WorkerRank(rank), 0)
                    else:
                        served.worker_done(WorkerRank(rank))
            open_ranks = [rank for rank in range(len(self._workers)) if rank not in told]
            if open_ranks:
                world.block(partial(self._has_ended_any, open_ranks))

    def _has_ended_any(self, ranks: Sequence[int]) -> bool:
        return any(self._workers[rank].done or rank in self._lost for rank in ranks)
