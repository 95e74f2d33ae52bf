"""Lookups that wait for a permit: how many copies of each, and what the policy has said of it.

Covers: the state of each wait.      Does not: decide (ps.consistency.hybrid), wait or wake
(ps.consistency.gate).
Threads: the gate's lock guards it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from ps.consistency.policy import Grant, Recall
from ps.errors import RequestTimeout
from ps.exactly_once import RequestId
from ps.manifest.manifest import WorkerRank


@dataclass(slots=True)
class LookupWait:
    """One batch whose rows somebody waits for."""

    num_copies: int = 0
    """A cut lookup comes again while its first copy may still wait here."""
    is_granted: bool = False
    is_recalled: bool = False


class WaitingLookups:
    """All lookups of a shard that wait for a permit."""

    def __init__(self) -> None:
        self._waits: dict[RequestId, LookupWait] = {}

    @property
    def num_waiting(self) -> int:
        """Batches whose lookup is not answered yet."""
        return sum(not wait.is_granted for wait in tuple(self._waits.values()))

    @contextlib.contextmanager
    def entered(self, batch: RequestId) -> Iterator[LookupWait]:
        """Count one copy of a lookup in, and out at the end."""
        wait = self._waits.setdefault(batch, LookupWait())
        wait.num_copies += 1
        try:
            yield wait
        finally:
            wait.num_copies -= 1
            if not wait.num_copies:
                self._waits.pop(batch, None)

    def grant(self, action: Grant) -> None:
        """Let all copies go on."""
        self._waits[action.batch].is_granted = True

    def recall(self, action: Recall) -> None:
        """End the waits; their senders hear why."""
        for batch in action.batches:
            self._waits[batch].is_recalled = True


def no_permit(worker: WorkerRank, bound: int) -> RequestTimeout:
    """The error that ends a lookup whose worker's older batches were not over in time."""
    return RequestTimeout(
        f"worker {worker} has staleness_bound={bound} batches under way: their rows were looked up "
        "and their gradients have not come; push() or close() them, or raise the bound",
        {"worker": str(worker), "bound": str(bound)},
    )
