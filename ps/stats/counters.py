"""The counters of a server, from which its snapshot is made (ps.stats.server_stats).

Covers: counting from any thread; the process's resident memory.
Does not: explain the counters (ps.stats.server_stats).
Threads: every method may be called from any thread; one lock guards it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from ps.manifest.manifest import WorkerRank
from ps.stats.server_stats import NUM_STALENESS_BINS, ServerStats, WorkerStats
from rpc.histogram import LatencyHistogram
from rpc.process_stat import resident_bytes

_START_BITS = 48
"""Programs that read JSON's numbers as doubles keep them."""


class Counters:
    """The counters behind a server's snapshot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started_s = time.monotonic()
        self.start = secrets.randbits(_START_BITS)
        """See ServerStats."""
        self._bytes_in = self._bytes_out = 0
        self._calls = 0
        self._errors = 0
        self._in_service = 0
        self._waiting = 0
        self._barrier_wait_s = 0.0
        self._apply = LatencyHistogram()
        self._requests: dict[str, LatencyHistogram] = {}
        self._workers: dict[WorkerRank, dict[str, Any]] = {}
        self._staleness = [0] * NUM_STALENESS_BINS

    def begin_call(self) -> None:
        """A call is under way until `end_call`."""
        with self._lock:
            self._calls += 1
            self._in_service += 1

    def end_call(self, request: str, seconds: float, *, failed: bool) -> None:
        """The call is over.

        Args:
            request: its name; empty if it could not be decoded.
            seconds: since it began.
            failed: whether it was answered with an error.
        """
        with self._lock:
            self._in_service -= 1
            self._errors += failed
            if request:
                histogram = self._requests.get(request)
                if histogram is None:
                    histogram = self._requests[request] = LatencyHistogram()
                histogram.add(seconds)

    def add_received(self, num_bytes: int) -> None:
        """Payload has come."""
        with self._lock:
            self._bytes_in += num_bytes

    def add_sent(self, num_bytes: int) -> None:
        """Payload was sent."""
        with self._lock:
            self._bytes_out += num_bytes

    def applied(self, seconds: float, bytes_in: int = 0) -> None:
        """Count the time that update kernels ran for a gradient of this size.

        Args:
            seconds: how long the kernels ran.
            bytes_in: size of the gradient.
        """
        with self._lock:
            self._apply.add(seconds)
            self._bytes_in += bytes_in

    @contextlib.contextmanager
    def waiting(self, worker: WorkerRank) -> Iterator[None]:
        """Count the block's time as a wait of this worker's push for others."""
        started_s = time.monotonic()
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            waited_s = time.monotonic() - started_s
            with self._lock:
                self._waiting -= 1
                self._barrier_wait_s += waited_s
                self._count(worker, waited_s=waited_s)

    def count_push(self, worker: WorkerRank, rows: int, staleness: int) -> None:
        """A gradient has become part of the parameters.

        Args:
            worker: rank.
            rows: rows that the gradient is the mean of.
            staleness: updates by others since its parameters were pulled.
        """
        with self._lock:
            counts = self._workers.setdefault(worker, {})
            counts["pushes"] = counts.get("pushes", 0) + 1
            counts["rows"] = counts.get("rows", 0) + rows
            self._staleness[min(staleness.bit_length(), NUM_STALENESS_BINS - 1)] += 1

    def count(self, worker: WorkerRank, **amounts: int) -> None:
        """Add to counters of a worker, by their names in WorkerStats."""
        with self._lock:
            self._count(worker, **amounts)

    def snapshot(self, base: ServerStats) -> ServerStats:
        """Return `base` with everything that is counted here."""
        with self._lock:
            counted = msgspec.structs.replace(
                base,
                start=self.start,
                workers=tuple(
                    WorkerStats(worker, **counts)
                    for worker, counts in sorted(self._workers.items())
                ),
                staleness=tuple(self._staleness),
                calls=self._calls,
                errors=self._errors,
                in_service=self._in_service,
                waiting=self._waiting,
                barrier_wait_s=self._barrier_wait_s,
                bytes_in=self._bytes_in,
                bytes_out=self._bytes_out,
            )
            requests = sorted(self._requests.items())
        # Percentiles take a while; a histogram may be read while it is filled.
        return msgspec.structs.replace(
            counted,
            uptime_s=time.monotonic() - self._started_s,
            rss_bytes=resident_bytes(os.getpid()),
            apply=self._apply.snapshot(),
            requests={name: each.snapshot() for name, each in requests},
        )

    def _count(self, worker: WorkerRank, **amounts: float) -> None:
        counts = self._workers.setdefault(worker, {})
        for name, amount in amounts.items():
            counts[name] = counts.get(name, 0) + amount
