"""Shared state of a worker's feeds: queues, inference results, and the condition that guards them.

Covers: FeedState, waiting with a deadline.
Does not: talk to feeders (handler) or to the trainer (channel).
Threads: every method is called with `changed` held.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from feeding.config import FeedConfig
from feeding.errors import FeedError
from feeding.receiver.feed_queue import FeedQueue
from feeding.receiver.results import InferenceResults

MAX_FEEDS = 64
_POLL_S = 0.1
"""How often a wait checks its other conditions, such as the feeder's connection."""

T = TypeVar("T")


class FeedState:
    """Feeds by name; once `end` is set, every caller gets that error.

    Args:
        config: limits of the feeds, in bytes and seconds.
        worker: name of this worker, for messages.
    """

    def __init__(self, config: FeedConfig, worker: str) -> None:
        self.config = config
        self.worker = worker
        self.changed = threading.Condition()
        self.draining = False
        self.end: FeedError | None = None
        self.queues: dict[str, FeedQueue] = {}
        self.answers: dict[str, InferenceResults] = {}

    def queue(self, feed: str) -> FeedQueue:
        """Return the queue of this feed, made on first use.

        Raises:
            FeedError: there are MAX_FEEDS already.
        """
        queue = self.queues.get(feed)
        if queue is None:
            if len(self.queues) >= MAX_FEEDS:
                raise FeedError(
                    f"{self.worker} has {MAX_FEEDS} feeds, the most that a worker can have, so "
                    f"{feed!r} is refused; name fewer in queues="
                )
            queue = self.queues[feed] = FeedQueue(feed)
            queue.draining = self.draining
            self.answers[feed] = InferenceResults(feed, self.worker, self.config)
        return queue

    def answers_of(self, feed: str) -> InferenceResults:
        """Return the results of this feed."""
        self.queue(feed)
        return self.answers[feed]

    def skip_validation(self, queue: FeedQueue) -> None:
        """Skip the validation of earlier epochs, because the consumer reads the next epoch.

        So a consumer that does not validate, or not every epoch, or with fewer rows, never blocks
        the feeders of those rows, and with them the next epoch.
        """
        validation = queue.validation
        if validation is not None and queue.epoch > validation.of_epoch:
            self.queue(validation.feed).skip(validation.epoch)
            self.changed.notify_all()

    def leave_out_validation(self, queue: FeedQueue) -> None:
        """Skip the validation of an epoch that the consumer has left out: nobody reads it."""
        validation = queue.validation
        if validation is not None and queue.is_left_out(validation.of_epoch):
            self.queue(validation.feed).skip(validation.epoch)

    def check_open(self) -> None:
        """Raise the error that ended the channel, if any; a copy, because threads share it."""
        if self.end is not None:
            raise copy.copy(self.end)

    def shut(self, error: FeedError) -> None:
        """End the channel; the first error stays."""
        self.end = self.end or error
        for answers in self.answers.values():
            answers.fail_all(self.end)
        self.changed.notify_all()

    def wait_for(
        self,
        poll: Callable[[], T],
        timeout_s: float,
        give_up: Callable[[], bool] | None = None,
    ) -> T | None:
        """Wait, with the lock released, until `poll` returns a value.

        Args:
            poll: returns None to wait on; called with the lock held.
            timeout_s: longest wait.
            give_up: ends the wait early when it returns True.

        Returns:
            The value of `poll`; None after `timeout_s` or `give_up`.

        Raises:
            FeedError: the error that ended the channel meanwhile.
        """
        deadline_s = time.monotonic() + timeout_s
        while (found := poll()) is None:
            self.check_open()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or (give_up is not None and give_up()):
                return None
            self.changed.wait(min(left_s, _POLL_S))
        return found
