"""Feed channel: a worker's end of all feeds, for the trainer, the driver's orders and the listener.

Covers: FeedChannel, the thread-safe face of queues and results.
Does not: answer feeders (handler), order or count rows (feed_queue), check results (results), make
batches (batch_reader, data_feed).
Runs in: a worker process.
Threads: `handler` runs in one thread per feeder; orders come from the control thread; the consumer
calls from the training thread. One condition guards everything; every wait has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from feeding.columnar.chunk import Chunk
from feeding.config import FeedConfig
from feeding.encode.arrays import Columns
from feeding.errors import FeedClosed, FeedTimeout, TrainerFailed
from feeding.receiver.epoch_rows import Receipt
from feeding.receiver.feed_queue import FeedQueue, FeedStats, Item, ValidationRows
from feeding.receiver.handler import MAX_TEXT_CHARS, FeedHandler
from feeding.receiver.state import FeedState

_PAUSE_S = 0.5
"""A partition that brings no row for this long ends its batch of inference if others have rows.
Longer than Spark pauses between two batches of Arrow rows that it has: each size of a batch that
is new costs a model a trace."""


class FeedChannel:
    """All feeds of one worker. Pass `handler` and `on_disconnect` to the worker's Listener.

    Args:
        config: limits and deadlines.
        worker: name of this worker in errors, such as "worker:1".
        on_rows: called when rows were read or trained, with feed, epoch, the rows trained and
            dropped before the first one that is neither, and the position from which on none was
            read.
    """

    def __init__(
        self,
        config: FeedConfig | None = None,
        *,
        worker: str = "worker",
        on_rows: Callable[[str, int, int, int, int], None] | None = None,
    ) -> None:
        self._on_rows = on_rows
        self._state = FeedState(config or FeedConfig(), worker)
        handler = FeedHandler(self._state)
        self.handler = handler.handle
        self.on_disconnect = handler.disconnected

    # Orders of the driver and of the worker process.

    def begin_at(self, feed: str, epoch: int) -> None:
        """Begin a feed with a later epoch: this worker joins others that have read those before.

        Args:
            feed: name of the feed.
            epoch: epoch of that feed.
        """
        with self._state.changed:
            self._state.queue(feed).begin_at(epoch)
            self._state.changed.notify_all()

    def flush(
        self, feed: str, epoch: int, validation: tuple[str, int] | None = None, rounds: int = 0
    ) -> None:
        """End an epoch after all rows accepted so far.

        Args:
            feed: name of the feed.
            epoch: epoch of that feed.
            validation: feed and epoch of its validation rows. When the consumer reads a later
                epoch, unread validation rows are dropped, and later ones too; so are those of an
                epoch that it has left out.
            rounds: number of finished rounds in which lost rows of the epoch were fed again.
        """
        with self._state.changed:
            queue = self._state.queue(feed)
            queue.flush(epoch, rounds)
            if validation is not None:
                queue.validation = ValidationRows(epoch, *validation)
                validating = self._state.queue(validation[0])
                validating.validates = True
                # Rows of calls that failed before they fed this epoch.
                validating.skip(validation[1] - 1)
                self._state.leave_out_validation(queue)
            self._state.changed.notify_all()

    def feed_again(self, feed: str, epoch: int) -> None:
        """Note that lost rows of an epoch are fed again, to workers that have not ended it.

        Args:
            feed: name of the feed.
            epoch: epoch of that feed.
        """
        with self._state.changed:
            queue = self._state.queue(feed)
            queue.fed_again = max(queue.fed_again, epoch)

    def others_train(self, feed: str) -> bool:
        """Whether others train lost rows of the epoch that the consumer here has ended last.

        Args:
            feed: name of the feed.
        """
        with self._state.changed:
            queue = self._state.queue(feed)
            return 0 <= queue.fed_again == queue.epoch - 1

    def finish(self, feed: str) -> None:
        """End the feed: no more rows come."""
        with self._state.changed:
            self._state.queue(feed).finish()
            self._state.changed.notify_all()

    def drain(self, feed: str | None = None) -> None:
        """Drop unread and later rows, because the consumer has stopped.

        Args:
            feed: name of the feed; None: all feeds.

        Raises:
            ResultCountError: inference rows of this feed were read and not answered.
        """
        state = self._state
        with state.changed:
            state.draining = state.draining or feed is None
            unanswered = None
            for name in list(state.queues) if feed is None else [feed]:
                queue = state.queue(name)
                queue.drain()
                queue.is_terminated = queue.is_terminated or feed is not None
                state.leave_out_validation(queue)
                unanswered = state.answers_of(name).end()
            state.changed.notify_all()
        if feed is not None and unanswered is not None:
            raise unanswered

    def fail(self, message: str, *, error_type: str = "", remote_traceback: str = "") -> None:
        """Report that `main_fun` raised: every feeder gets a TrainerFailed.

        Args:
            message: message of the error.
            error_type: its class name.
            remote_traceback: its traceback.
        """
        traceback = remote_traceback[-MAX_TEXT_CHARS:]
        with self._state.changed:
            self._state.shut(TrainerFailed(message[:MAX_TEXT_CHARS], error_type, traceback))

    def close(self, reason: str = "the cluster is stopping") -> None:
        """Release every feeder and consumer with FeedClosed. Idempotent."""
        with self._state.changed:
            self._state.shut(FeedClosed(f"{self._state.worker}: {reason}"))

    # The consumer.

    def take(self, feed: str, *, session: int = 0) -> Item:
        """Wait for the next chunk, or the end of an epoch or of the feed.

        Args:
            feed: name of the feed.
            session: only rows of this inference session, to fill up a batch of it; 0: any rows.

        Raises:
            FeedTimeout: no row came within `starve_timeout_s`.
            FeedClosed: the cluster is stopping.
        """
        state = self._state
        with state.changed:
            queue = state.queue(feed)
            state.skip_validation(queue)

            def next_item() -> Item | None:
                return queue.pop(session)

            def other_rows() -> Item | None:
                return queue.pop(session) or queue.break_for(session)

            item = next_item()
            if item is None:
                began = time.monotonic()
                limit_s = state.config.starve_timeout_s
                try:
                    if session:
                        item = state.wait_for(next_item, min(limit_s, _PAUSE_S))
                        next_item = other_rows
                    left_s = limit_s - (time.monotonic() - began)
                    item = item or state.wait_for(next_item, max(0.0, left_s))
                finally:
                    queue.starved_s += time.monotonic() - began
                if item is None:
                    raise FeedTimeout(
                        f"{state.worker}: feed {feed!r} brought no rows in {limit_s:g} s"
                    )
            state.changed.notify_all()
            return item

    def begin_reading(self, feed: str, reader: int) -> int:
        """Note who reads a feed from now on; see FeedQueue.begin_reading.

        Args:
            feed: name of the feed.
            reader: number of the reader.
        """
        with self._state.changed:
            return self._state.queue(feed).begin_reading(reader)

    def count_taken(self, chunk: Chunk, start: int, stop: int) -> None:
        """Count rows of a chunk as read by the consumer.

        Args:
            chunk: the chunk that holds the rows.
            start: the first row that is read now.
            stop: the row after the last.
        """
        feed, num_rows = chunk.meta.feed, stop - start
        with self._state.changed:
            queue = self._state.queue(feed)
            queue.count_taken(num_rows)
            if chunk.meta.mode == "inference":
                self._state.answers_of(feed).handed_out(chunk.meta.session, num_rows)
            else:
                queue.rows(chunk.meta.epoch).taken_to = chunk.position + stop
                self._tell_rows(queue, chunk.meta.epoch)

    def refuse_inference(self, feed: str, num_rows: int) -> None:
        """Drop inference rows that were read by a consumer that trains; their feeder fails.

        Args:
            feed: name of the feed.
            num_rows: that were read since the last call.
        """
        with self._state.changed:
            self._state.queue(feed).drop_taken(num_rows)
            self._state.answers_of(feed).refuse_open()
            self._state.changed.notify_all()

    def hand(self, feed: str, receipt: Receipt, *, with_last: bool = False) -> None:
        """Note that the trainer has a batch.

        Args:
            feed: name of the feed.
            receipt: which rows the batch holds.
            with_last: it trains none of them: they count together with the batch before.
        """
        with self._state.changed:
            self._state.queue(feed).hand(receipt, with_last=with_last)

    def settle(self, feed: str, keep: int = 0, *, ended: int | None = None) -> None:
        """Count the rows that the trainer was given as trained.

        Args:
            feed: name of the feed.
            keep: number of last batches that are not trained yet: their pushes are in flight.
            ended: epoch whose end the trainer has seen, if any.
        """
        with self._state.changed:
            queue = self._state.queue(feed)
            may_complete = queue.settle(keep)
            self._tell_rows(queue, queue.trainer_epoch)
            if ended is not None:
                queue.close_epoch(ended)
            if may_complete or ended is not None:
                self._state.changed.notify_all()

    def _tell_rows(self, queue: FeedQueue, epoch: int) -> None:
        if self._on_rows is not None:
            rows = queue.rows(epoch)
            self._on_rows(queue.feed, epoch, *rows.done, rows.taken_to)

    def begin_batch(self, feed: str) -> None:
        """Begin a batch: the inference rows of the batch before must be answered.

        Raises:
            ResultCountError: they are not; their feeder gets the same error.
        """
        with self._state.changed:
            self._state.answers_of(feed).begin_batch()
            self._state.changed.notify_all()

    def answer(self, feed: str, results: Sequence[Any] | Columns) -> None:
        """Take results for the rows of the last batch, one per row, in order.

        Args:
            feed: name of the feed.
            results: one per row, or arrays [n, ...].

        Raises:
            ResultCountError: more results than rows.
            RowError: a result fits no column.
        """
        with self._state.changed:
            try:
                self._state.answers_of(feed).add(results)
            finally:
                self._state.changed.notify_all()

    # Watching.

    def wait_flushed(self, feed: str, epoch: int, timeout_s: float) -> bool:
        """Wait until all rows of an epoch are trained or dropped.

        Args:
            feed: name of the feed.
            epoch: epoch of that feed.
            timeout_s: longest wait.

        Returns:
            False if `timeout_s` passed first.
        """
        with self._state.changed:
            queue = self._state.queue(feed)
            reached = self._state.wait_for(lambda: queue.is_over(epoch) or None, timeout_s)
            return reached is not None

    def validates(self, feed: str) -> bool:
        """Return whether the feed's rows validate another feed."""
        with self._state.changed:
            return self._state.queue(feed).validates

    def is_validated(self, feed: str, epoch: int) -> bool:
        """Return whether the order that ended an epoch, or a later one, has named rows for it.

        Args:
            feed: name of the feed.
            epoch: its newest one that the consumer has ended.
        """
        with self._state.changed:
            validation = self._state.queue(feed).validation
            return validation is not None and validation.of_epoch >= epoch

    def train_rows(self) -> int:
        """Return how many rows the consumer has trained; inference and validation rows apart."""
        with self._state.changed:
            queues = self._state.queues.values()
            return sum(queue.train_rows for queue in queues if not queue.validates)

    def stats(self, feed: str) -> FeedStats:
        """Return the counts of one feed."""
        with self._state.changed:
            return self._state.queue(feed).stats()

    def feeds(self) -> list[FeedStats]:
        """Return the counts of all feeds so far."""
        with self._state.changed:
            return [queue.stats() for queue in self._state.queues.values()]
