"""Calls that can be given up: each on a thread of its own, which nobody has to wait for.

Some calls of native file system clients block as long as a server is frozen, and nothing can
interrupt them. The thread of such a call is left alone: it is a daemon, keeps no caller waiting,
and ends when its call does. How many there may be is bounded.
Threads: any may start calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_THREADS = 64
"""Calls under way in one process, those included that were given up."""


class CallTimeout(Exception):
    """A call did not end in time; it goes on by itself, and its result is forgotten."""


class BoundedCall(Generic[T]):
    """A call under way on a thread of its own."""

    def __init__(self, work: Callable[[], T], slots: threading.Semaphore) -> None:
        self._work: Callable[[], T] | None = work
        self._slots = slots
        self._ended = threading.Lock()
        self._ended.acquire()
        self._value: T | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="file-call", daemon=True).start()

    def result(self, timeout_s: float) -> T:
        """Wait for the call, and return or raise what it did.

        Raises:
            CallTimeout: it has not ended; it may be waited for again.
        """
        if not self._ended.acquire(timeout=timeout_s):
            raise CallTimeout(f"no answer within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # None only if T is

    def _run(self) -> None:
        work, self._work = self._work, None
        frames = None
        try:
            self._value = work()  # type: ignore[misc]  # it is set before the thread starts
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            # The frames hold what the call worked with, and to drop a native file that is broken
            # may block for seconds: that is left to this thread.
            frames = (error.__traceback__, error.__context__)
            error.__context__ = None
            self._error = _as_exception(error.with_traceback(None))
        self._ended.release()
        del work, frames
        self._slots.release()


def _as_exception(error: BaseException) -> Exception:
    """Return a panic of native code, which is no Exception, as one."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class BoundedCalls:
    """Starts calls, so many at once and no more."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._max_threads = max_threads
        self._slots = threading.Semaphore(max_threads)

    def start(self, work: Callable[[], T], timeout_s: float) -> BoundedCall[T]:
        """Start a call, waiting for a free thread if there is none.

        Raises:
            CallTimeout: all threads were busy, as they are when each waits for a frozen server.
        """
        if not self._slots.acquire(timeout=timeout_s):
            raise CallTimeout(f"{self._max_threads} earlier calls are still not answered")
        try:
            return BoundedCall(work, self._slots)
        except BaseException:  # no thread could be started
            self._slots.release()
            raise

    def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """Start a call and wait for it; both together take at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        pending = self.start(work, timeout_s)
        return pending.result(max(0.0, deadline_s - time.monotonic()))
