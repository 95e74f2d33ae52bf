"""Spin-then-poll wait on one descriptor: spins briefly where that pays, else sleeps in poll.

Covers: when a wait spins, when spinning is given up because it does not pay.
Does not: several descriptors (stream.wait_streams), readiness (stream).
Threads: one at a time.

Waking up on an idle core takes 30-40 us, twice per call, which is as long as a small call itself.
So a wait that follows short waits spins first. A process that shares the core, or the interpreter
with other threads, is faster asleep: each poll may give up the core or the GIL for milliseconds.
One slow poll shows this, so it ends the spin, and the next spin comes after twice as many short
waits.
Source: spin-then-block with a competitive bound (Karlin et al. 1991).
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable

SHORT_WAIT_S = 150e-6
"""A wait up to this is short; a spin takes at most this."""
SLOW_POLL_S = 30e-6
"""A poll takes 1-2 us; a longer one had to share its core or the GIL."""
MAX_SHORT_WAITS = 1024
"""Most short waits before spinning is tried again."""

_MAX_POLL_S = 3600.0

Look = Callable[[], bool]


class SpinThenPoll:
    """Waits for events of one descriptor."""

    def __init__(self) -> None:
        self.short_waits_before_spin = 1
        """Consecutive short waits before the next wait spins; doubles when a spin does not pay."""
        self._num_short = 0
        self._poll = select.poll()
        self._events = 0

    def wait(
        self,
        descriptor: int,
        events: int,
        timeout_s: float,
        *,
        looks: Look | None = None,
        announces: Look | None = None,
    ) -> bool:
        """Wait for an event of a descriptor, or for what needs none while this side is awake.

        Args:
            descriptor: the same in every call.
            events: poll events to wait for.
            timeout_s: longest wait.
            looks: returns, without a system call, whether the wait is over.
            announces: called before this side sleeps, from then on to be woken by an event; returns
                what `looks` does.

        Returns:
            False if `timeout_s` passed first.
        """
        if events != self._events:
            self._poll.register(descriptor, events)
            self._events = events
        if (
            self._num_short >= self.short_waits_before_spin
            and timeout_s > SHORT_WAIT_S
            and self._spin(looks)
        ):
            return True
        begun = time.monotonic()
        if announces is not None and announces():
            self._num_short += 1
            return True
        ready = bool(self._poll.poll(math.ceil(min(max(timeout_s, 0.0), _MAX_POLL_S) * 1000.0)))
        is_short = ready and time.monotonic() - begun < SHORT_WAIT_S
        self._num_short = self._num_short + 1 if is_short else 0
        return ready

    def _spin(self, looks: Look | None) -> bool:
        """Poll without sleeping, and yield the core between polls; return whether it is ready."""
        poll, now, yield_core = self._poll.poll, time.monotonic, os.sched_yield
        ready = False
        begun = polled = now()
        while not ready and polled - begun < SHORT_WAIT_S:
            ready = (looks is not None and looks()) or bool(poll(0))
            if not ready:
                yield_core()
            before, polled = polled, now()
            # The core or the GIL is shared: sleeping is faster here.
            if polled - before > SLOW_POLL_S:
                break
        else:
            if ready:
                self.short_waits_before_spin = max(1, self.short_waits_before_spin - 1)
                return True
        self.short_waits_before_spin = min(MAX_SHORT_WAITS, 2 * self.short_waits_before_spin)
        self._num_short = 0
        return ready


def poll_ms(timeout_s: float) -> int:
    """Return milliseconds for poll: rounded up, so that a wait never ends before its time."""
    return math.ceil(min(max(timeout_s, 0.0), _MAX_POLL_S) * 1000.0)
