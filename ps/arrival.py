"""A push that has arrived at a server, on its way to being part of the parameters.

Covers: what is known of it, and its outcome.      Does not: wait or decide (ps.gate).
Threads: belongs to one thread until it arrives at the gate; then the gate's lock guards it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ps.applied import RequestId
from ps.errors import PSError
from ps.params import Hyper

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
    is_applied: bool = False
    """Whether it is part of the parameters; in ssp before its sender is answered."""
    clock: int | None = None
    error: PSError | None = None

    @property
    def is_done(self) -> bool:
        """Whether its sender can be answered."""
        return self.clock is not None or self.error is not None


Contributions = Sequence[Arrival[Gradient]]
