"""The exactly-once record at one moment, read unit by unit while pushes go on.

A push that ends after the moment has changed every unit that was still to be read, and whoever
changes one lets it be read first. So a unit's own number is still the one of the moment when it is
read; only what was completed as a whole is remembered at once.

Covers: the sessions of a cut.      Does not: know buckets or rows (ps.checkpoint.snapshot).
Threads: any; `note` under the lock of its unit.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec

MAX_SEQUENCE = 2**63 - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]


class SessionCut(msgspec.Struct, frozen=True):
    """One session's record as a checkpoint keeps it, cut bucket by bucket with the values."""

    worker: Count
    incarnation: Count
    session: Count
    applied: tuple[Count, ...]
    """Per bucket the sequence last applied there."""
    completed: Count = 0
    """The last one done at the cut: all that a server without buckets and rows knows of it."""


class LiveSession(NamedTuple):
    """One session at the moment of the cut."""

    worker: int
    incarnation: int
    session: int
    applied: array[int]
    """The record's own, per unit the sequence last applied there; goes on changing."""
    completed: int


class RecordCut:
    """What each session had applied to each unit.

    Args:
        live: the sessions, looked up under the lock that guards `completed`.
        num_units: buckets and segments.
    """

    def __init__(self, live: Iterable[LiveSession], num_units: int) -> None:
        self._pairs = tuple((each, array("q", bytes(8 * num_units))) for each in live)

    def note(self, unit: int) -> None:
        """Read one unit, before it changes for the first time after the cut."""
        for live, seen in self._pairs:
            seen[unit] = max(live.applied[unit], live.completed)

    def num_uncounted(self, num_buckets: int) -> int:
        """Return how many pushes will be taken as completed after a restore, and were not yet.

        They had changed all buckets. Where there are tables too, a restore lets the push go on, and
        counts it then.

        Args:
            num_buckets: the first units.
        """
        if not num_buckets:
            return 0
        return sum(min(seen) > live.completed for live, seen in self._pairs)

    def has_changed_all(self, session: int, sequence: int, num_buckets: int) -> bool:
        """Whether this push was not completed at the cut, but had changed all buckets by then."""
        return any(
            live.session == session and live.completed < sequence == min(seen[:num_buckets])
            for live, seen in self._pairs
            if num_buckets
        )

    def sessions(self) -> tuple[SessionCut, ...]:
        """Return what a checkpoint keeps, once every unit is noted."""
        return tuple(
            SessionCut(live.worker, live.incarnation, live.session, tuple(seen), live.completed)
            for live, seen in sorted(self._pairs, key=lambda pair: pair[0][:3])
        )
