"""Completion log: which request of which worker has changed which bucket, for exactly-once.

Covers: generations and fencing, sequence numbers, the state of a half-applied push, the record in
a checkpoint.
Does not: apply anything (ps.dense.shard), decide when (ps.consistency.asp). Pure: no locks, clock
or I/O.
Threads: `begin`, `complete`, `fence` need one lock; `needs` and `mark` the lock of their bucket.
`begin` gives the request a ticket, by which all else asks: the session is looked up once.

Every request that changes something carries a `RequestId`. Per session and bucket the record keeps
the sequence last applied there:

    applied[b] == sequence   this push has changed bucket b: a retry skips it
    applied[b] <  sequence   it has not yet: a retry applies it
    completed  >= sequence   all of it is done: a retry is answered, nothing is applied
    refusal                  why the session's last request was refused: so is every copy of it

A connection cut in the middle therefore leaves a record from which the retry goes on. A session is
one client object, named by a random number: two clients of one worker, or a client of another run
that meets a restored record, never mix up their numbers.

A snapshot of the record is read unit by unit while pushes go on. A push that ends after the moment
has changed every unit that was still to be read, and it reads a unit before it changes it. So the
number that is read is the one of the moment. Only the completed requests are noted at once.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import msgspec

from ps.errors import PSError, SequenceGap, ServerPhaseError, StaleGeneration
from ps.manifest.manifest import WorkerRank
from ps.metadata import AttachedMetadata

MAX_SEQUENCE = 2**63 - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]


class SessionRecord(msgspec.Struct, frozen=True, rename={"generation": "incarnation"}):
    """One session's record as a checkpoint keeps it, read bucket by bucket with the values.

    Checkpoints know `generation` by its older name.
    """

    worker: Count
    generation: Count
    session: Count
    applied: tuple[Count, ...]
    """Per bucket the sequence last applied there."""
    completed: Count = 0
    """The last one done at the snapshot: all that a server without buckets and rows knows of it."""


class LiveSession(NamedTuple):
    """One session at the moment of the snapshot."""

    worker: int
    generation: int
    session: int
    applied: array[int]
    """The record's own, per unit the sequence last applied there; goes on changing."""
    completed: int
    attached: tuple[int, AttachedMetadata] | None
    """See SessionLog."""


class LogSnapshot:
    """What each session had applied to each unit.

    Args:
        live: the sessions, looked up under the lock that guards `completed`.
        num_units: buckets and segments.
    """

    def __init__(self, live: Iterable[LiveSession], num_units: int) -> None:
        self._pairs = tuple((each, array("q", bytes(8 * num_units))) for each in live)

    def note(self, unit: int) -> None:
        """Read one unit, before it changes for the first time after the snapshot."""
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

    def attached(self, num_buckets: int) -> Iterator[AttachedMetadata]:
        """Yield what pushes bring that had changed all buckets without being completed.

        Args:
            num_buckets: of the shard.
        """
        for live, seen in self._pairs if num_buckets else ():
            if live.attached is None:
                continue
            sequence, attached = live.attached
            if live.completed < sequence == min(seen[:num_buckets]):
                yield attached

    def sessions(self) -> tuple[SessionRecord, ...]:
        """Return what a checkpoint keeps, once every unit is noted."""
        return tuple(
            SessionRecord(live.worker, live.generation, live.session, tuple(seen), live.completed)
            for live, seen in sorted(self._pairs, key=lambda pair: pair[0][:3])
        )


MAX_SESSIONS = 16
"""Clients per worker that are remembered; the one that was silent longest makes room."""


class RequestId(NamedTuple):
    """What makes a changing request unique at one server."""

    worker: WorkerRank
    generation: int
    """Which attempt of the worker; only the newest may change anything."""
    session: int
    """Which client object of that process."""
    sequence: int
    """Grows with every changing request of this session to this server, from 1."""


class Verdict(enum.Enum):
    """What a request is, seen from the record."""

    NEW = "new"
    """Its number follows the last one: apply it."""
    RESUMED = "resumed"
    """It came before and was not completed: apply what is missing."""
    DUPLICATE = "duplicate"
    """It was completed, or given up for a later one: answer it, change nothing."""


class SessionLog:
    """What is known of one session.

    Args:
        generation: of the worker.
        num_buckets: units of the shard: buckets and segments.
    """

    __slots__ = (
        "applied",
        "attached",
        "completed",
        "ended",
        "generation",
        "last_request",
        "may_jump",
        "refusal",
        "sequence",
    )

    def __init__(self, generation: int, num_buckets: int) -> None:
        self.generation = generation
        self.sequence = 0
        self.completed = 0
        self.applied = array("q", bytes(8 * num_buckets))
        # What its last push with metadata brings: sequence, metadata. One for each session.
        self.attached: tuple[int, AttachedMetadata] | None = None
        self.last_request = 0
        # After a restore the session is ahead of the record: the requests between are lost.
        self.may_jump = False
        self.refusal: PSError | None = None
        # Why the record has put it away; requests that began before end with it.
        self.ended: PSError | None = None


class Ticket(msgspec.Struct, eq=False):
    """One request that has begun: what it is, and what of it is left to do.

    It holds its session's log, so nobody looks the session up again.

    Threads: `needs` and `mark` take the lock of their bucket, all else the one of `begin`.
    """

    id: RequestId
    verdict: Verdict
    session: SessionLog

    @property
    def is_over(self) -> bool:
        """Whether it is completed, or its session has gone on to a later request."""
        session, sequence = self.session, self.id.sequence
        return sequence <= session.completed or sequence < session.sequence

    @property
    def refusal(self) -> PSError | None:
        """Why this request was refused; None: it was not, or its session has gone on."""
        session = self.session
        if session.refusal is None or session.sequence != self.id.sequence:
            return None
        return session.refusal.again()

    def check(self) -> None:
        """Raise why its session was put away since `begin`: StaleGeneration after a fence."""
        if self.session.ended is not None:
            raise self.session.ended.again()

    def needs(self, bucket: int) -> bool:
        """Whether this request still has to change this bucket.

        False too when the session has gone on to a later request: a late copy changes nothing.

        Raises:
            StaleGeneration: the worker was fenced since `begin`.
        """
        session, sequence = self.session, self.id.sequence
        if session.ended is not None:
            raise session.ended.again()
        if session.sequence != sequence or session.completed >= sequence:
            return False
        return session.applied[bucket] < sequence

    def attach(self, metadata: AttachedMetadata) -> None:
        """Note what the request brings, before it changes its first bucket.

        Kept with its session, so what a client leaves that dies in its push goes with that.
        """
        self.session.attached = self.id.sequence, metadata

    def mark(self, bucket: int) -> None:
        """Note that the request has changed the bucket."""
        self.session.applied[bucket] = self.id.sequence

    def num_marked(self, units: Iterable[int]) -> int:
        """Return how many of these units the request has changed."""
        return sum(self.session.applied[unit] == self.id.sequence for unit in units)

    def complete(self) -> None:
        """Note that nothing of this request is left to do."""
        session = self.session
        session.completed = max(session.completed, self.id.sequence)

    def refuse(self, error: PSError | None) -> None:
        """Remember why its sender is refused this request; None: it is not, after all."""
        if self.session.sequence == self.id.sequence:
            self.session.refusal = None if error is None else error.again()


class CompletionLog:
    """The record of one server, for the buckets it owns (numbered from 0 in their order here)."""

    def __init__(self, num_buckets: int) -> None:
        self.is_restored = False
        """Whether it began as a checkpoint's: sessions may be ahead of it."""
        self._num_buckets = num_buckets
        self._sessions: dict[WorkerRank, dict[int, SessionLog]] = {}
        self._least: dict[WorkerRank, int] = {}
        self._lost_requests = 0
        self._num_requests = 0

    @property
    def lost_requests(self) -> int:
        """Acknowledged requests that a restore has undone; above 0 means: steps were lost."""
        return self._lost_requests

    def begin(self, request: RequestId, acknowledged: int = 0) -> Ticket:
        """Note that a request has arrived and say what it is.

        Numbers may be left out: a request can be refused before it comes here.

        Args:
            request: its name.
            acknowledged: the last request whose ack the session has.

        Raises:
            StaleGeneration: a newer attempt of the worker is known, or this one was fenced.
            SequenceGap: this record does not know what was acknowledged: the state was lost.
        """
        worker, generation, key, sequence = request
        least = self._least.get(worker, 0)
        if generation < least:
            raise _replaced(worker, generation, least)
        if generation > least:
            self.fence(worker, generation)
        session = self._sessions.get(worker, _NONE).get(key)
        if session is None or session.generation != generation:
            session = self._open(request)
        self._num_requests += 1
        session.last_request = self._num_requests
        if sequence <= session.completed or sequence < session.sequence:
            return Ticket(request, Verdict.DUPLICATE, session)
        if sequence == session.sequence:
            return Ticket(request, Verdict.RESUMED, session)
        if acknowledged > session.sequence:
            self._count_lost(request, session, acknowledged)
        session.may_jump = False
        session.sequence = sequence
        session.refusal = None
        return Ticket(request, Verdict.NEW, session)

    def give_up(self, ticket: Ticket) -> None:
        """Note that this request belongs to what a restore has undone: nothing is applied."""
        ticket.complete()
        self._lost_requests += 1

    def fence(self, worker: WorkerRank, least_generation: int) -> None:
        """Refuse every generation of the worker below `least_generation` from now on.

        Args:
            worker: rank.
            least_generation: the oldest that is not refused.
        """
        if least_generation <= self._least.get(worker, 0):
            return
        self._least[worker] = least_generation
        kept: dict[int, SessionLog] = {}
        for key, session in self._sessions.get(worker, _NONE).items():
            if session.generation >= least_generation:
                kept[key] = session
            else:
                session.ended = _replaced(worker, session.generation, least_generation)
        # A new dict: another thread may be reading the old one for a checkpoint.
        self._sessions[worker] = kept

    def refuse_stale(self, worker: WorkerRank, generation: int) -> None:
        """Raise StaleGeneration if a newer attempt of the worker is known, or this was fenced.

        Args:
            worker: rank.
            generation: of the process that asks.
        """
        least = self._least.get(worker, 0)
        if generation < least:
            raise _replaced(worker, generation, least)

    def generation_of(self, worker: WorkerRank) -> int:
        """The oldest generation that is not refused: the newest one seen, unless fenced beyond."""
        return self._least.get(worker, 0)

    def snapshot(self) -> LogSnapshot:
        """Return the record as it is now, to be read bucket by bucket; call it as `complete`."""
        live = [
            LiveSession(
                worker,
                record.generation,
                session,
                record.applied,
                record.completed,
                record.attached,
            )
            for worker, sessions in self._sessions.items()
            for session, record in sessions.items()
        ]
        return LogSnapshot(live, self._num_buckets)

    def restore(self, sessions: Iterable[SessionRecord]) -> None:
        """Take over the sessions of a checkpoint.

        A session that still lives may be ahead, or have begun since: its first request may jump,
        and the jump is counted. Those of another run never send again and make room in
        time.
        """
        self.is_restored = True
        for session in sessions:
            if len(session.applied) != self._num_buckets:
                raise ServerPhaseError(
                    f"a record of {len(session.applied)} buckets cannot be restored into a shard "
                    f"of {self._num_buckets}"
                )
            record = SessionLog(session.generation, self._num_buckets)
            record.applied = array("q", session.applied)
            record.sequence = max(session.applied, default=session.completed)
            record.completed = min(session.applied, default=session.completed)
            record.may_jump = True
            self._sessions.setdefault(WorkerRank(session.worker), {})[session.session] = record

    def _open(self, request: RequestId) -> SessionLog:
        """Make a session's log; the one that was silent longest makes room."""
        sessions = self._sessions.setdefault(request.worker, {})
        if len(sessions) >= MAX_SESSIONS:
            silent = min(sessions, key=lambda session: sessions[session].last_request)
            sessions.pop(silent).ended = ServerPhaseError(
                f"worker {request.worker} has more than {MAX_SESSIONS} clients at this server; the "
                "one that was silent longest was put away: close clients that are done"
            )
        session = sessions[request.session] = SessionLog(request.generation, self._num_buckets)
        session.may_jump = self.is_restored  # it may have begun after the save
        return session

    def _count_lost(self, request: RequestId, session: SessionLog, acknowledged: int) -> None:
        """Count what a restore has undone; without one nothing may be missing."""
        if not session.may_jump:
            raise SequenceGap(
                f"worker {request.worker} has an ack: its request {acknowledged} is done, "
                f"this server knows requests up to {session.sequence}: it was restarted and has "
                "lost updates; restore the last checkpoint and restart the workers",
                {"worker": str(request.worker), "acknowledged": str(acknowledged)},
            )
        self._lost_requests += acknowledged - session.sequence


_NONE: dict[int, SessionLog] = {}


def _replaced(worker: WorkerRank, generation: int, least: int) -> StaleGeneration:
    return StaleGeneration(
        f"worker {worker} generation {generation} was replaced: the server accepts "
        f"{least} and newer; this process must end",
        {"worker": str(worker), "got": str(generation), "expected": str(least)},
    )
