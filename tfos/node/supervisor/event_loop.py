"""Event loop of the supervisor: descriptors, named timers, calls from other threads.

Covers: waiting for all three at once, in one thread.
Does not: know the meaning of events. (asyncio has its own child watcher and signal handling.)
Threads: everything belongs to the thread in `run`, except `post`, which any thread or signal
handler may call.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable

React = Callable[[], None]


class EventLoop:
    """Calls back when a descriptor is readable, a timer is due or another thread posts a call."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: dict[str, tuple[float, React]] = {}
        self._posted: queue.SimpleQueue[React] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopped = threading.Event()
        self.watch(self._wake_read, self._run_posted)

    def run(self) -> None:
        """React to events until `stop`; events that are ready then are not served."""
        while not self._stopped.is_set():
            for key, _ in self._selector.select(self._next_timer_s()):
                # An earlier reaction of this round may have stopped the loop or the watching.
                if not self._stopped.is_set() and key.fd in self._selector.get_map():
                    key.data()
            self._run_timers()

    def stop(self) -> None:
        """Make `run` return after the reaction that is running."""
        self._stopped.set()

    def watch(self, fd: int, react: React) -> None:
        """Call `react` whenever `fd` is readable or its other end is closed.

        Args:
            fd: a descriptor that is not watched yet.
            react: called without arguments.
        """
        self._selector.register(fd, selectors.EVENT_READ, react)

    def unwatch(self, fd: int) -> None:
        """Stop watching; without effect if the descriptor is not watched."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def set_timer(self, name: str, delay_s: float, react: React) -> None:
        """Call `react` once after `delay_s`; replaces the timer of this name.

        Args:
            name: the timer's name.
            delay_s: seconds from now.
            react: called without arguments.
        """
        self._timers[name] = (time.monotonic() + delay_s, react)

    def advance_timer(self, name: str, delay_s: float, react: React) -> None:
        """Set a timer unless one of this name is due earlier.

        Args:
            name: the timer's name.
            delay_s: seconds from now.
            react: called without arguments.
        """
        timer = self._timers.get(name)
        if timer is None or timer[0] > time.monotonic() + delay_s:
            self.set_timer(name, delay_s, react)

    def cancel_timer(self, name: str) -> None:
        """Cancel a timer; without effect if there is none."""
        self._timers.pop(name, None)

    def post(self, react: React) -> None:
        """Have the loop's thread call `react`."""
        self._posted.put(react)
        with contextlib.suppress(OSError):  # a full pipe wakes the loop as well
            os.write(self._wake_write, b".")

    def _run_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while not self._posted.empty():
            self._posted.get_nowait()()

    def _next_timer_s(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(due_s for due_s, _ in self._timers.values()) - time.monotonic())

    def _run_timers(self) -> None:
        now_s = time.monotonic()
        while self._timers and not self._stopped.is_set():
            # Looked up each time: a reaction may move or cancel later timers.
            name = min(self._timers, key=lambda each: self._timers[each][0])
            due_s, react = self._timers[name]
            if due_s > now_s:
                return
            del self._timers[name]
            react()
