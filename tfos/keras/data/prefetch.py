"""Prefetching: a thread reads batches ahead while the model computes.

Covers: one thread per epoch, a bounded queue, its end by epoch end, feed end, error or `close`.
Does not: know Keras or TensorFlow (a daemon thread inside TensorFlow can crash an exiting process).
Threads: `_read` runs in the epoch's own thread; everything else in the consumer's.

The thread never reads past the end of its epoch, so rows of later epochs stay in the feed, where
another reader finds them, or the feed counts them as dropped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

POLL_S = 0.2
"""Interval at which a waiting side checks whether the other has ended; it delays no batch."""


class Failure:
    """The exception that ended the thread."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Prefetcher:
    """Calls `read` ahead of the consumer until it returns an end.

    Args:
        read: function that returns a batch, or an object for which `is_end` is true; may block.
        is_end: function that says whether an object is an end.
        depth: number of batches to read ahead.
        name: name of the thread.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        is_end: Callable[[Any], bool],
        *,
        depth: int,
        name: str,
    ) -> None:
        self._read_one = read
        self._is_end = is_end
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._closed = threading.Event()
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read an epoch; nothing if one is being read."""
        if self._thread is not None or self._closed.is_set():
            return
        self._thread = threading.Thread(target=self._read, name=self._name, daemon=True)
        self._thread.start()

    def take(self, on_wait: Callable[[], None] | None = None) -> Any:
        """Return the next batch, the end or a Failure; wait as long as the reader does.

        Args:
            on_wait: called again and again meanwhile.

        Raises:
            RuntimeError: the prefetcher was closed.
        """
        item = None
        while item is None:
            try:
                item = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                if self._closed.is_set():
                    raise RuntimeError("the dataset was closed; create another one") from None
                if on_wait is not None:
                    on_wait()
        if isinstance(item, Failure) or self._is_end(item):
            if self._thread is not None:
                self._thread.join()
            self._thread = None
        return item

    def take_ready(self) -> Any:
        """Return what `take` would if it was read by now, else None."""
        return None if self._queue.empty() else self.take()

    def restart(self) -> None:
        """Give up what was read; `read` may be changed until `start` begins anew."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._queue = None, queue.Queue(self._queue.maxsize)
        self._closed.clear()

    def close(self) -> None:
        """End the thread at its next batch; batches already read are lost."""
        self._closed.set()

    def _read(self) -> None:
        try:
            item = self._read_one()
            while not self._is_end(item) and self._put(item):
                item = self._read_one()
            if self._is_end(item):
                self._put(item)
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, whatever it is
            self._put(Failure(error))

    def _put(self, item: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return True
        return False
