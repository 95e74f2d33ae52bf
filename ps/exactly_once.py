"""The exactly-once record: which request of which worker has already changed which bucket.

Covers: incarnations and fencing, sequence numbers, the state of a half-applied push.
Does not: apply anything (ps.dense.shard), decide when (ps.consistency.asp). Pure: no locks, clock
or I/O.
Threads: `begin`, `complete`, `fence` need one lock; `needs` and `mark` the lock of their bucket.

Every request that changes something carries a `RequestId`. Per session and bucket the record keeps
the sequence last applied there:

    applied[b] == sequence   this push has changed bucket b: a retry skips it
    applied[b] <  sequence   it has not yet: a retry applies it
    completed  >= sequence   all of it is done: a retry is answered, nothing is applied
    refusal                  why the session's last request was refused: so is every copy of it

A connection cut in the middle therefore leaves a record from which the retry goes on. A session is
one client object, named by a random number: two clients of one worker, or a client of another run
that meets a restored record, never mix up their numbers.

[merged ps/exactly_once.py] The exactly-once record at one moment, read unit by unit while pushes
go on.

A push that ends after the moment has changed every unit that was still to be read, and whoever
changes one lets it be read first. So a unit's own number is still the one of the moment when it is
read; only what was completed as a whole is remembered at once.

Covers: the sessions of a cut.      Does not: know buckets or rows (ps.checkpoint.snapshot).
Threads: any; `note` under the lock of its unit.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import msgspec

from ps.errors import PSError, SequenceGap, ServerPhaseError, StaleIncarnation
from ps.manifest.manifest import WorkerRank

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


class LogSnapshot:
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


MAX_SESSIONS = 16
"""Clients per worker that are remembered; the one that was silent longest makes room."""


class RequestId(NamedTuple):
    """What makes a changing request unique at one server."""

    worker: WorkerRank
    incarnation: int
    """Which attempt of the worker; only the newest may change anything."""
    session: int
    """Which client object of that process."""
    sequence: int
    """Grows with every changing request of this session to this server, from 1."""


def is_first(request: RequestId, acked_clock: int) -> bool:
    """Whether a push is for the first clock: its worker was told of none and is no later attempt.

    A later attempt begins where the others are.
    """
    return not (acked_clock or request.incarnation)


class Verdict(enum.Enum):
    """What a request is, seen from the record."""

    NEW = "new"
    """Its number follows the last one: apply it."""
    RESUMED = "resumed"
    """It came before and was not completed: apply what is missing."""
    DUPLICATE = "duplicate"
    """It was completed, or given up for a later one: answer it, change nothing."""


class SessionLog:
    """What is known of one session."""

    __slots__ = (
        "applied",
        "completed",
        "heard",
        "incarnation",
        "may_jump",
        "refusal",
        "resent",
        "sequence",
    )

    def __init__(self, incarnation: int, num_buckets: int) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        self.completed = 0
        self.applied = array("q", bytes(8 * num_buckets))
        self.heard = 0
        # After a restore the session is ahead of the record: the requests between are lost.
        self.may_jump = False
        # The first request since then: it may be one that the restore has undone.
        self.resent = 0
        self.refusal: PSError | None = None


class CompletionLog:
    """The record of one server, for the buckets it owns (numbered from 0 in their order here)."""

    def __init__(self, num_buckets: int) -> None:
        self._num_buckets = num_buckets
        self._sessions: dict[WorkerRank, dict[int, SessionLog]] = {}
        self._least: dict[WorkerRank, int] = {}
        self._lost_requests = 0
        self._num_heard = 0
        self._is_restored = False

    @property
    def is_restored(self) -> bool:
        """Whether it began as a checkpoint's: sessions may be ahead of it."""
        return self._is_restored

    @property
    def lost_requests(self) -> int:
        """Acknowledged requests that a restore has undone; above 0 means: steps were lost."""
        return self._lost_requests

    def begin(self, request: RequestId, acknowledged: int = 0) -> Verdict:
        """Note that a request has arrived and say what it is.

        Numbers may be left out: a request can be refused before it comes here.

        Args:
            request: its name.
            acknowledged: the last request that the session was told is done.

        Raises:
            StaleIncarnation: a newer attempt of the worker is known, or this one was fenced.
            SequenceGap: this record does not know what was acknowledged: the state was lost.
        """
        self.refuse_stale(request.worker, request.incarnation)
        is_unheard = self._is_restored and self._begun(request) is None
        record = self._record_of(request)
        sequence = request.sequence
        if sequence <= record.completed or sequence < record.sequence:
            return Verdict.DUPLICATE
        if record.may_jump or (is_unheard and acknowledged):
            record.resent = sequence
        if sequence == record.sequence:
            return Verdict.RESUMED
        lost = acknowledged - record.sequence
        if lost > 0:
            is_unknown = self._is_restored and not record.sequence
            if not record.may_jump and not is_unknown:
                raise SequenceGap(
                    f"worker {request.worker} was told that its request {acknowledged} is done, "
                    f"this server knows requests up to {record.sequence}: it was restarted and has "
                    "lost updates; restore the last checkpoint and restart the workers",
                    {"worker": str(request.worker), "acknowledged": str(acknowledged)},
                )
            self._lost_requests += lost
        record.may_jump = False
        record.sequence = sequence
        record.refusal = None
        return Verdict.NEW

    def is_resent(self, request: RequestId) -> bool:
        """Whether a session that lived before a restore came back with this; ask after `begin`."""
        record = self._begun(request)
        return record is not None and record.resent == request.sequence

    def give_up(self, request: RequestId) -> None:
        """Note that this request belongs to what a restore has undone: nothing is applied."""
        self.complete(request)
        self._lost_requests += 1

    def needs(self, request: RequestId, bucket: int) -> bool:
        """Whether this request still has to change this bucket; call it after `begin`.

        False too when the session has gone on to a later request: a late copy changes nothing.

        Raises:
            StaleIncarnation: the worker was fenced since `begin`.
        """
        self.refuse_stale(request.worker, request.incarnation)
        record = self._begun(request)
        if record is None or record.sequence != request.sequence:
            return False
        return max(record.applied[bucket], record.completed) < request.sequence

    def mark(self, request: RequestId, bucket: int) -> None:
        """Note that the request has changed the bucket; call it under the bucket's lock."""
        record = self._begun(request)
        if record is not None:
            record.applied[bucket] = request.sequence

    def complete(self, request: RequestId) -> None:
        """Note that nothing of this request is left to do."""
        record = self._begun(request)
        if record is not None:
            record.completed = max(record.completed, request.sequence)

    def refuse(self, request: RequestId, error: PSError | None) -> None:
        """Remember why its sender is refused this request; None: it is not, after all."""
        record = self._begun(request)
        if record is not None and record.sequence == request.sequence:
            record.refusal = None if error is None else error.again()

    def refusal_of(self, request: RequestId) -> PSError | None:
        """Return why this request was refused; None: it was not, or its session has gone on."""
        record = self._begun(request)
        if record is None or record.sequence != request.sequence or record.refusal is None:
            return None
        return record.refusal.again()

    def fence(self, worker: WorkerRank, least_incarnation: int) -> None:
        """Refuse every incarnation of the worker below `least_incarnation` from now on."""
        if least_incarnation <= self._least.get(worker, 0):
            return
        self._least[worker] = least_incarnation
        sessions = self._sessions.get(worker, {})
        # A new dict: another thread may be reading the old one for a checkpoint.
        self._sessions[worker] = {
            session: record
            for session, record in sessions.items()
            if record.incarnation >= least_incarnation
        }

    def refuse_stale(self, worker: WorkerRank, incarnation: int) -> None:
        """Raise StaleIncarnation if a newer attempt of the worker is known, or this was fenced."""
        least = self._least.get(worker, 0)
        if incarnation < least:
            raise StaleIncarnation(
                f"worker {worker} incarnation {incarnation} was replaced: the server accepts "
                f"{least} and newer; this process must end",
                {"worker": str(worker), "got": str(incarnation), "expected": str(least)},
            )

    def incarnation_of(self, worker: WorkerRank) -> int:
        """The oldest incarnation that is not refused: the newest one seen, unless fenced beyond."""
        return self._least.get(worker, 0)

    def cut(self) -> LogSnapshot:
        """Return the record as it is now, to be read bucket by bucket; call it as `complete`."""
        live = [
            LiveSession(worker, record.incarnation, session, record.applied, record.completed)
            for worker, sessions in self._sessions.items()
            for session, record in sessions.items()
        ]
        return LogSnapshot(live, self._num_buckets)

    def restore(self, cuts: Iterable[SessionCut]) -> None:
        """Take over the sessions of a checkpoint.

        A session that still lives may be ahead, or have begun since: its first request may jump,
        and the jump is counted. Those of another run are never heard of again and make room in
        time.
        """
        self._is_restored = True
        for cut in cuts:
            if len(cut.applied) != self._num_buckets:
                raise ServerPhaseError(
                    f"a record of {len(cut.applied)} buckets cannot be restored into a shard of "
                    f"{self._num_buckets}"
                )
            record = SessionLog(cut.incarnation, self._num_buckets)
            record.applied = array("q", cut.applied)
            record.sequence = max(cut.applied, default=cut.completed)
            record.completed = min(cut.applied, default=cut.completed)
            record.may_jump = True
            self._sessions.setdefault(WorkerRank(cut.worker), {})[cut.session] = record

    def _begun(self, request: RequestId) -> SessionLog | None:
        record = self._sessions.get(request.worker, {}).get(request.session)
        if record is None or record.incarnation != request.incarnation:
            return None
        return record

    def _record_of(self, request: RequestId) -> SessionLog:
        """Find or make the session's record and note that it is the last one heard of."""
        self.fence(request.worker, request.incarnation)
        sessions = self._sessions.setdefault(request.worker, {})
        record = sessions.get(request.session)
        if record is None or record.incarnation != request.incarnation:
            record = SessionLog(request.incarnation, self._num_buckets)
            if len(sessions) >= MAX_SESSIONS:
                del sessions[min(sessions, key=lambda session: sessions[session].heard)]
            sessions[request.session] = record
        self._num_heard += 1
        record.heard = self._num_heard
        return record
