"""Pipeline: one thread pushes, in order, while the next step is computed.

Covers: the thread, the wait for a result, the effect of an error on later pushes.
Does not: know tensors or Keras; a push is a function.
Threads: `submit`, `oldest`, `raise_failed` and `close` belong to the training thread; one daemon
thread sends. It starts with the first push after the construction or a `close`, and ends with
`close`.

After an error the thread sends no more: later pushes end with the same error, so a worker never
continues from a step whose predecessor is missing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from ps.errors import RequestTimeout

Result = TypeVar("Result")

GRACE_S = 5.0
"""Seconds for a push to raise its own error after its deadline."""


class PipelinedPush(Generic[Result]):
    """One push: waiting, in flight, or done with a result or an error."""

    def __init__(self, send: Callable[[], Result]) -> None:
        self._send = send
        self._done = threading.Event()
        self._result: Result | None = None
        self.error: BaseException | None = None

    def run(self, failed_before: BaseException | None) -> None:
        """Send it, unless one before it failed."""
        try:
            if failed_before is None:
                self._result = self._send()
            self.error = failed_before
        except BaseException as error:  # noqa: BLE001 - raised in the thread that trains
            self.error = error
        finally:
            del self._send  # and with it the gradient
            self._done.set()

    def wait(self, timeout_s: float) -> Result:
        """Return what `send` returned.

        Raises:
            RequestTimeout: it is still in flight.
            BaseException: the error of `send`, or of an earlier push.
        """
        if not self._done.wait(timeout_s):
            raise RequestTimeout(
                f"a push that was sent while the next step was computed has no answer after "
                f"{timeout_s:.0f} s, beyond its own deadline; restart this worker"
            )
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]  # None only if `send` returned it


class InFlight(Generic[Result]):
    """Pushes in flight, the oldest first.

    Args:
        timeout_s: returns the seconds that one push takes at most.
    """

    def __init__(self, timeout_s: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._pushes: deque[PipelinedPush[Result]] = deque()
        self._queue: SimpleQueue[PipelinedPush[Result] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._pushes)

    def submit(self, send: Callable[[], Result]) -> None:
        """Send after all earlier pushes."""
        if self._thread is None:
            self._queue = SimpleQueue()
            self._thread = threading.Thread(
                target=_send_all, args=(self._queue,), name="tfos-push", daemon=True
            )
            self._thread.start()
        push = PipelinedPush(send)
        self._pushes.append(push)
        self._queue.put(push)

    def oldest(self) -> Result:
        """Wait for the oldest push and return its result.

        Raises:
            RequestTimeout: see PipelinedPush.wait; no push is left then.
            Exception: the error of this push or an earlier one; no push is left then.
            KeyboardInterrupt: this push and later ones are still in flight.
        """
        try:
            result = self._pushes[0].wait(self._timeout_s() + GRACE_S)
        except Exception:
            self.close()
            raise
        self._pushes.popleft()
        return result

    def raise_failed(self) -> None:
        """Raise the error of a push that has failed by now, without waiting for any."""
        for push in self._pushes:
            if push.error is not None:
                self.close()
                raise push.error

    def close(self) -> None:
        """Drop all pushes; the thread ends after those that it has. Idempotent."""
        self._pushes.clear()
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None


def _send_all(queue: SimpleQueue[PipelinedPush[Result] | None]) -> None:
    failed: BaseException | None = None
    while (push := queue.get()) is not None:
        push.run(failed)
        failed = push.error
        del push  # its results must not live on in this frame
