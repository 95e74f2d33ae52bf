"""The exactly-once record: which request of which worker has already changed which bucket.

Covers: incarnations and fencing, sequence numbers, the state of a half-applied push.
Does not: apply anything (ps.dense), decide when (ps.consistency). Pure: no locks, clock or I/O.
Threads: `begin`, `complete`, `fence` need one lock; `needs` and `mark` the lock of their bucket.

Every request that changes something carries (worker, incarnation, sequence). Per worker and bucket
the record keeps the sequence last applied there:

    applied[b] == sequence   this push has changed bucket b: a retry skips it
    applied[b] <  sequence   it has not yet: a retry applies it
    completed  >= sequence   all of it is done: a retry is answered, nothing is applied

A connection cut in the middle therefore leaves a record from which the retry goes on.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from ps.errors import SequenceGap, StaleIncarnation
from ps.params import WorkerRank

MAX_SEQUENCE = 2**63 - 1

Column = dict[WorkerRank, tuple[int, int]]
"""At one bucket: per worker its incarnation and the sequence last applied there."""


class Verdict(enum.Enum):
    """What a request is, seen from the record."""

    NEW = "new"
    """Its number follows the last one: apply it."""
    RESUMED = "resumed"
    """It came before and was not completed: apply what is missing."""
    REPEATED = "repeated"
    """It was completed, or given up for a later one: answer it, change nothing."""


class WorkerCut(msgspec.Struct, frozen=True):
    """One worker's record as a checkpoint keeps it, cut bucket by bucket with the values."""

    worker: int
    incarnation: int
    applied: tuple[int, ...]
    """Per bucket the sequence last applied there."""


class _Record:
    """What is known of one worker's current incarnation."""

    __slots__ = ("applied", "completed", "incarnation", "may_jump", "sequence")

    def __init__(self, incarnation: int, num_buckets: int) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        self.completed = 0
        self.applied = array("q", bytes(8 * num_buckets))
        # After a restore the worker is ahead of the record: the requests between are lost.
        self.may_jump = False


class AppliedRecord:
    """The record of one server, for the buckets it owns (numbered from 0 in their order here)."""

    def __init__(self, num_buckets: int) -> None:
        self._num_buckets = num_buckets
        self._records: dict[WorkerRank, _Record] = {}
        self._least: dict[WorkerRank, int] = {}
        self._lost_requests = 0

    @property
    def lost_requests(self) -> int:
        """Completed requests that a restore has undone; above 0 means: steps were lost."""
        return self._lost_requests

    def begin(self, worker: WorkerRank, incarnation: int, sequence: int) -> Verdict:
        """Note that a request has arrived and say what it is.

        Raises:
            StaleIncarnation: a newer attempt of the worker is known, or this one was fenced.
            SequenceGap: a request between the last one and this one never arrived.
        """
        record = self._current(worker, incarnation)
        if sequence <= record.completed or sequence < record.sequence:
            return Verdict.REPEATED
        if sequence == record.sequence:
            return Verdict.RESUMED
        expected = record.sequence + 1
        if sequence > expected and not record.may_jump:
            raise SequenceGap(
                f"worker {worker} sent request {sequence}, expected {expected}: "
                "a request between them was lost; restart this worker with a new incarnation",
                {"worker": str(worker), "expected": str(expected), "got": str(sequence)},
            )
        self._lost_requests += sequence - expected
        record.may_jump = False
        record.sequence = sequence
        return Verdict.NEW

    def needs(self, worker: WorkerRank, incarnation: int, sequence: int, bucket: int) -> bool:
        """Whether this request still has to change this bucket.

        False too when the worker has gone on to a later request: a late copy changes nothing.

        Raises:
            StaleIncarnation: the worker was fenced since `begin`.
        """
        record = self._current(worker, incarnation)
        return (
            sequence == record.sequence and max(record.applied[bucket], record.completed) < sequence
        )

    def mark(self, worker: WorkerRank, sequence: int, bucket: int) -> None:
        """Note that the request has changed the bucket; call it under the bucket's lock."""
        self._records[worker].applied[bucket] = sequence

    def complete(self, worker: WorkerRank, incarnation: int, sequence: int) -> None:
        """Note that nothing of this request is left to do."""
        record = self._records[worker]
        if record.incarnation == incarnation:
            record.completed = max(record.completed, sequence)

    def is_complete(self, worker: WorkerRank, incarnation: int, sequence: int) -> bool:
        """Whether this very request has been completed."""
        record = self._records.get(worker)
        if record is None or record.incarnation != incarnation:
            return False
        return record.completed >= sequence

    def fence(self, worker: WorkerRank, least_incarnation: int) -> None:
        """Refuse every incarnation of the worker below `least_incarnation` from now on."""
        self._least[worker] = max(least_incarnation, self._least.get(worker, 0))

    def incarnation_of(self, worker: WorkerRank) -> int:
        """The newest incarnation that is known, 0 before the first request."""
        record = self._records.get(worker)
        return max(record.incarnation if record else 0, self._least.get(worker, 0))

    def applied_at(self, bucket: int) -> Column:
        """What each worker has applied to the bucket; call it under the bucket's lock.

        A checkpoint calls it while it copies that bucket, so values and record are one cut.
        """
        return {
            worker: (record.incarnation, max(record.applied[bucket], record.completed))
            for worker, record in tuple(self._records.items())
        }

    @staticmethod
    def cut(columns: Sequence[Column]) -> tuple[WorkerCut, ...]:
        """Join the answers of `applied_at`, one per bucket in order, to one entry per worker.

        A worker that was replaced meanwhile is kept with its newest incarnation only.
        """
        newest: dict[WorkerRank, int] = {}
        for column in columns:
            for worker, (incarnation, _) in column.items():
                newest[worker] = max(incarnation, newest.get(worker, 0))
        cuts = []
        for worker, incarnation in sorted(newest.items()):
            seen = (column.get(worker, (-1, 0)) for column in columns)
            applied = tuple(sequence if found == incarnation else 0 for found, sequence in seen)
            cuts.append(WorkerCut(worker, incarnation, applied))
        return tuple(cuts)

    def restore(self, cuts: Iterable[WorkerCut]) -> None:
        """Take over the records of a checkpoint of the *same* run.

        The workers may be ahead: the first request of each may jump, and the jump is counted.
        """
        for cut in cuts:
            record = _Record(cut.incarnation, self._num_buckets)
            record.applied = array("q", cut.applied)
            record.sequence = max(cut.applied, default=0)
            record.completed = min(cut.applied, default=0)
            record.may_jump = True
            self._records[WorkerRank(cut.worker)] = record

    def _current(self, worker: WorkerRank, incarnation: int) -> _Record:
        record = self._records.get(worker)
        least = max(record.incarnation if record else 0, self._least.get(worker, 0))
        if incarnation < least:
            raise StaleIncarnation(
                f"worker {worker} incarnation {incarnation} was replaced: the server accepts "
                f"{least} and newer; this process must end",
                {"worker": str(worker), "got": str(incarnation), "expected": str(least)},
            )
        if record is None or record.incarnation < incarnation:
            record = _Record(incarnation, self._num_buckets)
            self._records[worker] = record
        return record
