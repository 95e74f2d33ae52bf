"""A table's shares that are pushed to and saved into checkpoints, without servers or clients."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ps.checkpoint.snapshot import NO_BASE, CopyOnWrite, ShardSnapshot, UnitKey
from ps.checkpoint.writer import Base, Origin, Portion, commit, write_shard
from ps.dense.shard import DenseShard
from ps.errors import TableFull
from ps.exactly_once import CompletionLog
from ps.manifest.manifest import Hyper, Manifest, TableSpec
from ps.tables.quota import NoRoom
from ps.tables.routing import Router
from ps.tables.table import Table
from tests.support.tables import ones

HYPER = Hyper(0.1)


class SavedTables:
    """A table's shares, which are pushed to and saved."""

    def __init__(self, spec: TableSpec, num_servers: int) -> None:
        self.manifest = Manifest(groups=(), tables=(spec,))
        self.now_s = 1000.0
        self.tables = [
            Table(spec, rank=rank, num_servers=num_servers, clock=lambda: self.now_s)
            for rank in range(num_servers)
        ]
        self._guards = [self._guard(rank, share) for rank, share in enumerate(self.tables)]
        self._versions: list[dict[UnitKey, int]] = [{} for _ in self.tables]
        self._base: Base | None = None

    def push(self, ids: Any = (), value: float = 1.0) -> None:
        """Push the same gradient to all; what a segment refuses is left out."""
        routed = Router(self.tables[0].spec, len(self.tables)).route(
            np.unique(ids).astype(np.int64)
        )
        for rank, share in enumerate(self.tables):
            own = routed.unique[routed.own(rank)]
            for at, part in enumerate(share.split(own)):
                arguments = at, own[part], ones(own[part], value=value), HYPER
                for unit in range(len(share.segments)):
                    self._guards[rank].before(unit)
                with contextlib.suppress(TableFull):
                    try:
                        with share.segments[at].lock:
                            share.push(*arguments)
                    except NoRoom as error:
                        with share.locked():
                            share.push(*arguments, share.room_elsewhere(error, own))

    def save(
        self,
        root: Path,
        step: int,
        *,
        full: bool = False,
        clock: int = 0,
        passed_over: tuple[int, ...] = (),
    ) -> None:
        """Save a full checkpoint, or a delta where there is a base."""
        extra = msgspec.msgpack.encode({"clock": clock})
        base = None if full else self._base
        save_id, records = f"save-{step}", []
        for rank, guard in enumerate(self._guards):
            cut = ShardSnapshot(
                guard, 0, save_id, NO_BASE if base is None else self._versions[rank]
            )
            portion = Portion(segments=cut.segments)
            records.append(
                write_shard(root, save_id, rank=rank, shard=cut, portion=portion, extra=extra)
            )
            self._versions[rank] = cut.versions()
            cut.release()
        origin = Origin(base=base, passed_over=passed_over)
        commit(root, save_id, step=step, manifest=self.manifest, shards=records, origin=origin)
        self._base = Base(step, save_id)

    def _guard(self, rank: int, share: Table) -> CopyOnWrite:
        dense = DenseShard(self.manifest, rank=rank, num_servers=len(self.tables), num_workers=1)
        return CopyOnWrite(dense, [share], CompletionLog(len(share.segments)))
