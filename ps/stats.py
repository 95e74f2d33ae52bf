"""What a server counts: a mutable counter set inside, immutable snapshots outside.

Covers: the snapshot's fields and how to read them, the thread-safe counters.
Does not: decide anything by them.
Threads: every method of `Counters` may be called from any thread; one lock guards it.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec

from ps.params import WorkerRank

NUM_STALENESS_BINS = 12


class WorkerStats(msgspec.Struct, frozen=True):
    """What one worker has done at this server, all its incarnations together."""

    worker: int
    pushes: int = 0
    """Gradients applied (async) or part of a completed barrier (sync); each counted once."""
    rows: int = 0
    """Rows behind those gradients; compare over workers to see who trains on more data."""
    null_pushes: int = 0
    """Pushes without a gradient; many of them: the worker skips steps (non-finite gradients)."""
    table_pushes: int = 0
    """Pushes to tables, each counted once, whatever number of tables it touched."""
    repeated: int = 0
    """Requests that came again after a cut connection; growing steadily: a bad network."""
    refused: int = 0
    """Pushes refused as non-finite, stale or out of sequence."""


class TableStats(msgspec.Struct, frozen=True):
    """One table at one server: its share of the rows, and what was done with them since start."""

    name: str
    rows: int = 0
    max_rows: int | None = None
    """This server's share of the table's limit; near it the next new ids are refused or evict."""
    memory_bytes: int = 0
    """Of the rows with their ids, versions and index."""
    given: int = 0
    """Ids in lookups and pushes as workers gave them; against looked_up + pushed: how many were
    equal to others of their batch, and travelled once."""
    looked_up: int = 0
    missed: int = 0
    """Of those: ids without a row; falls as training goes on, unless new ids keep coming."""
    pushed: int = 0
    added: int = 0
    """Rows made."""
    dropped: int = 0
    """Gradients of ids that were not admitted."""
    evicted: int = 0


class ServerStats(msgspec.Struct, frozen=True):
    """One server's counters since it started."""

    server: int
    phase: str
    clock: int
    """Updates so far: pushes (async, ssp) or barriers (sync)."""
    uptime_s: float
    workers: tuple[WorkerStats, ...] = ()
    staleness: tuple[int, ...] = ()
    """Histogram over pushes: [0] none, [i] 2^(i-1) .. 2^i - 1 updates by others between the pull
    and the push. Mass far above the number of workers: one is much slower than the others."""
    missing: tuple[int, ...] = ()
    """The workers that the open barrier (sync) or a waiting push (ssp) waits for now."""
    bytes_in: int = 0
    """Payload bytes received with requests, without frames' headers."""
    bytes_out: int = 0
    """Payload bytes sent with replies."""
    calls: int = 0
    errors: int = 0
    """Calls that were answered with an error."""
    apply_s: float = 0.0
    """Thread time in update kernels; near uptime x cores: add servers."""
    barrier_wait_s: float = 0.0
    """Sync, ssp: summed waits for other workers; large against apply_s: workers are uneven."""
    lost_requests: int = 0
    """Acknowledged requests that a restore has undone, of the workers that are back so far."""
    restored_step: int = -1
    """The checkpoint that this server was filled from; -1: it was seeded."""
    undone_s: float = 0.0
    """Seconds from that checkpoint's cut to the restore, by the hosts' clocks."""
    connections: int = 0
    parameter_bytes: int = 0
    """Bytes of the values this server owns, without optimizer slots."""
    rss_bytes: int = 0
    tables: tuple[TableStats, ...] = ()


class Counters:
    """The counters behind a server's snapshot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started_s = time.monotonic()
        self._totals = dict.fromkeys(("bytes_in", "bytes_out", "calls", "errors"), 0)
        self._times_s = dict.fromkeys(("apply_s", "barrier_wait_s"), 0.0)
        self._workers: dict[WorkerRank, dict[str, int]] = {}
        self._staleness = [0] * NUM_STALENESS_BINS

    def add(self, **amounts: int) -> None:
        """Add to `bytes_in`, `bytes_out`, `calls` or `errors`."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount

    def add_time(self, name: str, seconds: float) -> None:
        """Add to `apply_s` or `barrier_wait_s`."""
        with self._lock:
            self._times_s[name] += seconds

    def count_push(self, worker: WorkerRank, rows: int, staleness: int) -> None:
        """A gradient has become part of the parameters."""
        with self._lock:
            self._count(worker, pushes=1, rows=rows)
            self._staleness[min(staleness.bit_length(), NUM_STALENESS_BINS - 1)] += 1

    def count(self, worker: WorkerRank, **amounts: int) -> None:
        """Add to `null_pushes`, `repeated` or `refused` of a worker."""
        with self._lock:
            self._count(worker, **amounts)

    def snapshot(self, base: ServerStats) -> ServerStats:
        """Return `base` with everything that is counted here."""
        with self._lock:
            workers = tuple(
                WorkerStats(worker, **counts) for worker, counts in sorted(self._workers.items())
            )
            return msgspec.structs.replace(
                base,
                workers=workers,
                staleness=tuple(self._staleness),
                uptime_s=time.monotonic() - self._started_s,
                rss_bytes=resident_bytes(),
                **self._totals,
                **self._times_s,
            )

    def _count(self, worker: WorkerRank, **amounts: int) -> None:
        counts = self._workers.setdefault(worker, {})
        for name, amount in amounts.items():
            counts[name] = counts.get(name, 0) + amount


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where /proc is not available."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
