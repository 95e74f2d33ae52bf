"""Completion log: which request of which worker has changed which unit, for exactly-once.

Covers: generations and fencing, sequence numbers, the state of a half-applied push, how many
sessions a worker may have, the record in a checkpoint, acknowledged updates that a restore undoes.
Does not: apply anything (ps.dense.shard), decide when (ps.consistency.modes). Pure: no locks, clock
or I/O.
Threads: `begin`, `complete`, `fence` need one lock; `needs` and `mark` the lock of their unit.
`begin` gives the request a ticket, by which all else asks: the session is looked up once.

A *unit* is what a request changes in one step: a bucket of the groups, or a segment of a table. A
server's units are numbered from 0: its buckets in their order, then the segments of each table.
Every request that changes something carries a `RequestId`. Per session and unit the record keeps
the sequence last applied there:

    applied[u] == sequence   this push has changed unit u: a retry skips it
    applied[u] <  sequence   it has not yet: a retry applies it
    completed  >= sequence   all of it is done: a retry is answered, nothing is applied
    refusal                  why the session's last request was refused: so is every copy of it

A connection cut in the middle therefore leaves a record from which the retry goes on. A session is
one client object, named by a random number: two clients of one worker never mix up their numbers.

A session is remembered as long as its generation may act, for its last request may come again at
any time. Only one with a request under way needs `applied`; of all others `completed` says it all.

A snapshot of the record is read unit by unit while pushes go on. A push that ends after the moment
has changed every unit that was still to be read, and it reads a unit before it changes it. So the
number that is read is the one of the moment. Only the completed requests are noted at once.

A request that was acknowledged and had changed some of its units at the moment is lost after a
restore: the rest of it never comes again. So what is lost is a difference of counts of updates.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import msgspec

from ps.errors import (
    PSError,
    PSSettingsError,
    SequenceGap,
    ServerPhaseError,
    StaleGeneration,
)
from ps.manifest.manifest import WorkerRank
from ps.metadata import AttachedMetadata

MAX_SEQUENCE = 2**63 - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]


class SessionRecord(msgspec.Struct, frozen=True):
    """One session's record as a checkpoint keeps it, read unit by unit with the values."""

    worker: Count
    generation: Count
    session: Count
    applied: tuple[Count, ...]
    """Per unit the sequence last applied there; empty: no request was half applied."""
    completed: Count
    """The last one done at the snapshot: all there is to know where `applied` is empty."""
    updates: Count
    """How many of its requests have changed parameters."""
    restores: Count
    """How many restores it has gone through since its client's last request."""


class LiveSession(NamedTuple):
    """One session at the moment of the snapshot."""

    worker: int
    generation: int
    session: int
    completed: int
    updates: int
    restores: int = 0
    attached: tuple[int, AttachedMetadata] | None = None
    """See SessionLog."""
    sequence: int = 0
    """The request under way; `completed` if there is none."""
    num_expected: int = 0
    """How many units it will have changed when it is done; 0: all."""
    applied: array[int] | None = None
    """The record's own, per unit the sequence last applied there; goes on changing. None: no
    request was under way."""


class LogSnapshot:
    """What each session had applied to each unit.

    Args:
        live: the sessions, looked up under the lock that guards `completed`.
        num_units: units of the server.
    """

    def __init__(self, live: Iterable[LiveSession], num_units: int) -> None:
        self._num_units = num_units
        self._idle: list[LiveSession] = []
        self._pairs: list[tuple[LiveSession, array[int], array[int]]] = []
        for each in live:
            if each.applied is None:
                self._idle.append(each)
            else:
                self._pairs.append((each, each.applied, array("q", bytes(8 * num_units))))

    def note(self, unit: int) -> None:
        """Read one unit, before it changes for the first time after the snapshot."""
        for live, applied, seen in self._pairs:
            seen[unit] = max(applied[unit], live.completed)

    def num_uncounted(self, num_buckets: int) -> int:
        """Return how many pushes will be taken as completed after a restore, and were not yet.

        They had changed all buckets.

        Args:
            num_buckets: the first units.
        """
        return sum(
            self._is_whole(live, seen) and min(seen[:num_buckets], default=0) == live.sequence
            for live, _, seen in self._pairs
        )

    def attached(self) -> Iterator[AttachedMetadata]:
        """Yield what pushes bring that had changed all they ever will without being completed."""
        for live, _, seen in self._pairs:
            if live.attached is None:
                continue
            sequence, attached = live.attached
            if sequence == live.sequence and self._is_whole(live, seen):
                yield attached

    def sessions(self) -> tuple[SessionRecord, ...]:
        """Return what a checkpoint keeps, once every unit is noted."""
        records = [
            SessionRecord(*live[:3], (), live.completed, live.updates, live.restores)
            for live in self._idle
        ]
        for live, _, seen in self._pairs:
            is_whole = self._is_whole(live, seen)
            is_torn = not is_whole and live.sequence in seen
            records.append(
                SessionRecord(
                    *live[:3],
                    tuple(seen) if is_torn else (),
                    live.sequence if is_whole else live.completed,
                    live.updates + is_whole,
                    live.restores,
                )
            )
        return tuple(sorted(records, key=lambda one: (one.worker, one.generation, one.session)))

    def _is_whole(self, live: LiveSession, seen: array[int]) -> bool:
        """Whether the request under way had changed all that it ever will."""
        num_expected = live.num_expected or self._num_units
        is_under_way = live.sequence > live.completed
        return is_under_way and 0 < num_expected <= seen.count(live.sequence)


MAX_SESSIONS = 4096
"""Clients of one worker's generation at a server, closed ones included; in hybrid one counts as
two. A server forgets none, so that no late copy is applied twice: one more is refused. A session
takes about 300 bytes, and as much in each checkpoint."""
MAX_RESTORES = 16
"""Restores that a session outlives without a request. A client that lives has sent again by then
what it got no ack for, to each server that it reaches: only a later copy would be applied twice."""
MAX_UNDER_WAY = 256
"""How many of them may have a request under way, which takes 8 bytes per unit."""


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
        generation: generation of the worker.
    """

    __slots__ = (
        "applied",
        "attached",
        "completed",
        "ended",
        "generation",
        "may_jump",
        "num_expected",
        "overflow",
        "refusal",
        "restores",
        "sequence",
        "updates",
    )

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.sequence = 0
        self.completed = 0
        # What its push under way brings: sequence, metadata.
        self.attached: tuple[int, AttachedMetadata] | None = None
        # What its push under way could not update, of whichever copy: sequence, the first error.
        self.overflow: tuple[int, PSError] | None = None
        # Requests of it that have changed parameters, and those that were counted as lost.
        self.updates = 0
        # Per unit the sequence last applied there; None: nothing was since the last completed one.
        self.applied: array[int] | None = None
        # How many units the request under way will have changed when it is done; 0: all.
        self.num_expected = 0
        # After a restore the session is ahead of the record: the requests between are lost.
        self.may_jump = False
        # Restores since its client's last request.
        self.restores = 0
        self.refusal: PSError | None = None
        # Why its worker may not go on; requests that began before end with it.
        self.ended: PSError | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is under way."""
        return self.sequence == self.completed


class Ticket(msgspec.Struct, eq=False):
    """One request that has begun: what it is, and what of it is left to do.

    It holds its session's log, so nobody looks the session up again.

    Threads: `needs` and `mark` take the lock of their unit, all else the one of `begin`.
    """

    id: RequestId
    verdict: Verdict
    session: SessionLog

    @property
    def refusal(self) -> PSError | None:
        """Why this request was refused; None: it was not, or its session has gone on."""
        session = self.session
        if session.refusal is None or session.sequence != self.id.sequence:
            return None
        return session.refusal.again()

    @property
    def overflow(self) -> PSError | None:
        """The first overflow of its updates, also of those that an earlier copy has made."""
        noted = self.session.overflow
        return noted[1].again() if noted is not None and noted[0] == self.id.sequence else None

    def check(self) -> None:
        """Raise StaleGeneration if its worker was fenced since `begin`."""
        if self.session.ended is not None:
            raise self.session.ended.again()

    def needs(self, unit: int) -> bool:
        """Whether this request still has to change this unit.

        False too when the session has gone on to a later request: a late copy changes nothing.

        Raises:
            StaleGeneration: the worker was fenced since `begin`.
        """
        session, sequence = self.session, self.id.sequence
        applied = session.applied  # first: it goes when the session is idle
        if session.ended is not None:
            raise session.ended.again()
        if applied is None or session.sequence != sequence or session.completed >= sequence:
            return False
        return applied[unit] < sequence

    def expect(self, num_units: int) -> None:
        """Say how many units the request changes, before it changes the first."""
        if self.session.sequence == self.id.sequence:
            self.session.num_expected = num_units

    def attach(self, metadata: AttachedMetadata) -> None:
        """Note what the request brings, before it changes its first unit.

        Kept with its session, so what a client leaves that dies in its push goes with that.
        """
        self.session.attached = self.id.sequence, metadata

    def mark(self, unit: int, overflow: PSError | None = None) -> None:
        """Note that the request has changed the unit.

        Args:
            unit: its number in the record.
            overflow: why some elements of it keep their numbers; None: none does.
        """
        if overflow is not None and self.overflow is None:
            self.session.overflow = self.id.sequence, overflow
        applied = self.session.applied
        if applied is not None:  # else the session has gone on, and that is done
            applied[unit] = self.id.sequence

    def num_marked(self, units: Iterable[int]) -> int:
        """Return how many of these units the request has changed."""
        applied = self.session.applied
        return sum(applied[unit] == self.id.sequence for unit in units) if applied else 0

    def complete(self, *, is_update: bool = False) -> None:
        """Note that nothing of this request is left to do.

        Args:
            is_update: it has changed parameters.
        """
        session = self.session
        if self.id.sequence > session.completed:
            session.completed = self.id.sequence
            session.updates += is_update
            session.attached = None

    def refuse(self, error: PSError | None) -> None:
        """Remember why its sender is refused this request; None: it is not, after all."""
        if self.session.sequence == self.id.sequence:
            self.session.refusal = None if error is None else error.again()


class CompletionLog:
    """The record of one server, for the units it owns."""

    def __init__(self, num_units: int) -> None:
        self.is_restored = False
        """Whether it began as a checkpoint's: sessions may be ahead of it."""
        self._num_units = num_units
        self._sessions: dict[WorkerRank, dict[int, SessionLog]] = {}
        self._under_way: dict[WorkerRank, dict[int, SessionLog]] = {}
        """Sessions with `applied`, the oldest first; not those of a checkpoint."""
        self._least: dict[WorkerRank, int] = {}
        self._lost_updates = 0

    @property
    def lost_updates(self) -> int:
        """Acknowledged updates that a restore has undone, of sessions that were heard since."""
        return self._lost_updates

    def begin(self, request: RequestId, acknowledged: int = 0, acked_updates: int = 0) -> Ticket:
        """Note that a request has arrived and say what it is.

        Numbers may be left out: a request can be refused before it comes here.

        Args:
            request: its name.
            acknowledged: the last request whose ack the session has.
            acked_updates: how many of the requests whose ack it has have changed parameters.

        Raises:
            StaleGeneration: a newer attempt of the worker is known, or this one was fenced.
            SequenceGap: this record does not know what was acknowledged: the state was lost.
            PSSettingsError: the worker has too many clients.
        """
        worker, generation, key, sequence = request
        self.hear(worker, generation)
        session = self._sessions.get(worker, _NONE).get(key)
        if session is None or session.generation != generation:
            session = self._open(request)
        session.restores = 0
        if self.is_restored and acked_updates > session.updates:
            self._lost_updates += acked_updates - session.updates
            session.updates = acked_updates
        if sequence <= session.completed or sequence < session.sequence:
            return Ticket(request, Verdict.DUPLICATE, session)
        if sequence == session.sequence:
            return Ticket(request, Verdict.RESUMED, session)
        if acknowledged > session.sequence:
            self._check_jump(request, session, acknowledged)
        if session.applied is None:
            self._make_room(request, session)
        session.may_jump = False
        session.sequence = sequence
        session.num_expected = 0
        session.refusal = None
        return Ticket(request, Verdict.NEW, session)

    def give_up(self, ticket: Ticket, *, is_update: bool) -> None:
        """Note that this request belongs to what a restore has undone: nothing is applied.

        Its sender gets an ack.

        Args:
            ticket: the request.
            is_update: it was to change parameters.
        """
        ticket.complete(is_update=is_update)
        self._lost_updates += is_update

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
                session.ended = replaced(worker, session.generation, least_generation)
                self._under_way.get(worker, _NONE).pop(key, None)
        # A new dict: another thread may be reading the old one for a checkpoint.
        self._sessions[worker] = kept

    def hear(self, worker: WorkerRank, generation: int) -> None:
        """Note that this process of the worker is at work: the older ones are replaced.

        Args:
            worker: rank.
            generation: generation of the process that asks.

        Raises:
            StaleGeneration: it was replaced or fenced itself.
        """
        self.refuse_stale(worker, generation)
        self.fence(worker, generation)

    def refuse_stale(self, worker: WorkerRank, generation: int) -> None:
        """Raise StaleGeneration if a newer attempt of the worker is known, or this was fenced.

        Args:
            worker: rank.
            generation: generation of the process that asks.
        """
        least = self._least.get(worker, 0)
        if generation < least:
            raise replaced(worker, generation, least)

    def generation_of(self, worker: WorkerRank) -> int:
        """The oldest generation that is not refused: the newest one seen, unless fenced beyond."""
        return self._least.get(worker, 0)

    def has_session(self, worker: WorkerRank, least_generation: int) -> bool:
        """Whether an attempt of the worker has sent a numbered request, as one that trains has.

        Args:
            worker: rank.
            least_generation: the oldest attempt that counts.
        """
        sessions = self._sessions.get(worker, _NONE).values()
        return any(session.generation >= least_generation for session in sessions)

    def snapshot(self) -> LogSnapshot:
        """Return the record as it is now, to be read unit by unit; call it as `complete`."""
        live = [
            LiveSession(
                worker,
                record.generation,
                session,
                record.completed,
                record.updates,
                record.restores,
                record.attached,
                record.sequence,
                record.num_expected,
                None if record.is_idle else record.applied,
            )
            for worker, sessions in self._sessions.items()
            for session, record in sessions.items()
        ]
        return LogSnapshot(live, self._num_units)

    def restore(self, sessions: Iterable[SessionRecord]) -> None:
        """Take over the sessions of a checkpoint.

        A session that still lives may be ahead, or have begun since: its first request may jump.
        Those of another run never send again, so their records are left out: ps.server.handlers
        tells runs apart by the cluster's id. Where all runs have one id, the record of a client
        that several servers in a row have not heard is left out.
        """
        self.is_restored = True
        for session in sessions:
            if session.restores >= MAX_RESTORES:
                continue
            if len(session.applied) not in (0, self._num_units):
                raise ServerPhaseError(
                    f"a record of {len(session.applied)} units (buckets and segments) cannot be "
                    f"restored into a shard of {self._num_units}"
                )
            record = SessionLog(session.generation)
            record.applied = array("q", session.applied) if session.applied else None
            record.sequence = max(session.applied, default=session.completed)
            record.completed = min(session.applied, default=session.completed)
            record.updates = session.updates
            record.restores = session.restores + 1
            record.may_jump = True
            self._sessions.setdefault(WorkerRank(session.worker), {})[session.session] = record

    def _open(self, request: RequestId) -> SessionLog:
        """Make a session's log."""
        sessions = self._sessions.setdefault(request.worker, {})
        if len(sessions) >= MAX_SESSIONS:
            raise _too_many(request, MAX_SESSIONS, "clients, closed ones included")
        session = sessions[request.session] = SessionLog(request.generation)
        session.may_jump = self.is_restored  # it may have begun after the save
        return session

    def _make_room(self, request: RequestId, session: SessionLog) -> None:
        """Let a session note what its request changes; an idle one gives its own up for it."""
        under_way = self._under_way.setdefault(request.worker, {})
        if len(under_way) >= MAX_UNDER_WAY:
            idle = next((key for key, each in under_way.items() if each.is_idle), None)
            if idle is None:
                raise _too_many(request, MAX_UNDER_WAY, "clients with a request under way")
            under_way.pop(idle).applied = None
        under_way[request.session] = session
        session.applied = array("q", bytes(8 * self._num_units))

    def _check_jump(self, request: RequestId, session: SessionLog, acknowledged: int) -> None:
        """Without a restore nothing that was acknowledged may be missing."""
        if not session.may_jump:
            raise SequenceGap(
                f"request {acknowledged} of worker {request.worker} was acknowledged, but this "
                f"server knows requests up to {session.sequence}: it was restarted and has lost "
                "updates. Restore the last checkpoint and restart the workers",
                {"worker": str(request.worker), "acknowledged": str(acknowledged)},
            )


_NONE: dict[int, SessionLog] = {}


def _too_many(request: RequestId, limit: int, what: str) -> PSSettingsError:
    return PSSettingsError(
        f"worker {request.worker} (generation {request.generation}) has reached this server's "
        f"limit of {limit:,} {what}: push with one client for the whole run, or start the worker "
        "again with a higher generation",
        {"worker": str(request.worker), "limit": str(limit)},
    )


def replaced(worker: WorkerRank, generation: int, least: int) -> StaleGeneration:
    """The error of a process that is older than the oldest that may act.

    Args:
        worker: rank.
        generation: generation of the process that asks.
        least: the oldest that is not refused.
    """
    return StaleGeneration(
        f"worker {worker} generation {generation} was replaced: the server accepts "
        f"{least} and newer; this process must end",
        {"worker": str(worker), "got": str(generation), "expected": str(least)},
    )
