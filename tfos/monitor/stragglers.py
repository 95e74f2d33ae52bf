"""Stragglers: the worker or the server that slows the others down.

Covers: each worker's time by part, the comparison with the others, the sentence for the user.
Does not: collect counters (tfos.control.members keeps the last heartbeats).      Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ps import codec
from ps.stats.server_stats import ServerStats
from rpc.errors import UNREADABLE
from rpc.histogram import duration_text
from tfos.control.members import Member
from tfos.control.messages import Heartbeat
from tfos.monitor.reports import StepTimes

Each = TypeVar("Each")

SLOW = 2.0
"""A node is slow at this many times the others' median: users notice twice, noise is less."""
LEAST_S = 1e-3
"""Shorter times are not reported."""
LEAST_MB_PER_S = 10.0
"""Slower traffic is not reported: it is a twelfth of a gigabit network's."""
LEAST_STEPS = 3
_DATA_REQUESTS = ("push", "settle", "pull", "push_rows", "lookup")


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Load of one server in the last heartbeats."""

    requests: int
    busy_s: float
    """Seconds in those requests, without waits for workers: receiving, updating, sending."""
    apply_s: float
    transferred_bytes: int
    span_s: float
    """Seconds between these heartbeats: each server has its own moments."""
    table_ids: Mapping[str, int]
    """Ids that were looked up or pushed, by table."""

    @property
    def per_request_s(self) -> float:
        """Seconds that a request takes."""
        return self.busy_s / self.requests if self.requests else 0.0

    @property
    def mb_per_s(self) -> float:
        """Traffic in MB per second."""
        return self.transferred_bytes / 1e6 / self.span_s if self.span_s > 0 else 0.0


def server_counters(beat: Heartbeat | None) -> ServerStats | None:
    """Return a server's counters in a heartbeat; None if there are none that can be read."""
    if beat is None or not beat.stats:
        return None
    try:
        return codec.msgpack(beat.stats, ServerStats)
    except UNREADABLE:
        return None


class ServerWindow(NamedTuple):
    """A server's counters in the newest and in the oldest heartbeat that is kept."""

    new: ServerStats
    old: ServerStats


def window_of(server: Member) -> ServerWindow | None:
    """Return a server's counters; None if there are none that can be read."""
    new = server_counters(server.heartbeat)
    if new is None:
        return None
    return ServerWindow(new, new.baseline(server_counters(server.beats[0])))


def server_load(window: ServerWindow) -> ServerLoad:
    """Return a server's load between the oldest and the newest kept heartbeat."""
    new, old = window
    waited_s = new.barrier_wait_s - old.barrier_wait_s
    before = {table.name: table.looked_up + table.pushed for table in old.tables}
    return ServerLoad(
        requests=_requests(new) - _requests(old),
        busy_s=max(0.0, _request_s(new) - _request_s(old) - waited_s),
        apply_s=new.apply_s - old.apply_s,
        transferred_bytes=new.bytes_in + new.bytes_out - old.bytes_in - old.bytes_out,
        span_s=new.uptime_s - old.uptime_s,
        table_ids={
            table.name: table.looked_up + table.pushed - before.get(table.name, 0)
            for table in new.tables
        },
    )


class Waits(NamedTuple):
    """Seconds that each worker's pushes waited for others, by rank."""

    lately: dict[int, float]
    since_start: dict[int, float]


def waits_of(servers: Iterable[ServerWindow]) -> Waits:
    """Return how long each worker's pushes waited.

    A push waits at all servers at the same time, so it is the longest of them that counts.
    """
    found = Waits({}, {})
    for new, old in servers:
        before = {worker.worker: worker.waited_s for worker in old.workers}
        for worker in new.workers:
            rank, waited_s = worker.worker, worker.waited_s
            found.since_start[rank] = max(found.since_start.get(rank, 0.0), waited_s)
            waited_s -= before.get(rank, 0.0)
            found.lately[rank] = max(found.lately.get(rank, 0.0), waited_s)
    return found


def step_times(worker: Member, waits: Waits) -> StepTimes | None:
    """Return a worker's recent time by part, or since its start if it has made few steps since.

    None: there are no times.

    Args:
        worker: its record at the driver.
        waits: seconds that each worker's pushes waited for others.
    """
    beat = worker.heartbeat
    if beat is None or "compute_s" not in beat.progress:
        return None
    new, old, waited = beat.progress, worker.beats[0].progress, waits.lately
    if new.get("steps", 0.0) - old.get("steps", 0.0) < LEAST_STEPS:
        old, waited = {}, waits.since_start

    def spent(name: str) -> float:
        return max(0.0, new.get(name, 0.0) - old.get(name, 0.0))

    push_s = spent("push_s")
    wait_s = min(push_s, waited.get(worker.planned.rank, 0.0))
    return StepTimes(
        steps=spent("steps"),
        compute_s=spent("compute_s"),
        feed_s=spent("feed_s"),
        lookup_s=spent("lookup_s"),
        pull_s=spent("pull_s"),
        push_s=push_s - wait_s,
        wait_s=wait_s,
    )


def find_straggler(times: Mapping[str, StepTimes]) -> str:
    """Return a sentence about the straggler and its time by part; empty: there is none."""
    found = {name: each for name, each in times.items() if each.steps >= LEAST_STEPS}
    name, others_s = _outlier(found, lambda each: each.own_s, LEAST_S)
    if not name:
        return ""
    slow = found[name]
    return (
        f"straggler: {name} takes {duration_text(slow.own_s)} of its own per step, the others "
        f"{duration_text(others_s)}: {slow}"
    )


def hot_shard(loads: Mapping[str, ServerLoad]) -> str:
    """Return a sentence about the hot shard and its cause; empty: there is none."""
    found = {name: load for name, load in loads.items() if load.requests}
    name, others_s = _outlier(found, lambda load: load.per_request_s, LEAST_S)
    if name:
        load = found[name]
        share = min(1.0, load.apply_s / load.busy_s)
        return (
            f"hot shard: {name} takes {duration_text(load.per_request_s)} for a request, the "
            f"others {duration_text(others_s)}: update kernels {share:.0%}, receiving and sending "
            f"{1 - share:.0%}{_hot_table(load)}"
        )
    name, others = _outlier(found, lambda load: load.mb_per_s, LEAST_MB_PER_S)
    if not name:
        return ""
    load = found[name]
    return (
        f"hot shard: {name} moves {load.mb_per_s:.1f} MB/s, the others {others:.1f} "
        f"MB/s{_hot_table(load)}"
    )


def _hot_table(load: ServerLoad) -> str:
    total = sum(load.table_ids.values())
    if not total:
        return ""
    name, ids = max(load.table_ids.items(), key=lambda item: item[1])
    return f"; table {name!r} has {ids / total:.0%} of its ids"


def _outlier(
    found: Mapping[str, Each], measure: Callable[[Each], float], least: float
) -> tuple[str, float]:
    """Return the node above SLOW times the others' median, and that median; or an empty name."""
    if len(found) < 2:
        return "", 0.0
    measured = {name: measure(each) for name, each in found.items()}
    name = max(measured, key=lambda each: measured[each])
    others = statistics.median(value for each, value in measured.items() if each != name)
    is_out = measured[name] > SLOW * others and measured[name] >= least
    return (name, others) if is_out else ("", others)


def _requests(stats: ServerStats) -> int:
    return sum(stats.latency(name).count for name in _DATA_REQUESTS)


def _request_s(stats: ServerStats) -> float:
    return sum(stats.latency(name).total_s for name in _DATA_REQUESTS)
