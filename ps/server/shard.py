"""A seeded shard at work: gradients in, fresh values out, exactly once.

Covers: the data path of push, pull and assign on one server's buckets.
Does not: phases, roles, membership calls (ps.server.handlers), reading of payloads
(ps.server.receive), arithmetic
(ps.dense.shard, ps.server.reduction), decisions (ps.consistency.gate).
Runs in: PS processes.

Threads: one per connection calls `push`, `settle`, `pull`, `assign`. A bucket's lock here makes
"apply and note it in the record" one step, for late copies of a push and for checkpoints;
ps.dense.shard
has its own locks below it. Lock order: the gate's, a bucket's here, the bucket's in ps.dense.shard.

A push in async mode, with `pull`:

    socket ──read──► scratch (512 K) ──apply each bucket──► values ──send 4 MiB parts──► socket

so applying overlaps the receiving of the next bytes (they wait in the socket's buffer) and the
sending of values that are already fresh. In ssp the values of a worker that is ahead go out when it
is released. In sync mode the whole gradient goes to a staging buffer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from ps.checkpoint.snapshot import CopyOnWrite
from ps.consistency.asp import slowed
from ps.consistency.gate import Gate
from ps.consistency.policy import Policy, PushDecision
from ps.consistency.waiting import Contributions, PendingPush
from ps.dense.shard import DenseShard
from ps.dense.staging import StagedGradient, StagingPool
from ps.errors import (
    ManifestMismatch,
    NonFiniteGradient,
    PackingError,
    PSError,
    PSSettingsError,
    ShapeError,
)
from ps.exactly_once import CompletionLog, RequestId, SessionCut, Verdict
from ps.manifest.manifest import Hyper, Manifest, WorkerRank
from ps.metadata import Metadata
from ps.optim.rules import step_scalars
from ps.protocol import messages
from ps.protocol.messages import Ack
from ps.server.receive import BucketPart, Intake
from ps.server.reduction import Reduction
from ps.server.request import Incoming, request_id
from ps.server.snapshot_trigger import SnapshotTrigger
from ps.server.table_handlers import TableLog, TableRequest, TableServing
from ps.stats.counters import Counters
from ps.tables.table import Table
from rpc.auth.handshake import Role

Array = np.ndarray[Any, Any]

SEND_BYTES = 4 << 20
"""A part of a push_pull's reply; smaller parts cost a header and a system call each."""


class ServingShard:
    """The buckets of one server, their record and their gate.

    Args:
        dense: values and slots.
        policy: when to apply; see ps.consistency.asp.
        counters: where to count.
        on_failed: told why the shard cannot go on.
        cuts: the exactly-once record of a restored checkpoint; None: there is none to go on from.
        tables: this server's shares of the sparse tables.
    """

    def __init__(
        self,
        dense: DenseShard,
        policy: Policy,
        counters: Counters,
        on_failed: Callable[[str], None],
        cuts: Sequence[SessionCut] | None = None,
        tables: Sequence[Table] = (),
    ) -> None:
        self.dense = dense
        self.manifest_hash = dense.manifest.hash()
        self._counts_workers = dense.manifest.consistency == "ssp"
        self._counters = counters
        self._values = [dense.value_bytes(bucket.id) for bucket in dense.buckets]
        self._values_in = Intake(dense, packed=False)
        self._gradients_in = Intake(dense, packed=True)
        self._pool = StagingPool(dense.buckets, dense.dtype)
        num_units = len(dense.buckets) + sum(len(table.segments) for table in tables)
        self._record = CompletionLog(num_units)
        if cuts is not None:
            self._record.restore(cuts)
        self.gate: Gate[StagedGradient] = Gate(
            policy, self._record, self._reduce, self._count, on_failed
        )
        self.notes = Metadata(is_kept=dense.rank == 0)
        self._guard = CopyOnWrite(dense, tables, self._record, self.notes)
        notebook = TableLog(self._record, self.gate, self._guard, first_unit=len(dense.buckets))
        self.tables = TableServing(tables, notebook, counters)
        self.reduction = Reduction(dense, self._guard, self._pool, counters, on_failed)
        self.cutting = SnapshotTrigger(self._guard, self.gate, lambda: self.reduction.is_settled)

    @property
    def manifest(self) -> Manifest:
        """What is trained."""
        return self.dense.manifest

    @property
    def num_changes(self) -> int:
        """Grows with whatever changes what a save holds; see ps.checkpoint.snapshot."""
        return self._guard.num_changes(self.gate.clock)

    @property
    def lost_requests(self) -> int:
        """See ps.exactly_once."""
        return self._record.lost_requests

    def check_manifest(self, manifest_hash: str) -> None:
        """Refuse a caller that means other parameters."""
        if manifest_hash != self.manifest_hash:
            raise ManifestMismatch(
                f"the caller's manifest is {manifest_hash}, this shard's {self.manifest_hash}; "
                "attach() again to get the shard's"
            )

    def answer_tables(self, call: Incoming, request: TableRequest) -> None:
        """Answer a request to the tables."""
        self.check_manifest(request.manifest_hash)
        self.tables.answer(call, request)

    def pull(self, call: Incoming, request: messages.Pull) -> None:
        """Answer with the newest values, or with their moving averages."""
        self.check_manifest(request.manifest_hash)
        clock, averages = self.gate.clock, request.averages
        told = list(map(self.dense.averages, self.dense.bucket_ids)) if averages else self._values
        call.reply(messages.encode(Ack(clock)), told)
        self._counters.add(bytes_out=self.dense.value_nbytes)
        if call.peer.role is Role.WORKER and not averages:
            self.gate.pulled(WorkerRank(call.peer.rank), clock)

    def push(self, call: Incoming, request: messages.Push) -> None:
        """Take a gradient (or a null push) and answer when it is part of the parameters."""
        self._check_push(call, request)
        deadline_s = time.monotonic() + request.wait_s
        sender = request_id(call.peer, request.number)
        number = request.number
        verdict, arrival = self.gate.begin(
            sender, number.acknowledged, number.acked_clock, is_push=True
        )
        is_known = verdict is Verdict.DUPLICATE or arrival is not None
        admission = None if is_known else self.gate.admit(sender)
        # After the admission, so that two pushes that arrive together each see the other.
        staleness = self.gate.staleness_of(sender.worker, request.lag)
        sent = 0
        if is_known:
            self._counters.count(sender.worker, repeated=1)
            call.discard_rest()
            arrival = arrival or self._arrival(sender, request, clock=self.gate.clock)
        elif request.null:
            self._counters.count(sender.worker, null_pushes=1)
            arrival = self.gate.arrive(self._arrival(sender, request))
        elif admission is PushDecision.STAGE:
            arrival = self._stage(call, request, sender, deadline_s)
        else:
            request = self._slowed(request, staleness)
            early = request.pull and admission is PushDecision.APPLY
            sent = self._apply_arriving(call, request, sender, deadline_s, answers_early=early)
            arrival = self.gate.arrive(self._arrival(sender, request, staleness=staleness))
        clock = self._wait(call, arrival, deadline_s)
        worker_clock = self.gate.clock_of(sender.worker) if self._counts_workers else clock
        ack = Ack(clock, not request.null, staleness, worker_clock=worker_clock)
        if self.reduction.in_rounds:
            self._reply_squares(call, request, ack)
            return
        rest = self._values[sent:] if request.pull else ()
        call.reply(messages.encode(ack), rest)
        if request.pull:
            self._counters.add(bytes_out=self.dense.value_nbytes)
            self.gate.pulled(sender.worker, clock)

    def settle(self, call: Incoming, request: messages.Settle) -> None:
        """Apply what a barrier has reduced, once the squares of all servers are known."""
        self.check_manifest(request.manifest_hash)
        squares = self._read_squares(call)
        sender = request_id(call.peer, request.number)
        number = request.number
        with self.gate.between_clocks():
            verdict, _ = self.gate.begin(sender, number.acknowledged, number.acked_clock)
            if verdict is not Verdict.DUPLICATE:
                self.reduction.settle(request.clock, squares)
                self._record.complete(sender)
            clock = self.gate.clock
        ack = Ack(clock, applied=squares is not None, worker_clock=clock)
        call.reply(messages.encode(ack), self._values if request.pull else ())
        if request.pull:
            self._counters.add(bytes_out=self.dense.value_nbytes)
            self.gate.pulled(sender.worker, clock)

    def assign(self, call: Incoming, request: messages.Assign) -> None:
        """Replace the values by the chief's; between two clocks in sync mode."""
        self.check_manifest(request.manifest_hash)
        self._values_in.check_size(call.payload_bytes, "assign")
        sender = request_id(call.peer, request.number)
        staged = self._pool.take()
        try:
            self._values_in.stage(call, staged)
            self._counters.add(bytes_in=call.payload_bytes)
            with self.gate.between_clocks():
                number = request.number
                verdict, _ = self.gate.begin(sender, number.acknowledged, number.acked_clock)
                if verdict is not Verdict.DUPLICATE:
                    for index, array in enumerate(staged.arrays):
                        with self._guard.locks[index]:
                            self._guard.before(index)
                            self.dense.set_values(self.dense.buckets[index].id, array)
                    self._record.complete(sender)
        finally:
            self._pool.give(staged)
        call.reply(messages.encode(Ack(self.gate.clock, applied=True)))

    def fill(self, call: Incoming) -> None:
        """Read the first values from a seed's payload; nobody else sees the shard yet."""
        for _, parts in self._values_in.runs(call):
            for part in parts:
                self.dense.check_finite(part.bucket.id, part.array)
                self.dense.set_values(part.bucket.id, part.array)

    def _reply_squares(self, call: Incoming, request: messages.Push, ack: Ack) -> None:
        squares = self.reduction.squares(ack.clock)
        ack = msgspec.structs.replace(ack, has_squares=squares is not None)
        told = np.zeros(self.reduction.num_squares) if squares is None else squares
        call.reply(messages.encode(ack), [told] if request.pull else ())

    def _read_squares(self, call: Incoming) -> Array | None:
        if not call.payload_bytes:
            return None
        squares = np.empty(self.reduction.num_squares, np.float64)
        if call.payload_bytes != squares.nbytes:
            raise ShapeError(
                f"settle brought {call.payload_bytes} bytes, this shard takes {squares.nbytes}: "
                "one float64 per parameter that is clipped by norm"
            )
        call.read_into(squares.data.cast("B"))
        self.reduction.check(squares)
        return squares

    def _check_push(self, call: Incoming, request: messages.Push) -> None:
        self.check_manifest(request.manifest_hash)
        if request.null:
            if call.payload_bytes:
                raise ShapeError(f"a null push takes no payload, got {call.payload_bytes} bytes")
            return
        self._gradients_in.check_size(call.payload_bytes, "push")
        if request.hyper is None:
            raise PSSettingsError("a push needs the learning rate: send `hyper`, or push_null()")
        if request.rows < 1:
            raise PSSettingsError(f"a push stands for at least 1 row, got {request.rows}")
        if request.note is not None:
            self.notes.check_room(request.note.name, request.note.text)
        self._check_hyper(request.hyper)

    def _check_hyper(self, hyper: Hyper) -> None:
        """Refuse scalars that do not fit rule or mode, before anything is applied."""
        if hyper.scalars and self.manifest.staleness_aware:
            raise PSSettingsError(
                "staleness_aware scales a push's learning rate on the server, so its step scalars "
                "cannot come with it; send the learning rate alone"
            )
        for group in self.manifest.groups if hyper.scalars else ():
            step_scalars(group.rule, group.name, hyper, 1, np.dtype(group.dtype))

    def _slowed(self, request: messages.Push, staleness: int) -> messages.Push:
        if not self.manifest.staleness_aware or request.hyper is None:
            return request
        return msgspec.structs.replace(request, hyper=slowed(request.hyper, staleness))

    def _apply_arriving(
        self,
        call: Incoming,
        request: messages.Push,
        sender: RequestId,
        deadline_s: float,
        *,
        answers_early: bool,
    ) -> int:
        """Apply each bucket when it is here; returns how many buckets' values were sent back."""
        hyper = request.hyper or Hyper(0.0)
        if request.note is not None:
            self.notes.expect(sender.session, sender.sequence, request.note)
        sent, unsent_bytes, apply_s = 0, 0, 0.0
        try:
            for run, parts in self._gradients_in.runs(call):
                started_s = time.perf_counter()
                self._apply_parts(parts, hyper, sender)
                apply_s += time.perf_counter() - started_s
                unsent_bytes += run.nbytes
                if answers_early and unsent_bytes >= SEND_BYTES:
                    call.send(self._values[sent : run.stop])
                    sent, unsent_bytes = run.stop, 0
        except (NonFiniteGradient, PackingError) as error:
            self._refuse(call, self._arrival(sender, request), error, deadline_s)
        finally:
            self._counters.applied(apply_s, call.payload_bytes)
        return sent

    def _apply_parts(self, parts: Iterator[BucketPart], hyper: Hyper, sender: RequestId) -> None:
        for part in parts:
            with self._guard.locks[part.index]:
                if self._record.needs(sender, part.index):
                    self._guard.before(part.index)
                    self.dense.apply(part.bucket.id, part.array, hyper)
                    self._record.mark(sender, part.index)

    def _stage(
        self, call: Incoming, request: messages.Push, sender: RequestId, deadline_s: float
    ) -> PendingPush[StagedGradient]:
        """Receive a whole gradient and bring it to the barrier."""
        staged = self._pool.take()
        arrival = self._arrival(sender, request, gradient=staged)
        try:
            self._gradients_in.stage(call, staged)
            self._counters.add(bytes_in=call.payload_bytes)
        except (NonFiniteGradient, PackingError) as error:
            self._pool.give(staged)
            self._refuse(call, self._arrival(sender, request), error, deadline_s)
        taken = self.gate.arrive(arrival)
        if taken is not arrival:
            self._pool.give(staged)
        return taken

    def _refuse(
        self,
        call: Incoming,
        arrival: PendingPush[StagedGradient],
        error: NonFiniteGradient | PackingError,
        deadline_s: float,
    ) -> None:
        """Drain and refuse: the bucket is unchanged, and a barrier counts the push as null.

        The refusal is told when that barrier is complete, so its worker may push again at once.
        """
        call.discard_rest()
        refused = type(error)(
            f"{error.message} (worker:{arrival.id.worker}, request {arrival.id.sequence})",
            {**error.details, "worker": str(arrival.id.worker)},
        )
        self._counters.count(arrival.id.worker, refused=1)
        null = self.gate.refuse(arrival, refused)
        if null is not None:
            with contextlib.suppress(PSError):  # the refusal is the news, not what ended the wait
                self._wait(call, null, deadline_s)
        raise refused from error

    def _wait(self, call: Incoming, arrival: PendingPush[StagedGradient], deadline_s: float) -> int:
        if arrival.is_done and arrival.error is None:
            return arrival.clock or 0
        with self._counters.waiting(arrival.id.worker):
            return self.gate.wait(arrival, deadline_s, call.peer_gone)

    def _arrival(
        self,
        sender: RequestId,
        request: messages.Push,
        *,
        gradient: StagedGradient | None = None,
        clock: int | None = None,
        staleness: int = 0,
    ) -> PendingPush[StagedGradient]:
        return PendingPush(
            sender,
            request.rows,
            None if request.null else request.hyper,
            gradient,
            staleness=staleness,
            acked_clock=request.number.acked_clock,
            note=request.note,
            clock=clock,
        )

    def _reduce(self, staged: Contributions[StagedGradient]) -> None:
        self.reduction.reduce(staged, self.gate.clock)

    def _count(self, arrival: PendingPush[StagedGradient]) -> None:
        if arrival.gradient is not None:
            self._pool.give(arrival.gradient)
            arrival.gradient = None
        self._counters.count_push(arrival.id.worker, arrival.rows, arrival.staleness)
        if arrival.note is not None:
            self.notes.put_pushed(arrival.id.session, arrival.note)
