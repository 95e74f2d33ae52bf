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

BRISK_S = 150e-6
"""A wait is short, and is watched, for so long."""
LOOK_S = 30e-6
"""A look alone on its core and in its interpreter takes 1-2 us; a longer one was not alone."""
MAX_PATIENCE = 1024
"""Short waits before a watch is tried again where the last ones did not pay."""

_MAX_POLL_S = 3600.0


class SpinThenPoll:
    """Waits for events of one descriptor."""

    def __init__(self) -> None:
        self.patience = 1
        """Short waits, one after the other, before the next one is watched."""
        self._num_short = 0
        self._poll = select.poll()
        self._events = 0

    def wait(self, descriptor: int, events: int, timeout_s: float) -> bool:
        """Wait until one of the events has come; False when the time is over."""
        if events != self._events:
            self._poll.register(descriptor, events)
            self._events = events
        if self._num_short >= self.patience and timeout_s > BRISK_S and self._watch():
            return True
        begun = time.monotonic()
        ready = bool(self._poll.poll(math.ceil(min(max(timeout_s, 0.0), _MAX_POLL_S) * 1000.0)))
        is_short = ready and time.monotonic() - begun < BRISK_S
        self._num_short = self._num_short + 1 if is_short else 0
        return ready

    def _watch(self) -> bool:
        """Wait without sleeping, giving the core away to whoever can use it."""
        poll, now, give_way = self._poll.poll, time.monotonic, os.sched_yield
        ready = False
        begun = look = now()
        while not ready and look - begun < BRISK_S:
            ready = bool(poll(0))
            if not ready:
                give_way()
            before, look = look, now()
            if look - before > LOOK_S:
                break
        else:
            if ready:
                self.patience = max(1, self.patience - 1)
                return True
        self.patience = min(MAX_PATIENCE, 2 * self.patience)
        self._num_short = 0
        return ready


def poll_ms(timeout_s: float) -> int:
    """Return milliseconds for poll: rounded up, so that a wait never ends before its time."""
    return math.ceil(min(max(timeout_s, 0.0), _MAX_POLL_S) * 1000.0)
