"""Interruptible calls: a call runs on its own thread, so Ctrl-C interrupts only the waiting user.

Covers: a function on a separate thread, waiting for it, abandoning it on Ctrl-C.
Does not: stop an abandoned function; the caller passes in how.
Runs in: the driver.
Threads: one per call.

A signal handler runs between any two bytecodes of the main thread. pyspark's makes a py4j call:
inside another one it reads the wrong answer, and py4j's repair may hide the KeyboardInterrupt
(pyspark 4.3). And an interrupt inside of threading.Condition, or between a decision about a node
and its order, would leave a lock taken or an order unsent. A plain lock has no such moments.
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from tfos.spark.jobs import inheriting

Result = TypeVar("Result")

_LOOK_S = 0.5
"""Interval of checks for a signal that another thread of the process received."""
_UNWIND_S = 5.0
"""A call that was cancelled has this long to end before its caller goes on without it."""


class CancelToken:
    """Shows a running call that its result is no longer awaited.

    A plain attribute: it is set where a signal handler may have interrupted the main thread, which
    may hold any lock.
    """

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        """Cancel for good."""
        self.is_set = True


class InterruptibleCall(Generic[Result]):
    """One call on its own daemon thread.

    Args:
        name: the thread's name.
        function: what it calls; must end soon once `cancel` is set.
        cancel: set when the wait for the result was interrupted; None: one of its own.
        spark: SparkContext in which it runs jobs with the local properties of the thread that waits
                (such as the scheduler pool); None: it runs none.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[], Result],
        *,
        cancel: CancelToken | None = None,
        spark: Any = None,
    ) -> None:
        self._name = name
        self._function = function
        self._cancel = cancel or CancelToken()
        self._spark = spark
        self._running = threading.Lock()
        self._is_started = self._is_ended = False
        self._result: Result | None = None
        self._error: BaseException | None = None

    def result(self, on_interrupt: Callable[[], object] | None = None) -> Result:
        """Run the function and return its result, or raise what it raised.

        Args:
            on_interrupt: called when the wait is interrupted; must make the function end, and the
                wait continues until then. None: the call is abandoned at once. A second interrupt
                ends the wait.
        """
        try:
            with _unhidden_interrupt():
                self.start()
            self._wait()
        except BaseException:
            self._cancel.set()
            if on_interrupt is not None:
                on_interrupt()
                if self._is_started and not self._is_ended:
                    self._running.acquire(timeout=_UNWIND_S)
            self._result = None
            raise
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame
        result, self._result = self._result, None
        return result  # type: ignore[return-value]  # it ended without an error

    def start(self) -> None:
        """Start the function without waiting for it; `result` starts it as well."""
        if self._spark is not None:
            self._function = inheriting(self._spark, self._function)
        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(self._run,), name=self._name, daemon=True)
        self._running.acquire()
        self._is_started = True
        # Thread.start() waits on a Condition: an interrupt there may lock the new thread for ever.
        _thread.start_new_thread(self._launch, (thread,))

    def _launch(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except BaseException as error:  # noqa: BLE001  # raised to the thread that waits
            self._error = error
            self._end()

    def _wait(self) -> None:
        while not self._running.acquire(timeout=_LOOK_S):
            pass

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001  # raised to the thread that waits
            self._error = error
        finally:
            self._end()

    def _end(self) -> None:
        if self._cancel.is_set:
            self._result = None  # closed with the last reference
        self._is_ended = True
        self._running.release()


@contextlib.contextmanager
def _unhidden_interrupt() -> Iterator[None]:
    """Raise the KeyboardInterrupt that the block's own clean-up replaced by another error."""
    handled = sys.exception()  # by the user: no interrupt of this block
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and cause is not handled:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            cause = cause.__context__
        raise
