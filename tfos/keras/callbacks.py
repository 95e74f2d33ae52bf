"""`ctx.callbacks()`: what a worker's `fit` shows to TensorBoard and to the driver.

Covers: Keras' TensorBoard callback in a directory per worker, the servers' and the feed's counters
as scalars beside it (chief), progress for the driver.
Does not: make workers agree (epochs does, without being asked).
Threads: the thread that runs `fit`. A failing callback here never stops the training.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfos.keras.worker import WorkerContext

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
"""Between two reports of progress; the supervisor sends them on with its heartbeat (2 s)."""
SCALARS_INTERVAL_S = 5.0
"""Between two requests for the servers' counters."""

Logs = dict[str, Any] | None


def callbacks(ctx: WorkerContext) -> list[Any]:
    """Return the callbacks for this worker's `fit`, in a list to which the user's own are added.

    Args:
        ctx: the node's context; without `log_dir` there is no TensorBoard.
    """
    found: list[Any] = [Progress(ctx)]
    if ctx.log_dir:
        directory = os.path.join(ctx.log_dir, f"worker-{ctx.worker_rank}")
        found.append(EventFiles(log_dir=directory))
        if ctx.is_chief:
            found.append(ClusterScalars(ctx, os.path.join(ctx.log_dir, "cluster")))
    return found


class EventFiles(keras.callbacks.TensorBoard):  # type: ignore[misc]  # Keras has no types
    """Keras' TensorBoard callback; where it cannot write, training goes on without it."""

    _is_broken = False


def _tolerant(name: str) -> Callable[..., Any]:
    original = getattr(keras.callbacks.TensorBoard, name)

    @functools.wraps(original)
    def hook(self: EventFiles, *args: Any, **kwargs: Any) -> Any:
        if self._is_broken:
            return None
        try:
            return original(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - training never fails because of its display
            self._is_broken = True
            reason = str(error).strip().partition("\n")[0]
            logger.warning("no event files in %s any more: %s", self.log_dir, reason)
            return None

    return hook


for _name in vars(keras.callbacks.TensorBoard):
    if _name == "set_model" or _name.startswith("on_"):
        setattr(EventFiles, _name, _tolerant(_name))


class Progress(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Reports steps, rows and loss to the driver."""

    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__()
        self._ctx = ctx
        self._steps = 0
        self._reported_s = -math.inf

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:  # noqa: ARG002 - Keras'
        """Report, but not more often than the driver hears of it."""
        self._steps += 1
        now_s = time.monotonic()
        if now_s - self._reported_s >= REPORT_INTERVAL_S:
            self._reported_s = now_s
            self._report(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Report the epoch's own loss."""
        self._report(logs)

    def _report(self, logs: Logs) -> None:
        exchange = self.model.__dict__.get("_tfos_exchange")
        steps, rows = (exchange.steps, exchange.rows) if exchange else (self._steps, 0)
        times = exchange.times.spent() if exchange else {}
        loss = (logs or {}).get("loss")
        self._ctx.report_progress(steps, rows, None if loss is None else float(loss), **times)


class ClusterScalars(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Writes the servers' and the feed's counters as scalars, by update of the servers."""

    def __init__(self, ctx: WorkerContext, directory: str) -> None:
        super().__init__()
        self._ctx = ctx
        self._directory = directory
        self._writer: Any = None
        self._written_s = -math.inf

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:  # noqa: ARG002 - Keras'
        """Write every few seconds."""
        if time.monotonic() - self._written_s >= SCALARS_INTERVAL_S:
            self._write()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Write, so that short trainings show something too."""
        self._write()

    def on_train_end(self, logs: Logs = None) -> None:  # noqa: ARG002
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self) -> None:
        import tensorflow as tf

        self._written_s = time.monotonic()
        exchange = self.model.__dict__.get("_tfos_exchange")
        if exchange is None or not exchange.attached:
            return
        try:
            if self._writer is None:
                self._writer = tf.summary.create_file_writer(self._directory)
            with self._writer.as_default():
                for name, value in self._scalars(exchange):
                    tf.summary.scalar(name, value, step=exchange.clock)
            self._writer.flush()
        except Exception:  # training never fails because of its display
            logger.warning("no cluster scalars this time", exc_info=True)

    def _scalars(self, exchange: Any) -> Iterator[tuple[str, float]]:
        for stats in exchange.client.stats():
            yield from server_scalars(stats)
        if self._ctx.feed_channel is not None:
            for feed in self._ctx.feed_channel.feeds():
                for field in (
                    "fed_rows",
                    "taken_rows",
                    "dropped_rows",
                    "unread_bytes",
                    "starved_s",
                ):
                    yield f"feed/{feed.feed}/{field}", float(getattr(feed, field))
        yield "worker/skipped_steps", float(exchange.skipped_steps)


def server_scalars(stats: Any) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of one server's `ps.stats.ServerStats`."""
    prefix = f"ps/{stats.server}"
    for field in ("clock", "bytes_in", "bytes_out", "apply_s", "barrier_wait_s", "rss_bytes"):
        yield f"{prefix}/{field}", float(getattr(stats, field))
    yield f"{prefix}/mean_staleness", mean_staleness(stats.staleness)
    for worker in stats.workers:
        yield f"{prefix}/worker-{worker.worker}/pushes", float(worker.pushes)
        yield f"{prefix}/worker-{worker.worker}/rows", float(worker.rows)


def mean_staleness(histogram: tuple[int, ...]) -> float:
    """Return the mean of a histogram with bins 0, 1, 2-3, 4-7, ...; a bin counts as its middle."""
    total = sum(histogram)
    if not total:
        return 0.0
    middles = (0.0, *(1.5 * 2.0 ** (place - 1) - 0.5 for place in range(1, len(histogram))))
    return sum(m * n for m, n in zip(middles, histogram, strict=True)) / total
