"""Staleness of a gradient: updates by others that its parameters did not contain.

Covers: which updates each worker has got with each of its last pulls, the rate for an old gradient.
Does not: bound how old one may be (ps.consistency.ssp).
Threads: the gate's lock guards it.

    clock of the server = updates by the worker itself + updates by others

A worker that computes while its pushes travel says how many of them its parameters lack: its lag.
So many pulls have been answered since the one that its gradient was computed with.
"""

from __future__ import annotations

from collections import deque

import msgspec

from ps.manifest.manifest import MAX_LAG, Hyper, WorkerRank


class StalenessTracker:
    """What the workers have seen of a shard.

    Args:
        first_clock: where this server began; what was before it makes no gradient old.
    """

    def __init__(self, first_clock: int) -> None:
        self._first_clock = first_clock
        self._pushes: dict[WorkerRank, int] = {}
        self._seen_others: dict[WorkerRank, deque[int]] = {}

    def pushed(self, worker: WorkerRank) -> None:
        """Note that an update of the clock is the worker's own."""
        self._pushes[worker] = self._pushes.get(worker, 0) + 1

    def pulled(self, worker: WorkerRank, clock: int) -> None:
        """Note which clock's parameters the worker has got.

        Args:
            worker: rank.
            clock: clock of the parameters that were sent.
        """
        seen = self._seen_others.setdefault(worker, deque(maxlen=MAX_LAG + 1))
        seen.append(clock - self._pushes.get(worker, 0))

    def staleness(self, worker: WorkerRank, clock: int, lag: int = 0) -> int:
        """Return the updates by others up to `clock` that were not in the worker's parameters.

        Args:
            worker: the worker whose gradient it is.
            clock: clock of the server, before the gradient.
            lag: the worker's own last pushes that the parameters did not contain either.
        """
        seen = self._seen_others.get(worker)
        known = seen[max(0, len(seen) - 1 - lag)] if seen else self._first_clock
        return clock - self._pushes.get(worker, 0) - known


def slowed(hyper: Hyper, staleness: int) -> Hyper:
    """Return `hyper` with the learning rate for a gradient that is `staleness` updates old.

    The rate is divided by 1 + staleness, so that a gradient counts the less the more updates by
    others its worker has not seen. It scales the rate, not the gradient, since rules like Adam do
    not notice a scaled gradient.

    Args:
        hyper: learning rate and scalars of the push.
        staleness: updates by others since the worker's last pull, 0 or more.

    Source: Zhang et al., Staleness-aware ASP-SGD for Distributed Deep Learning, IJCAI 2016, which
    divides by the staleness, counted from 1 for a fresh gradient.
    """
    if staleness == 0:
        return hyper
    return msgspec.structs.replace(hyper, learning_rate=hyper.learning_rate / (1 + staleness))
