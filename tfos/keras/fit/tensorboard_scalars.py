"""Scalars for TensorBoard: servers, the workers' rows, the chief's feeds and steps.

Covers: the scalars, one run per server (`ps-0`) so that TensorBoard overlays the servers, one for
the rest (`cluster`), the thread that collects and writes. All names begin with `tfos/`: TensorBoard
sorts by the first part, so the user's losses come first. A table's name comes last: TensorBoard
cuts the middle of a long name.
Does not: write what Keras writes (tfos.keras.fit.callbacks).
Threads: `tfos-scalars` queries the servers over its own connections and writes; it begins and ends
with `fit`. A failure is one warning, and training goes on. After a failed write, as on a full disk,
it writes no more.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import msgspec

from ps.stats.server_stats import SHOWN_REQUESTS, ServerStats, TableStats
from rpc.histogram import Latency
from tfos.keras.protocols import ShownContext
from tfos.keras.step.tables import IdCounts

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""Least seconds between two requests for the servers' counters."""
MOST_CORE_SHARE = 1 / 20
"""Largest share of a core that collecting and writing takes from the process that trains."""
LEAST_PAUSE_SHARE = 1 / 1000
"""Least seconds between two points of a long `fit`, as a share of its duration so far: TensorBoard
shows about 1,000 points of a curve."""
JOIN_S = 10.0
"""Seconds for the last request and its writing; a slower thread is abandoned."""

Logs = dict[str, Any] | None
Scalars = Iterator[tuple[str, float]]

_FEED_FIELDS = ("fed_rows", "trained_rows", "dropped_rows", "unread_bytes", "starved_s")


class ClusterScalars(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Writes the cluster's scalars while `fit` runs; for the chief.

    Args:
        ctx: context with a `cluster_log_dir`.
    """

    def __init__(self, ctx: ShownContext) -> None:
        super().__init__()
        self._ctx = ctx
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def on_train_begin(self, logs: Logs = None) -> None:  # noqa: ARG002 - Keras' signature
        """Start the thread."""
        self.on_train_end()  # a fit that raised did not call it
        self._ending = threading.Event()
        trainer = self.model.__dict__.get("_tfos_trainer")
        # A model with tables that trains alone has a trainer, and a server within this process.
        if trainer is not None and not trainer.is_local:
            arguments = (_Recorder(self._ctx, trainer), self._ending)
            self._thread = threading.Thread(
                target=_record, args=arguments, name="tfos-scalars", daemon=True
            )
            self._thread.start()

    def on_train_end(self, logs: Logs = None) -> None:  # noqa: ARG002
        """Write the last points and end the thread."""
        self._ending.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(JOIN_S)

    def __del__(self) -> None:
        self._ending.set()  # a fit that raised does not call on_train_end


def _record(recorder: _Recorder, ending: threading.Event) -> None:
    is_told = False
    start_s, pause_s = time.monotonic(), INTERVAL_S
    try:
        is_last = False
        while not is_last and not recorder.is_broken:
            is_last = ending.wait(pause_s)
            begun_s = time.thread_time()  # of the CPU: a wait for a server does not count
            try:
                recorder.write()
            except Exception as error:  # noqa: BLE001 - training never fails because of its display
                if not is_told:
                    reason = str(error).strip().partition("\n")[0]
                    logger.warning("no cluster scalars for TensorBoard: %s", reason)
                is_told = True
            taken_s, age_s = time.thread_time() - begun_s, time.monotonic() - start_s
            pause_s = max(INTERVAL_S, taken_s / MOST_CORE_SHARE, age_s * LEAST_PAUSE_SHARE)
    finally:
        recorder.close()


class _Recorder:
    """Collects and writes the scalars; used by one thread.

    Attributes:
        is_broken: whether a write has failed: TensorFlow would log every further one.
    """

    def __init__(self, ctx: ShownContext, trainer: Any) -> None:
        self.is_broken = False
        self._ctx = ctx
        self._trainer = trainer
        self._client: Any = None
        self._writers: dict[str, Any] = {}
        self._before: dict[int, ServerStats] = {}
        self._spent: dict[str, float] = {}
        self._counted: dict[str, IdCounts] = {}

    def write(self) -> None:
        """Write a point of every scalar, at the servers' clocks."""
        if not self._trainer.attached:
            return
        if self._client is None:
            self._client = self._ctx.new_ps_client()
        clock = self._trainer.clock
        servers = self._client.stats()
        for stats in servers:
            before = self._before.get(stats.server)
            self._write(f"ps-{stats.server}", server_scalars(stats, before), stats.clock)
            self._before[stats.server] = stats
        self._write("cluster", self._cluster_scalars(servers), clock)

    def close(self) -> None:
        """Close all writers and the client; ignore failures."""
        for opened in (*self._writers.values(), self._client):
            try:
                if opened is not None:
                    opened.close()
            except Exception:
                logger.debug("closing after the last scalars failed", exc_info=True)

    def _write(self, run: str, scalars: Scalars, step: int) -> None:
        import tensorflow as tf

        values = list(scalars)
        try:
            writer = self._writers.get(run)
            if writer is None:
                directory = os.path.join(self._ctx.cluster_log_dir or "", run)
                writer = self._writers[run] = tf.summary.create_file_writer(directory)
            with writer.as_default():
                for name, value in values:
                    tf.summary.scalar(f"tfos/{name}", value, step=step)
            writer.flush()
        except Exception:
            self.is_broken = True
            raise

    def _cluster_scalars(self, servers: Sequence[ServerStats]) -> Scalars:
        yield from worker_rows(servers)
        for feed in self._ctx.feed_channel.feeds():
            if not (feed.fed_rows or feed.trained_rows or feed.dropped_rows):
                continue  # a feed without rows, such as validation's: its charts would be empty
            for field in _FEED_FIELDS:
                yield f"feed/{feed.feed}/{field}", float(getattr(feed, field))
        trainer = self._trainer
        if trainer.skipped_steps:  # none is with on_nonfinite="error": a chart of zeros
            yield "chief/skipped_steps", float(trainer.skipped_steps)
        counts, self._counted = self._counted, trainer.id_counts
        for name, new in self._counted.items():
            yield from ids_per_batch(name, new, counts.get(name, IdCounts()))
        spent, before = trainer.times.spent(), self._spent
        self._spent = spent
        lately = {part: seconds - before.get(part, 0.0) for part, seconds in spent.items()}
        if not self._counted:
            lately.pop("lookup_s", None)  # no tables
        if total_s := sum(lately.values()):
            for part, seconds in lately.items():
                yield f"chief/share_of_{part.removesuffix('_s')}", seconds / total_s


def ids_per_batch(table: str, new: IdCounts, old: IdCounts) -> Scalars:
    """Yield (name, value) of the ids that the chief's batches had since an earlier count.

    Args:
        table: name of the table.
        new: the counts now.
        old: the earlier ones.
    """
    if batches := new.batches - old.batches:
        yield f"chief/ids_per_batch/{table}", (new.ids - old.ids) / batches
        yield f"chief/distinct_ids_per_batch/{table}", (new.distinct - old.distinct) / batches


def worker_rows(servers: Iterable[ServerStats]) -> Scalars:
    """Yield (name, value) of the rows that each worker, and all together, have trained.

    Args:
        servers: counters of the servers; the largest counts, as a push need not reach every server.
    """
    rows: dict[int, int] = {}
    for stats in servers:
        for each in stats.workers:
            rows[each.worker] = max(each.rows, rows.get(each.worker, 0))
    for worker in sorted(rows):
        yield f"rows/worker-{worker}", float(rows[worker])
    yield "rows/all", float(sum(rows.values()))


def server_scalars(stats: ServerStats, before: ServerStats | None = None) -> Scalars:
    """Yield (name, value) of one server.

    Args:
        stats: the server's current counters.
        before: earlier counters; rates and means cover the time since then. None, or counters from
            before a restart: they cover the time since the start.
    """
    old = stats.baseline(before)
    seconds = stats.uptime_s - old.uptime_s or 1.0
    for name in SHOWN_REQUESTS:
        latency = stats.latency(name)
        yield from _mean_ms(name, latency, old.latency(name))
        if latency.count:
            yield f"{name}/p50_ms_since_start", latency.p50_s * 1e3
            yield f"{name}/p99_ms_since_start", latency.p99_s * 1e3
    yield from _mean_ms("apply", stats.apply, old.apply)
    if stats.apply.count:
        yield "apply/cores", (stats.apply_s - old.apply_s) / seconds
    yield "updates/clock", float(stats.clock)
    if old.uptime_s or max(stats.restored_step, stats.resumed_step) < 0:
        # Otherwise the clock includes updates from before this start.
        yield "updates/per_s", (stats.clock - old.clock) / seconds
    yield "traffic/in_mb_per_s", (stats.bytes_in - old.bytes_in) / seconds / 1e6
    yield "traffic/out_mb_per_s", (stats.bytes_out - old.bytes_out) / seconds / 1e6
    yield "queue/requests_in_service", float(stats.in_service)
    yield "queue/pushes_waiting", float(stats.waiting)
    yield "memory/resident_mib", stats.rss_bytes / (1 << 20)
    yield from _staleness(stats, old)
    for worker in stats.workers:
        yield f"workers/pushes_of_{worker.worker}", float(worker.pushes)
        yield f"workers/waited_s_of_{worker.worker}", worker.waited_s
    tables = {table.name: table for table in old.tables}
    for table in stats.tables:
        yield from _table_scalars(table, tables.get(table.name, TableStats(table.name)))


def _mean_ms(name: str, new: Latency, old: Latency) -> Scalars:
    """Yield the mean of the requests since `old`, if there were any."""
    if count := new.count - old.count:
        yield f"{name}/mean_ms", (new.total_s - old.total_s) / count * 1e3


def _staleness(new: ServerStats, old: ServerStats) -> Scalars:
    lately = _since(new.staleness, old.staleness)
    if any(lately):
        pushes = msgspec.structs.replace(new, staleness=lately)
        yield "staleness/mean", pushes.mean_staleness
        yield "staleness/p99", pushes.staleness_quantile(0.99)


def _since(new: tuple[int, ...], old: tuple[int, ...]) -> tuple[int, ...]:
    """Return what a histogram has gained since an earlier one, which may be empty."""
    before = old or (0,) * len(new)
    return tuple(after - count for after, count in zip(new, before, strict=True))


def _table_scalars(new: TableStats, old: TableStats) -> Scalars:
    yield f"table/rows/{new.name}", float(new.rows)
    yield f"table/memory_mib/{new.name}", new.memory_bytes / (1 << 20)
    if new.dropped:  # without admission, limits and ttl these would be charts of zeros
        yield f"table/dropped_ids/{new.name}", float(new.dropped)
    if new.evicted:
        yield f"table/evicted_rows/{new.name}", float(new.evicted)
    lately = TableStats(
        new.name,
        given=new.given - old.given,
        looked_up=new.looked_up - old.looked_up,
        missed=new.missed - old.missed,
        pushed=new.pushed - old.pushed,
        staleness=_since(new.staleness, old.staleness),
    )
    if lately.looked_up:
        yield f"table/miss_ratio/{new.name}", lately.miss_ratio
    if lately.given:
        yield f"table/unique_id_ratio/{new.name}", lately.unique_id_ratio
    if any(lately.staleness):
        yield f"table/staleness_mean/{new.name}", lately.mean_staleness
        yield f"table/staleness_p99/{new.name}", lately.staleness_quantile(0.99)
