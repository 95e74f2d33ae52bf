"""Feeds of one worker: main_fun reads them, and orders of the driver end their epochs.

Covers: the DataFeed of a feed that the cluster has; the orders about epochs and micro-batches; the
counts of rows for the driver.
Does not: receive or batch rows (feeding.receiver), record what is trained
(tfos.worker.trained.feeds).
Runs in: the worker's process.
Threads: orders come from `tfos-orders`, and those that wait are carried out on a short-lived thread
each, of which an epoch has one; the rest from any. `_lock` guards `_awaited`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from feeding.config import FeedConfig
from feeding.errors import FeedError
from feeding.receiver.channel import FeedChannel
from feeding.receiver.feed_queue import FeedStats
from tfos.control import messages
from tfos.errors import SettingsError
from tfos.node.child_link import aside
from tfos.node.spec import ChildSpec
from tfos.node.supervisor.row_marks import RowMarks
from tfos.worker.evaluator import check_trains
from tfos.worker.reports.progress_meter import ProgressMeter
from tfos.worker.trained.feeds import TrainedFeeds

if TYPE_CHECKING:
    from feeding.receiver.data_feed import DataFeed

FeedOrder: TypeAlias = (
    messages.Flush
    | messages.FeedAgain
    | messages.ComeTo
    | messages.FinishFeed
    | messages.TrainBatch
    | messages.LeaveBatch
    | messages.SaveBatches
)
_FLUSH_WAIT_S = 60.0


class WorkerFeeds:
    """The feeds of one worker.

    Attributes:
        channel: the received rows.
        trained: record of those that the servers' parameters contain.

    Args:
        spec: start document of this process.
        send: function that sends a report to the driver.
        meter: meter of epochs.
        stopped: event set once the node is stopped; no wait for an epoch outlasts it.
    """

    def __init__(
        self,
        spec: ChildSpec,
        send: Callable[[Any], object],
        meter: ProgressMeter,
        stopped: threading.Event,
    ) -> None:
        bundle = spec.bundle
        self._node, self._names = bundle.node, bundle.settings.feeds
        self._send, self._meter, self._stopped = send, meter, stopped
        self.channel = FeedChannel(
            FeedConfig(
                max_inflight_bytes=bundle.settings.config.max_inflight_bytes,
                # A stream may be quiet for any time. A stopping cluster ends the wait; where the
                # driver is gone the supervisor ends this process.
                starve_timeout_s=threading.TIMEOUT_MAX,
            ),
            worker=bundle.name,
            on_rows=RowMarks(spec.rows_fd, self._names).note if spec.rows_fd >= 0 else None,
        )
        self.trained = TrainedFeeds(send, stopped)
        self._lock = threading.Lock()
        self._awaited: set[messages.FeedEpoch] = set()
        """Epochs whose end a thread waits for."""

    def check(self, name: str) -> None:
        """Refuse a feed that will never be fed or ended: reading it would wait forever.

        Raises:
            SettingsError: the cluster has no such feed.
            NoServersError: this node is the evaluator.
        """
        check_trains(self._node, "fed rows")
        if not self._names:
            raise SettingsError(
                "no rows are fed to this cluster: it was made with InputMode.TENSORFLOW, so "
                "main_fun reads its own data. Pass input_mode=InputMode.SPARK to reserve() or run()"
            )
        if name not in self._names:
            raise SettingsError(
                f"{name!r} is not a feed of this cluster: {list(self._names)}. Name it in queues= "
                "of reserve() or run()"
            )

    def open(
        self,
        train_mode: bool,
        qname_in: str,
        qname_out: str,
        input_mapping: Mapping[str, str] | None,
        stop_asked: Callable[[], bool],
    ) -> DataFeed:
        """Return the rows of a feed as batches; see NodeContext.get_data_feed.

        Args:
            train_mode: False: a batch ends with its partition.
            qname_in: name of the feed.
            qname_out: for compatibility, without effect.
            input_mapping: column name to tensor name.
            stop_asked: whether somebody has asked for the end of the training.
        """
        from feeding.receiver.data_feed import DataFeed

        self.check(qname_in)
        feed = DataFeed(self.channel, train_mode, qname_in, qname_out, input_mapping)
        if train_mode:
            feed.stop_asked = stop_asked
        return feed

    def counts(self) -> tuple[messages.FeedSnapshot, ...]:
        """Return the counts of each feed's rows so far."""
        return tuple(_snapshot(stats) for stats in self.channel.feeds())

    def carry_out(self, order: FeedOrder) -> None:
        """Carry out an order about a feed."""
        match order:
            case messages.Flush():
                self._flush(order)
            case messages.FeedAgain(feed=feed, epoch=epoch):
                self.channel.feed_again(feed, epoch)
            case messages.ComeTo(feed=feed, epoch=epoch):
                self.trained.come_to(feed, epoch)
            case messages.FinishFeed(feed=feed):
                self.channel.finish(feed)
            case messages.TrainBatch():
                aside(self.trained.expect, order)
            case messages.LeaveBatch():
                # Not on another thread: the Flush after it must not find the batch.
                if (batch := self.trained.leave(order)) is not None:
                    aside(self.trained.release, batch)
            case messages.SaveBatches():
                aside(self.trained.save, order)

    def _flush(self, order: messages.Flush) -> None:
        """End an epoch after the rows that were accepted."""
        feed, epoch = order.feed, order.epoch
        if self._node.is_chief:  # which alone records it; before its rows end
            self.trained.count(feed, epoch, order.num_fed)
        self.channel.flush(feed, epoch, order.validation, order.rounds)
        with self._lock:
            if (feed, epoch) in self._awaited:
                return  # its lost rows were fed again: the end is the same
            self._awaited.add((feed, epoch))
        aside(self._await_flush, feed, epoch)

    def _await_flush(self, feed: str, epoch: int) -> None:
        try:
            self._tell_flushed(feed, epoch)
        finally:
            with self._lock:
                self._awaited.discard((feed, epoch))

    def _tell_flushed(self, feed: str, epoch: int) -> None:
        try:
            while not self.channel.wait_flushed(feed, epoch, _FLUSH_WAIT_S):
                if self._stopped.is_set():
                    return
            stats = _snapshot(self.channel.stats(feed))
        except FeedError:
            return  # the channel ended; the failure record carries the reason
        numbers = self._meter.read()
        self._meter.end_epoch()
        self._send(messages.FlushReached(feed, epoch, stats, numbers))
        self.trained.flushed(feed, epoch)


def _snapshot(stats: FeedStats) -> messages.FeedSnapshot:
    return messages.FeedSnapshot(
        feed=stats.feed,
        fed_rows=stats.fed_rows,
        taken_rows=stats.taken_rows,
        dropped_rows=stats.dropped_rows,
        unread_bytes=stats.unread_bytes,
        starved_s=stats.starved_s,
        trained_rows=stats.trained_rows,
        epochs=tuple(
            messages.EpochRowCounts(
                each.epoch,
                each.accepted_rows,
                each.trained_rows,
                dropped_rows=each.dropped_rows,
            )
            for each in stats.epochs
        ),
        is_drained=stats.is_drained,
        is_terminated=stats.is_terminated,
    )
