"""Parameter servers inside the test: the rules of ps.optimizers on plain numpy arrays.

Follows the interface of ps.client.PSClient. What it does is what the real servers promise; no
sockets, no buckets, no retries.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ps import optimizers as rules
from ps.errors import PhaseError, RequestTimeout
from ps.messages import Ack
from ps.optimizers import average, decay, rule_of, step_scalars
from ps.params import Average, Descent, Manifest, WorkerRank
from ps.rendezvous import Rendezvous

DEADLINE_S = 60.0


@dataclass
class Shard:
    values: np.ndarray
    slots: list[np.ndarray]
    steps: int = 0


class FakeServers:
    def __init__(self, num_workers: int = 1) -> None:
        self.num_workers = num_workers
        self.changed = threading.Condition()
        self.manifest: Manifest | None = None
        self.groups: dict[str, Shard] = {}
        self.clock = 0
        self.members = set(range(num_workers))
        self.staged: dict[int, tuple[Any, Any, int] | None] = {}
        self.rendezvous = Rendezvous(num_workers)
        self.pushes: list[dict[str, Any]] = []
        self.null_pushes = 0

    def client(self, rank: int = 0) -> FakeClient:
        return FakeClient(self, rank)

    def wait(self, condition: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if not self.changed.wait(max(0.0, deadline - time.monotonic())):
                raise RequestTimeout("nobody came")

    def reduce(self) -> None:
        if not self.staged or self.members - self.staged.keys():
            return
        pushed = [self.staged[rank] for rank in sorted(self.staged)]
        self.staged.clear()
        self.clock += 1
        given = [push for push in pushed if push is not None]
        if given:
            total = sum(rows for _, _, rows in given)
            mean = {
                name: weighted([(grads[name], rows) for grads, _, rows in given], total)
                for name in given[0][0]
            }
            self.apply(mean, given[0][1], pushers=1)
        self.changed.notify_all()

    def apply(self, grads: Any, hyper: Any, pushers: int) -> None:
        assert self.manifest is not None
        self.pushes.append({"hyper": hyper, **{k: v.copy() for k, v in grads.items()}})
        for spec in self.manifest.groups:
            shard = self.groups[spec.name]
            g, dtype = np.asarray(grads[spec.name]), shard.values.dtype
            shard.steps += 1
            if isinstance(spec.rule, Average):
                shard.values = (
                    g.copy() if pushers == 1 else average(g, shard.values, dtype.type(pushers))
                )
                continue
            assert isinstance(spec.rule, Descent)
            if spec.rule.clipvalue:
                g = np.clip(g, -dtype.type(spec.rule.clipvalue), dtype.type(spec.rule.clipvalue))
            rate = dtype.type(hyper.learning_rate)
            if spec.rule.weight_decay is not None:
                shard.values = decay(shard.values, dtype.type(spec.rule.weight_decay), rate)
            rule = rule_of(spec.rule)
            scalars = step_scalars(spec.rule, spec.name, hyper, shard.steps, dtype)
            result = getattr(rules, rule.name)(g, shard.values, *shard.slots, *scalars)
            result = result if isinstance(result, tuple) else (result,)
            shard.values, shard.slots = result[0], list(result[1:])


def weighted(parts: list[tuple[np.ndarray, int]], total: int) -> np.ndarray:
    if len(parts) == 1:
        return np.array(parts[0][0])
    summed = np.zeros_like(parts[0][0])
    for grads, rows in parts:
        summed = summed + grads * grads.dtype.type(rows)
    return np.asarray(summed / summed.dtype.type(total))


class FakeClient:
    def __init__(self, servers: FakeServers, rank: int) -> None:
        self.servers = servers
        self.rank = rank
        self.calls: list[str] = []

    def seed(self, manifest: Manifest, values: Any) -> None:
        with self.servers.changed:
            self.calls.append("seed")
            if self.servers.manifest is None:
                for group in manifest.groups:
                    value = values[group.name]
                    assert value.dtype == group.dtype
                    assert value.shape == (group.num_elements,)
                    rule = rule_of(group.rule)
                    slots = [np.full_like(value, rule.slot_init) for _ in rule.slots]
                    self.servers.groups[group.name] = Shard(value.copy(), slots)
                self.servers.manifest = manifest
            self.servers.changed.notify_all()

    def attach(self, *, timeout_s: float) -> Manifest:
        with self.servers.changed:
            self.servers.wait(lambda: self.servers.manifest is not None)
            assert self.servers.manifest is not None
            return self.servers.manifest

    def pull(self, into: Any) -> Ack:
        with self.servers.changed:
            self.calls.append("pull")
            return self._answer(into)

    def push_pull(self, grads: Any, into: Any, *, hyper: Any, rows: int) -> Ack:
        self.calls.append("push")
        return self._push((grads, hyper, rows), into)

    def push_null(self, *, rows: int = 0, into: Any = None) -> Ack:
        self.calls.append("null")
        return self._push(None, into)

    def _push(self, push: Any, into: Any) -> Ack:
        servers = self.servers
        with servers.changed:
            assert servers.manifest is not None
            if push is None:
                servers.null_pushes += 1
            if servers.manifest.consistency == "async":
                if push is not None:
                    servers.apply(push[0], push[1], servers.num_workers)
                    servers.clock += 1
            else:
                if self.rank not in servers.members:
                    raise PhaseError("join first")
                mine = servers.clock
                servers.staged[self.rank] = push
                servers.reduce()
                servers.wait(lambda: servers.clock > mine)
            return self._answer(into)

    def _answer(self, into: Any) -> Ack:
        for name, buffer in (into or {}).items():
            buffer[:] = self.servers.groups[name].values
        return Ack(self.servers.clock, True)

    def assign(self, values: Any) -> None:
        with self.servers.changed:
            self.calls.append("assign")
            for name, value in values.items():
                self.servers.groups[name].values = value.copy()

    def join(self) -> None:
        with self.servers.changed:
            self.calls.append("join")
            self.servers.members.add(self.rank)

    def leave(self) -> None:
        with self.servers.changed:
            self.calls.append("leave")
            self.servers.members.discard(self.rank)
            self.servers.reduce()
            self.servers.changed.notify_all()

    def finish(self) -> None:
        self.leave()
        with self.servers.changed:
            self.servers.rendezvous.finish(WorkerRank(self.rank))
            self.servers.changed.notify_all()

    def rendezvous(self, key: str, value: bytes, *, timeout_s: float) -> dict[int, bytes]:
        with self.servers.changed:
            meetings = self.servers.rendezvous
            meetings.arrive(key, WorkerRank(self.rank), value)
            self.servers.changed.notify_all()
            self.servers.wait(lambda: meetings.result(key) is not None)
            return {int(rank): v for rank, v in (meetings.result(key) or {}).items()}

    def stats(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


@dataclass
class FakeContext:
    """What tfos.keras.worker.WorkerContext asks for."""

    client: Any
    num_workers: int = 1
    worker_rank: int = 0
    log_dir: str | None = None
    feed_channel: Any = None
    progress: list[tuple[int, int, float | None]] = field(default_factory=list)

    @property
    def is_chief(self) -> bool:
        return self.worker_rank == 0

    def ps_client(self) -> Any:
        return self.client

    def report_progress(self, step: int, rows: int, loss: float | None) -> None:
        self.progress.append((step, rows, loss))

    def absolute_path(self, path: str) -> str:
        return path
