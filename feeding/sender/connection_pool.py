"""Connection pool: idle connections to workers, kept for the next partition of this process.

Covers: keeping a connection with the last status of its worker, closing idle ones, forked
processes.
Does not: connect or call (worker_link), choose workers (routing).
Runs in: a Python worker process of Spark, which runs many tasks, one after the other.
Threads: any; `_changed` guards the table. One thread closes idle connections; it ends when none is
left.

A connection is used again only with the same credentials, endpoint and feed: so never for another
cluster, and never for the process that replaced a worker.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from feeding.protocol.messages import FeedStatus
from rpc.auth.handshake import Credentials
from rpc.client.connection import Connection, PendingCall
from rpc.endpoint import Endpoint

IDLE_S = 60.0
"""Longest idle time of a connection: each costs its worker a thread."""
MAX_IDLE = 256
"""Most idle connections of one process; one more closes the one that is idle the longest."""
_LOOK_S = 1.0
"""How often the thread checks the age of idle connections and whether the worker has closed."""


class Purpose(NamedTuple):
    """What a connection is for: the key of the pool."""

    credentials: Credentials
    endpoint: Endpoint
    feed: str


@dataclass(frozen=True, slots=True)
class IdleConnection:
    """A connection between two partitions."""

    connection: Connection
    status: FeedStatus
    """The last one received."""
    replied_at_s: float
    """When it was received, monotonic."""
    pending: PendingCall | None = None
    """A Wait that a full worker has not answered yet."""
    asked_at_s: float = 0.0
    since_s: float = field(default_factory=time.monotonic)


class ConnectionPool:
    """The idle connections of one process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: dict[Purpose, list[IdleConnection]] = {}
        self._closes_idle = False
        """Whether the thread runs."""

    def __len__(self) -> int:
        with self._changed:
            return self._count()

    def take(self, purpose: Purpose) -> IdleConnection | None:
        """Return the most recently used idle connection for a purpose; None if there is none."""
        with self._changed:
            found = self._idle.get(purpose)
            if not found:
                return None
            idle = found.pop()
            if not found:
                del self._idle[purpose]
            return idle

    def give(self, purpose: Purpose, idle: IdleConnection) -> None:
        """Keep a connection for the next partition; the caller must not use it any more.

        Args:
            purpose: the key.
            idle: a connection without a call in flight, except a Wait.
        """
        with self._changed:
            self._idle.setdefault(purpose, []).append(idle)
            closing = self._oldest() if self._count() > MAX_IDLE else []
            if not self._closes_idle:
                self._closes_idle = True
                name = "feed-idle-connections"
                threading.Thread(target=self._close_idle, name=name, daemon=True).start()
        _close(closing)

    def clear(self) -> None:
        """Close all idle connections."""
        with self._changed:
            closing = [each for found in self._idle.values() for each in found]
            self._idle.clear()
            self._changed.notify_all()
        _close(closing)

    def forget(self) -> None:
        """Drop the parent's connections in a forked child.

        `close` would shut down the streams, which parent and child share; dropping the last
        reference closes only the child's descriptors. The lock is new, because a thread of the
        parent, which the child does not have, may have held it.
        """
        self._changed = threading.Condition()
        self._idle = {}
        self._closes_idle = False

    def _count(self) -> int:
        return sum(map(len, self._idle.values()))

    def _oldest(self) -> list[IdleConnection]:
        """Take out the connection that is idle the longest."""
        purpose = min(self._idle, key=lambda each: self._idle[each][0].since_s)
        found = self._idle[purpose]
        oldest = found.pop(0)
        if not found:
            del self._idle[purpose]
        return [oldest]

    def _close_idle(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(_LOOK_S)
                if not self._idle:
                    self._closes_idle = False
                    return
                closing = self._take_ended(time.monotonic() - IDLE_S)
            _close(closing)

    def _take_ended(self, before_s: float) -> list[IdleConnection]:
        """Take out connections that were not used since then, or that the worker has closed."""
        ended: list[IdleConnection] = []
        for purpose, found in list(self._idle.items()):
            kept: list[IdleConnection] = []
            for idle in found:
                is_over = idle.since_s <= before_s or idle.connection.peer_closed()
                (ended if is_over else kept).append(idle)
            if kept:
                self._idle[purpose] = kept
            else:
                del self._idle[purpose]
        return ended


def _close(some: list[IdleConnection]) -> None:
    for idle in some:
        idle.connection.close()


POOL = ConnectionPool()
"""The pool of this process."""
os.register_at_fork(after_in_child=POOL.forget)
