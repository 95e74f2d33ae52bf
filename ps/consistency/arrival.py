"""A push that has arrived at a server, on its way to being part of the parameters.

Covers: what is known of it, its outcome.      Does not: wait or decide (ps.consistency.gate).
Threads: belongs to one thread until it arrives at the gate; then the gate's lock guards it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ps.errors import PSError, RequestTimeout
from ps.exactly_once import RequestId
from ps.manifest.manifest import Hyper, WorkerRank
from ps.metadata import PushedNote

Gradient = TypeVar("Gradient")


@dataclass(slots=True)
class Arrival(Generic[Gradient]):
    """A push that is completely here, and later its outcome: `clock` or `error`."""

    id: RequestId
    rows: int
    hyper: Hyper | None
    """None: a null push."""
    gradient: Gradient | None = None
    """What was staged; None for a null push and for one that was applied as it arrived."""
    staleness: int = 0
    told_clock: int = 0
    """The newest clock that its sender was told before it; a staged push is for the next one."""
    note: PushedNote | None = None
    """What is kept once it is part of the parameters."""
    is_applied: bool = False
    """Whether it is part of the parameters; in ssp before its sender is answered."""
    clock: int | None = None
    error: PSError | None = None

    @property
    def is_changing(self) -> bool:
        """Whether its buckets were changed as they arrived."""
        return self.hyper is not None and self.gradient is None

    @property
    def is_done(self) -> bool:
        """Whether its sender can be answered."""
        return self.clock is not None or self.error is not None


Contributions = Sequence[Arrival[Gradient]]


def still_waits(clock: int, missing: Sequence[WorkerRank]) -> RequestTimeout:
    """The error that ends a push whose clock was not complete in time."""
    names = ", ".join(str(rank) for rank in missing)
    return RequestTimeout(
        f"clock {clock} still waits for worker {names}; raise the timeout or let idle workers "
        "leave()",
        {"missing": names},
    )
