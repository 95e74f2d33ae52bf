"""Bounded calls: blocking calls with a timeout, each on a daemon thread that can be abandoned.

Some calls of native file system clients block as long as a server is frozen, and cannot be
interrupted. After its timeout the caller goes on, and the thread ends when its call does. The
number of threads is bounded.
Threads: any may start calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_THREADS = 64
"""Calls in flight in one process, of HDFS and of fsspec each, abandoned ones included."""


class CallTimeout(Exception):
    """A call did not end in time; its thread goes on, and its result is dropped."""


class BoundedCall(Generic[T]):
    """A call in flight on a thread of its own.

    Args:
        work: the blocking call; its result or exception is the call's.
        slots: one is released when the thread ends.
    """

    def __init__(self, work: Callable[[], T], slots: threading.Semaphore) -> None:
        self._work: Callable[[], T] | None = work
        self._slots = slots
        self._ended = threading.Lock()
        self._ended.acquire()
        self._value: T | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="file-call", daemon=True).start()

    def result(self, timeout_s: float) -> T:
        """Wait for the call, and return its value or raise its error.

        Raises:
            CallTimeout: it has not ended; `result` may be called again.
        """
        if not self._ended.acquire(timeout=timeout_s):
            raise CallTimeout(f"no answer within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # None only if T is

    def result_while_moving(self, timeout_s: float, place: Callable[[], int], *, seen: int) -> T:
        """Wait as `result`, for as long as the call makes progress.

        Args:
            timeout_s: longest wait in which `place` stands still.
            place: how far the call is.
            seen: the place at which it counts as standing still in the first wait.

        Raises:
            CallTimeout: it stood still.
        """
        while True:
            try:
                return self.result(timeout_s)
            except CallTimeout:
                if place() == seen:
                    raise
                seen = place()

    def _run(self) -> None:
        work, self._work = self._work, None
        frames = None
        try:
            self._value = work()  # type: ignore[misc]  # it is set before the thread starts
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            # The frames hold the call's objects. Freeing a broken native file may block for
            # seconds, so this thread frees them, not the caller's.
            frames = (error.__traceback__, error.__context__)
            error.__context__ = None
            self._error = _as_exception(error.with_traceback(None))
        self._ended.release()
        del work, frames
        self._slots.release()


def _as_exception(error: BaseException) -> Exception:
    """Return a panic of native code, which is a BaseException, as an Exception."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class BoundedCalls:
    """Starts calls, at most `max_threads` at once."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._max_threads = max_threads
        self.forget()

    def forget(self) -> None:
        """Drop the calls in flight: those of the parent have no threads in a forked child."""
        self._slots = threading.Semaphore(self._max_threads)

    def start(self, work: Callable[[], T], timeout_s: float) -> BoundedCall[T]:
        """Start a call; wait for a free thread if all are busy.

        Args:
            work: the call, without arguments.
            timeout_s: longest wait for a thread.

        Raises:
            CallTimeout: all threads stayed busy, as when a server is frozen.
        """
        if not self._slots.acquire(timeout=timeout_s):
            raise CallTimeout(f"{self._max_threads} earlier calls are still not answered")
        try:
            return BoundedCall(work, self._slots)
        except BaseException:  # no thread could be started
            self._slots.release()
            raise

    def run(self, work: Callable[[], T], timeout_s: float) -> T:
        """Start a call and wait for it; both together take at most `timeout_s`.

        Args:
            work: the blocking call.
            timeout_s: seconds until the caller goes on without it.
        """
        deadline_s = time.monotonic() + timeout_s
        pending = self.start(work, timeout_s)
        return pending.result(max(0.0, deadline_s - time.monotonic()))
