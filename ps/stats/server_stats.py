"""Statistics of a server: an immutable snapshot, its fields and how to read them.

Covers: the snapshot as a message, and values derived from its fields.
Does not: count (ps.stats.counters), decide anything, show it (ps.stats.prometheus, ps.cli.stats).
Pure; no threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rpc.field_texts import with_field_texts
from rpc.histogram import Latency

NUM_STALENESS_BINS = 12
SHOWN_REQUESTS = ("push", "pull", "push_rows", "lookup", "lookup_batch")
"""Requests whose latencies status() shows: those of training steps."""


@with_field_texts
class WorkerStats(msgspec.Struct, frozen=True):
    """Counters of one worker at this server, over all its generations."""

    worker: int
    pushes: int = 0
    """Gradients applied (async) or part of a completed barrier (sync); each counted once."""
    rows: int = 0
    """Rows of those gradients; compare workers to see which one trains on more data."""
    null_pushes: int = 0
    """Pushes without a gradient; many of them: the worker skips steps (non-finite gradients)."""
    table_pushes: int = 0
    """Pushes to tables, each counted once, whatever number of tables it touched."""
    repeated: int = 0
    """Requests that were resent after a broken connection; growing steadily: a bad network."""
    refused: int = 0
    """Pushes refused as non-finite, stale or out of sequence."""
    waited_s: float = 0.0
    """Sync, ssp: summed waits of its pushes for others; the worker that waits least is the one
    that the others wait for."""


@with_field_texts
class TableStats(msgspec.Struct, frozen=True):
    """One table at one server: its share of the rows, and counters since the start."""

    name: str
    rows: int = 0
    max_rows: int | None = None
    """This server's share of the table's limit; near it the next new ids are refused or evict."""
    memory_bytes: int = 0
    """Memory of the rows with their ids, versions and index."""
    given: int = 0
    """Ids in lookups and pushes as workers gave them; against looked_up + pushed: how many were
    equal to others of their batch, and travelled once."""
    looked_up: int = 0
    missed: int = 0
    """How many of those ids had no row; falls during training, unless new ids keep arriving."""
    pushed: int = 0
    added: int = 0
    """Rows created."""
    dropped: int = 0
    """Gradients of ids that were not admitted."""
    evicted: int = 0
    admitted_early: float = 0.0
    """Share of the ids without a push whose first push would create a row, as their counters are
    shared: the error of `Admission.min_count`, at most about 0.02."""
    staleness: tuple[int, ...] = ()
    """Histogram over pushes of rows that were looked up before: [0] none, [i] 2^(i-1) .. 2^i - 1
    updates of this table, by anybody, between the lookup that delivered the rows and the push that
    updates them. Mass far above the number of workers: rows are looked up too far ahead, or one
    worker is much slower than the others."""
    forgotten: int = 0
    """Lookups missing in `staleness`: their worker has had too many newer ones without a push."""

    @property
    def miss_ratio(self) -> float:
        """Share of looked-up ids without a row; 0 without any lookup."""
        return self.missed / max(1, self.looked_up)

    @property
    def unique_id_ratio(self) -> float:
        """Ids sent for each id that workers gave; small: batches repeat ids. 1 without any id."""
        return (self.looked_up + self.pushed) / self.given if self.given else 1.0

    @property
    def mean_staleness(self) -> float:
        """The mean of `staleness`; a bin counts as its middle."""
        return _mean(self.staleness)

    def staleness_quantile(self, share: float) -> float:
        """Return the staleness that this share of the pushes did not exceed, as a bin's middle."""
        return _quantile(self.staleness, share)


@with_field_texts
class OpenRendezvous(msgspec.Struct, frozen=True):
    """A rendezvous at which workers wait."""

    key: str
    waited_s: float
    """Seconds since the first of them came."""
    missing: tuple[int, ...]
    """The workers that it waits for."""

    def __str__(self) -> str:
        late = ", ".join(map(str, self.missing))
        return f"rendezvous {self.key!r} waits for worker {late} since {self.waited_s:.0f} s"


@with_field_texts
class ServerStats(msgspec.Struct, frozen=True):
    """One server's counters since it started."""

    server: int
    phase: str
    clock: int
    """Updates so far: pushes (async, ssp) or barriers (sync)."""
    uptime_s: float
    start: int = 0
    """Number of this start of the server: another start has counted from zero."""
    workers: tuple[WorkerStats, ...] = ()
    staleness: tuple[int, ...] = ()
    """Histogram over pushes: [0] none, [i] 2^(i-1) .. 2^i - 1 updates by others between the pull
    and the push. Mass far above the number of workers: one is much slower than the others."""
    missing: tuple[int, ...] = ()
    """The workers that the open barrier (sync) or a waiting push (ssp) waits for now."""
    open_rendezvous: tuple[OpenRendezvous, ...] = ()
    """Where workers wait now for others (ps:0 only). If one is open much longer than an epoch
    takes, or two lack different workers, look at the workers that are missing."""
    waiting_lookups: int = 0
    """Hybrid: batches whose lookup waits now for an older batch of its worker. Often above 0, with
    a long `lookup_batch` in `requests`: raise the bound, or push rows sooner."""
    bytes_in: int = 0
    """Payload bytes received with requests, without frames' headers."""
    bytes_out: int = 0
    """Payload bytes sent with replies."""
    calls: int = 0
    errors: int = 0
    """Calls that were answered with an error."""
    in_service: int = 0
    """Calls in progress, including this one; always many: the server is the bottleneck."""
    waiting: int = 0
    """How many of those are pushes that wait for other workers (sync, ssp)."""
    requests: dict[str, Latency] = {}
    """Latency by request: from its header's arrival to its answer's last byte, so a slow client or
    network counts too, and in a push the wait for others."""
    apply: Latency = Latency()
    """Time in update kernels, of one push (async, ssp, tables) or one barrier (sync)."""
    barrier_wait_s: float = 0.0
    """Sync, ssp: summed waits for other workers; large against apply_s: workers are uneven."""
    lost_updates: int = 0
    """Acknowledged updates that a restore has undone, of the clients that have pushed, joined or
    left since. Updates of clients that never come back are not counted."""
    restored_step: int = -1
    """The checkpoint that this server was filled from; -1: it was seeded."""
    resumed_step: int = -1
    """The checkpoint of an earlier run that a client let the servers restore; -1: the run is
    new, whatever this server was restarted from since."""
    lost_s: float = 0.0
    """Seconds from that checkpoint's snapshot to the restore, by the hosts' clocks."""
    connections: int = 0
    parameter_bytes: int = 0
    """Bytes of the values this server owns, without optimizer slots."""
    rss_bytes: int = 0
    tables: tuple[TableStats, ...] = ()

    @property
    def apply_s(self) -> float:
        """Thread time in update kernels; near uptime x cores: add servers."""
        return self.apply.total_s

    @property
    def mean_staleness(self) -> float:
        """The mean of `staleness`; a bin counts as its middle."""
        return _mean(self.staleness)

    def staleness_quantile(self, share: float) -> float:
        """Return the staleness that this share of the pushes did not exceed, as a bin's middle."""
        return _quantile(self.staleness, share)

    def baseline(self, earlier: ServerStats | None) -> ServerStats:
        """Return the counters to subtract for a difference to an earlier snapshot.

        Args:
            earlier: a snapshot of this server. None, a later one, or one from before a restart:
                zeros.
        """
        zeros = ServerStats(self.server, self.phase, 0, 0.0, self.start)
        if earlier is None or earlier.start != self.start:
            return zeros
        return earlier if earlier.uptime_s < self.uptime_s else zeros

    def latency(self, request: str) -> Latency:
        """Return the histogram of one request; empty if there was none."""
        return self.requests.get(request, Latency())


def _mean(bins: Sequence[int]) -> float:
    """The mean of a histogram of staleness; a bin counts as its middle."""
    middles = (_middle(place) for place in range(len(bins)))
    return sum(m * n for m, n in zip(middles, bins, strict=True)) / max(1, sum(bins))


def _quantile(bins: Sequence[int], share: float) -> float:
    """The middle of the first bin up to which this share is."""
    below = 0
    for place, count in enumerate(bins):
        below += count
        if count and below >= share * sum(bins):
            return _middle(place)
    return 0.0


def _middle(place: int) -> float:
    """The middle of a bin of a histogram of staleness."""
    return 1.5 * 2.0 ** (place - 1) - 0.5 if place else 0.0
