"""Unreachable workers: those whose hosts accepted no connection of this process a while ago.

Covers: which they are, so that each partition need not wait for them again.
Does not: connect (worker_link), decide whether they are tried all the same (feeder, inference).
Runs in: a Python worker process of Spark, which runs many tasks, one after the other.
Threads: any; each call is one operation on a dict.
"""

from __future__ import annotations

import time

from rpc.endpoint import Endpoint

AWAY_S = 60.0
"""Such a worker is passed over for this long while another one answers. A try takes 10 s
(`FeedConfig.connect_timeout_s`), so it costs a sixth of the time or less."""
_MOST = 1024


class UnreachableWorkers:
    """The workers of which one process knows it."""

    def __init__(self) -> None:
        self._found_s: dict[Endpoint, float] = {}

    def note(self, endpoint: Endpoint) -> None:
        """Note that a worker's host accepted no connection in time."""
        if len(self._found_s) >= _MOST:
            self._found_s.clear()
        self._found_s[endpoint] = time.monotonic()

    def forget(self, endpoint: Endpoint) -> None:
        """Note that a worker's host has accepted a connection."""
        self._found_s.pop(endpoint, None)

    def has(self, endpoint: Endpoint) -> bool:
        """Return whether that was so less than `AWAY_S` ago."""
        found_s = self._found_s.get(endpoint)
        return found_s is not None and time.monotonic() - found_s < AWAY_S

    def clear(self) -> None:
        """Forget all."""
        self._found_s.clear()


UNREACHABLE = UnreachableWorkers()
"""The unreachable workers that this process knows."""
