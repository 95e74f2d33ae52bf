"""The worker's end of all feeds: rows for the training code, orders of the driver, counts.

Covers: FeedChannel, what the trainer, the worker process and its Listener hold.
Does not: answer feeders (reception), order or count rows (feed_queue), check results (answers),
make batches (batches, data_feed).
Runs in: a worker process.
Threads: `handler` runs in one thread per feeder; orders come from the control thread; the consumer
calls from the training thread. One condition guards everything; every wait has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from feeding.columnar.chunk import Chunk
from feeding.columnar.schema import Schema
from feeding.config import FeedConfig
from feeding.encode.arrays import Columns
from feeding.errors import FeedClosed, FeedTimeout, TrainerFailed
from feeding.receiver.epoch_rows import Receipt
from feeding.receiver.feed_queue import FeedStats, Item, ValidationRows
from feeding.receiver.handler import MAX_TEXT_CHARS, FeedHandler
from feeding.receiver.state import FeedState
from rpc.auth.handshake import Identity
from rpc.server.listener import Call


class FeedChannel:
    """All feeds of one worker. Give `handler` and `on_disconnect` to the worker's Listener.

    Args:
        config: limits and deadlines.
        worker: how errors name this worker, e.g. "worker:1".
        first_epoch: where feeds begin; a worker that replaces a lost one joins at a later epoch.
    """

    def __init__(
        self, config: FeedConfig | None = None, *, worker: str = "worker", first_epoch: int = 0
    ) -> None:
        self._state = FeedState(config or FeedConfig(), worker, first_epoch)
        self._reception = FeedHandler(self._state)

    def handler(self, call: Call) -> None:
        """Answer one call of a feeder."""
        self._reception.handle(call)

    def on_disconnect(self, peer: Identity) -> None:
        """A feeder's connection ended."""
        self._reception.disconnected(peer)

    # Orders of the driver and of the worker process.

    def flush(
        self, feed: str, epoch: int, validation: tuple[str, int] | None = None, rounds: int = 0
    ) -> None:
        """End this epoch after everything accepted so far.

        Args:
            feed: which feed.
            epoch: its epoch.
            validation: feed and epoch of the rows that validate it. Those that are unread when the
                consumer asks for rows of a later epoch are dropped, and so are those still to come.
            rounds: in which lost rows of the epoch were fed again; all are over.
        """
        with self._state.changed:
            queue = self._state.queue(feed)
            queue.flush(epoch, rounds)
            if validation is not None:
                queue.validation = ValidationRows(epoch, *validation)
                validating = self._state.queue(validation[0])
                validating.validates = True
                validating.skip(validation[1] - 1)  # of calls that failed before they fed it
            self._state.changed.notify_all()

    def finish(self, feed: str) -> None:
        """No more rows of this feed will come, ever."""
        with self._state.changed:
            self._state.queue(feed).finish()
            self._state.changed.notify_all()

    def drain(self, feed: str | None = None) -> None:
        """Count unread and coming rows as dropped; the consumer has stopped (None: of all feeds).

        Raises:
            ResultCountError: rows of this one feed were handed out for inference and not answered.
        """
        state = self._state
        with state.changed:
            state.draining = state.draining or feed is None
            unanswered = None
            for name in list(state.queues) if feed is None else [feed]:
                state.queue(name).drain()
                unanswered = state.answers_of(name).end()
            state.changed.notify_all()
        if feed is not None and unanswered is not None:
            raise unanswered

    def fail(self, message: str, *, error_type: str = "", remote_traceback: str = "") -> None:
        """`main_fun` raised: every feeder that calls or waits gets this error."""
        traceback = remote_traceback[-MAX_TEXT_CHARS:]
        with self._state.changed:
            self._state.shut(TrainerFailed(message[:MAX_TEXT_CHARS], error_type, traceback))

    def close(self, reason: str = "the cluster is stopping") -> None:
        """Release every feeder and consumer with FeedClosed. Idempotent."""
        with self._state.changed:
            self._state.shut(FeedClosed(f"{self._state.worker}: {reason}"))

    # The consumer.

    def take(self, feed: str, timeout_s: float | None = None, *, session: int = 0) -> Item:
        """Return the next chunk, or the end of an epoch or of the feed. Waits.

        Args:
            feed: which feed.
            timeout_s: how long to wait (default: `starve_timeout_s`).
            session: only rows of this inference session, to fill up a batch of it.

        Raises:
            FeedTimeout: nothing came in time.
            FeedClosed: the cluster is stopping.
        """
        state = self._state
        with state.changed:
            queue = state.queue(feed)
            state.pass_over(queue)

            def look() -> Item | None:
                return queue.pop(session)

            item = look()
            if item is None:
                began = time.monotonic()
                limit_s = self._limit_s(timeout_s)
                try:
                    item = state.wait_for(look, limit_s)
                finally:
                    queue.starved_s += time.monotonic() - began
                if item is None:
                    raise FeedTimeout(
                        f"{state.worker}: feed {feed!r} brought no rows in {limit_s:g} s"
                    )
            state.changed.notify_all()
            return item

    def count_taken(self, chunk: Chunk, num_rows: int) -> None:
        """The consumer was given so many rows of a chunk."""
        feed = chunk.meta.feed
        with self._state.changed:
            self._state.queue(feed).count_taken(num_rows)
            if chunk.meta.mode == "inference":
                self._state.answers_of(feed).handed_out(chunk.meta.session, num_rows)

    def hand(self, feed: str, receipt: Receipt) -> None:
        """The trainer was given a batch of these rows."""
        with self._state.changed:
            self._state.queue(feed).hand(receipt)

    def settle(self, feed: str, keep: int = 0, *, ended: int | None = None) -> None:
        """The trainer has come back: the rows that it was handed are trained.

        Args:
            feed: which feed.
            keep: so many batches, the last ones, are not: their pushes are under way.
            ended: the epoch whose end it saw, if it did.
        """
        with self._state.changed:
            queue = self._state.queue(feed)
            is_news = queue.settle(keep)
            if ended is not None:
                queue.close_epoch(ended)
            if is_news or ended is not None:
                self._state.changed.notify_all()

    def begin_batch(self, feed: str) -> None:
        """The consumer asks for rows: inference rows given before must be answered.

        Raises:
            ResultCountError: they are not; their feeder gets the same error.
        """
        with self._state.changed:
            self._state.answers_of(feed).begin_batch()
            self._state.changed.notify_all()

    def answer(self, feed: str, results: Sequence[Any] | Columns) -> None:
        """Take results for the rows given last, one per row, in order.

        Raises:
            ResultCountError: more results than rows.
            RowError: a result that cannot travel.
        """
        with self._state.changed:
            try:
                self._state.answers_of(feed).add(results)
            finally:
                self._state.changed.notify_all()

    def schema(self, feed: str, timeout_s: float | None = None) -> Schema | None:
        """Return what rows look like once any feeder said so; None if an epoch ends before that."""

        def known() -> Schema | bool | None:
            queue = self._state.queue(feed)
            return queue.schema or queue.ends_without_rows or None

        limit_s = self._limit_s(timeout_s)
        with self._state.changed:
            found = self._state.wait_for(known, limit_s)
        if found is None:
            raise FeedTimeout(
                f"{self._state.worker}: feed {feed!r} has no schema after {limit_s:g} s"
            )
        return found if isinstance(found, Schema) else None

    # Watching.

    def wait_flushed(self, feed: str, epoch: int, timeout_s: float) -> bool:
        """Wait until all rows of this epoch are trained or dropped; False when the time is over."""
        with self._state.changed:
            queue = self._state.queue(feed)
            reached = self._state.wait_for(lambda: queue.is_over(epoch) or None, timeout_s)
            return reached is not None

    def validates(self, feed: str) -> bool:
        """Tell whether the driver feeds it as the validation of another feed."""
        with self._state.changed:
            return self._state.queue(feed).validates

    def stats(self, feed: str) -> FeedStats:
        """Return the counts of one feed."""
        with self._state.changed:
            return self._state.queue(feed).stats()

    def feeds(self) -> list[FeedStats]:
        """Return the counts of all feeds that were named so far."""
        with self._state.changed:
            return [queue.stats() for queue in self._state.queues.values()]

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._state.config.starve_timeout_s if timeout_s is None else timeout_s
