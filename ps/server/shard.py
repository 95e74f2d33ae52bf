"""Serving shard: gradients in, fresh values out, exactly once.

Covers: the data path of push, pull and assign on one server's buckets; what the gate's decisions do
to them.
Does not: phases, roles, membership calls (ps.server.handlers), the layout of payloads
(ps.server.receive), arithmetic (ps.dense.shard, ps.server.reduction), decisions
(ps.consistency.gate).
Runs in: PS processes.

Threads: one per connection calls `push`, `settle`, `pull`, `assign`. A bucket's lock makes "apply
and note it in the record" one step, for late copies of a push and for snapshots. Lock order: the
gate's, then one bucket's; no socket is read under either.

A push in async mode, with `pull`:

    socket ──read──► scratch (512 K) ──apply each bucket──► values ──send 4 MiB parts──► socket

so applying overlaps the receiving of the next bytes (they wait in the socket's buffer) and the
sending of values that are already fresh. In ssp the values of a worker that is ahead go out when it
is released. In sync mode the whole gradient goes to a staging buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from ps.checkpoint.snapshot import CopyOnWrite
from ps.consistency.gate import Gate
from ps.consistency.policy import Policy, PushDecision
from ps.consistency.staleness import slowed
from ps.consistency.waiting import PendingPush
from ps.dense.frozen import FrozenValues
from ps.dense.shard import DenseShard
from ps.dense.staging import StagedGradient, StagingPool
from ps.errors import (
    IdError,
    ManifestMismatch,
    NonFiniteGradient,
    NonFiniteUpdate,
    PackingError,
    PSError,
    PSSettingsError,
    PushError,
    RequestTimeout,
    ServerPhaseError,
    ShapeError,
    TableFull,
)
from ps.exactly_once import CompletionLog, SessionRecord, Verdict
from ps.manifest.manifest import Hyper, Manifest, WorkerRank
from ps.metadata import AttachedMetadata, Metadata
from ps.optim.rules import step_scalars
from ps.protocol import messages
from ps.protocol.messages import Ack
from ps.server.receive import Intake
from ps.server.reduction import Reduction
from ps.server.request import Incoming, attempt_of, request_id
from ps.server.row_updates import PushedRows
from ps.server.snapshot_trigger import SnapshotTrigger
from ps.server.table_handlers import TableRequest, TableServing
from ps.stats.counters import Counters
from ps.tables.table import Table
from rpc.auth.handshake import Role
from rpc.client.connection import Buffer
from rpc.wire.frame import encode_error

Array = np.ndarray[Any, Any]

SEND_BYTES = 4 << 20
"""A part of a push_pull's reply; smaller parts cost a header and a system call each."""

REFUSALS = (NonFiniteGradient, PackingError, TableFull, IdError)
"""Refusals of a push's content: the push counts as present, so barriers stay whole."""


class ServingShard:
    """The buckets of one server, their record and their gate.

    Args:
        dense: values and slots.
        policy: when to apply; see ps.consistency.modes.
        counters: where to count.
        on_failed: called with the reason why the shard cannot go on.
        sessions: the completion log of a restored checkpoint; None: there is none.
        tables: this server's shares of the sparse tables.
    """

    def __init__(
        self,
        dense: DenseShard,
        policy: Policy,
        counters: Counters,
        on_failed: Callable[[str], None],
        sessions: Sequence[SessionRecord] | None,
        tables: Sequence[Table],
    ) -> None:
        self.dense = dense
        self.manifest_hash = dense.manifest.hash()
        self._counts_workers = dense.manifest.consistency == "ssp"
        self._is_staleness_aware = dense.manifest.staleness_aware
        self.failed = on_failed
        self._counters = counters
        self._values = [dense.value_bytes(bucket.id) for bucket in dense.buckets]
        self._values_in = Intake(dense, packed=False)
        self._gradients_in = Intake(dense, packed=True)
        self._pool = StagingPool(dense.buckets, dense.dtype)
        num_units = len(dense.buckets) + sum(len(table.segments) for table in tables)
        self._log = CompletionLog(num_units)
        if sessions is not None:
            self._log.restore(sessions)
        self.gate: Gate[StagedGradient] = Gate(policy, self._log, self)
        self.metadata = Metadata(is_kept=dense.rank == 0)
        self.seed_id = 0
        """See Description."""
        self.resumed_step = -1
        """The checkpoint of an earlier run from which this one goes on; -1: it is a new run."""
        self._guard = CopyOnWrite(dense, tables, self._log, self.metadata)
        # In hybrid a permit bounds the age of rows, so they wait for nobody.
        stages_rows = dense.manifest.consistency == "sync"
        self.tables = TableServing(self.gate, policy, self._guard, counters, waits=stages_rows)
        self.reduction = Reduction(
            dense, self._guard, self._pool, counters, on_failed, self.tables.updates
        )
        self.reduce = self.reduction.reduce
        self.snapshots = SnapshotTrigger(self._guard, self.gate, lambda: self.reduction.is_settled)

    @property
    def manifest(self) -> Manifest:
        """What is trained."""
        return self.dense.manifest

    @property
    def num_changes(self) -> int:
        """Grows with whatever changes what a save holds; see ps.checkpoint.snapshot."""
        return self._guard.num_changes(self.gate.clock)

    @property
    def lost_updates(self) -> int:
        """See ps.exactly_once."""
        return self._log.lost_updates

    def check_manifest(self, manifest_hash: str) -> None:
        """Refuse a caller that means other parameters."""
        if manifest_hash != self.manifest_hash:
            raise ManifestMismatch(
                f"the caller's manifest is {manifest_hash}, this shard's {self.manifest_hash}; "
                "attach() again to get the shard's"
            )

    def take(self, manifest: Manifest, frozen: FrozenValues | None) -> None:
        """See DenseShard.take; the tables have the new LIMITS, too. Hold the barriers open."""
        self.dense.take(manifest, frozen)
        for table, spec in zip(self._guard.tables, self.manifest.tables, strict=True):
            if spec != table.spec:
                table.set_limits(spec)

    def answer_tables(self, call: Incoming, request: TableRequest) -> None:
        """Answer a request to the tables.

        Args:
            call: the request at the listener, which is answered.
            request: its decoded meta.
        """
        self.check_manifest(request.manifest_hash)
        self.tables.answer(call, request)

    def pull(self, call: Incoming, request: messages.Pull) -> None:
        """Answer with the newest values, or with their moving averages.

        Args:
            call: the request at the listener, which is answered.
            request: its decoded meta.
        """
        if request.manifest_hash != self.manifest_hash:
            self.check_manifest(request.manifest_hash)
        clock, averages = self.gate.clock, request.averages
        sent = list(map(self.dense.averages, self.dense.bucket_ids)) if averages else self._values
        call.reply(messages.encode(Ack(clock)), sent)
        self._counters.add_sent(self.dense.value_nbytes)
        if call.peer.role is Role.WORKER and not averages:
            self.gate.pulled(WorkerRank(call.peer.rank), clock)

    def push(self, call: Incoming, request: messages.Push) -> None:
        """Take a gradient (or a null push) and answer when it is part of the parameters.

        In two rounds a push that is refused is answered as others are: its worker settles, too.

        Args:
            call: the request at the listener, which is answered.
            request: its decoded meta.
        """
        rows, number = self._check_push(call, request), request.number
        push: PendingPush[StagedGradient] = PendingPush(
            request_id(call.peer, number),
            request.rows,
            None if request.null else request.hyper,
            acked_clock=number.acked_clock,
            metadata=request.metadata,
            tables=rows,
        )
        try:
            self._push(call, request, push, rows)
        except PSError as error:
            clock = error.details.get(messages.WORKER_CLOCK)
            if clock is None or not self.reduction.in_rounds:
                raise
            call.discard_rest()
            # Rows may be refused alone, and a copy of the request holds no gradient.
            applied = self.reduction.has_part(int(clock), push.id.worker)
            refusal = encode_error(error.code, error.message, error.details)
            ack = Ack(int(clock), applied, worker_clock=int(clock), refusal=refusal)
            ack, answer = self._squares(ack, push, pulls=request.pull)
            self.tables.reply_refused(call, ack, answer, rows)

    def _push(
        self,
        call: Incoming,
        request: messages.Push,
        push: PendingPush[StagedGradient],
        rows: PushedRows | None,
    ) -> None:
        """Take a push, and answer unless it is refused."""
        worker, sent = WorkerRank(call.peer.rank), 0
        deadline_s, number, gate = time.monotonic() + request.wait_s, request.number, self.gate
        try:
            known = gate.begin_push(push, number.acknowledged, number.acked_updates, request.lag)
            if known is not None:
                self._counters.count(worker, repeated=1)
                call.discard_rest()
                push = known
            elif request.null:
                self._counters.count(worker, null_pushes=1)
                push = gate.arrive(push)
            elif push.decision is PushDecision.STAGE:
                push = self._stage(call, push, rows, deadline_s)
            else:
                sent = self._apply_arriving(call, push, rows, deadline_s, pulls=request.pull)
                push = gate.arrive(push)
            clock = push.clock
            if clock is None or push.error is not None:
                with self._counters.waiting(worker):
                    clock = gate.wait(push, deadline_s, call.peer_gone)
        except REFUSALS as error:
            # It counts as present: the worker's next push is for the clock after this one.
            error.details[messages.WORKER_CLOCK] = str(gate.clock_of(worker))
            raise
        except BaseException:
            gate.stop_arriving(push)
            raise
        ack = Ack(
            clock,
            not request.null,
            push.staleness,
            worker_clock=gate.clock_of(worker) if self._counts_workers else clock,
        )
        answer: Sequence[Buffer] = self._values[sent:] if request.pull else ()
        if self.reduction.in_rounds:
            ack, answer = self._squares(ack, push, pulls=request.pull)
        if rows is None:
            call.reply(messages.encode(ack), answer)
        else:
            self.tables.reply(call, ack, answer, rows, push)
        if request.pull and not self.reduction.in_rounds:
            self._counters.add_sent(self.dense.value_nbytes)
            gate.pulled(worker, clock)

    def settle(self, call: Incoming, request: messages.Settle) -> None:
        """Apply what a barrier has reduced, once the squares of all servers are known.

        Args:
            call: the request at the listener, which is answered.
            request: its decoded meta.
        """
        self.check_manifest(request.manifest_hash)
        squares = self._read_squares(call)
        number = request.number
        sender = request_id(call.peer, number)
        overflow: NonFiniteUpdate | None = None
        with self.gate.between_clocks():
            ticket = self.gate.begin(sender, *number.acked)
            if ticket.verdict is not Verdict.DUPLICATE:
                overflow = self.reduction.settle(request.clock, squares, sender.worker)
                ticket.refuse(overflow)
                ticket.complete()
            clock = self.gate.clock
        if overflow is not None:
            raise overflow
        ack = Ack(clock, applied=squares is not None, worker_clock=clock)
        call.reply(messages.encode(ack), self._values if request.pull else ())
        if request.pull:
            self._counters.add_sent(self.dense.value_nbytes)
            self.gate.pulled(sender.worker, clock)

    def assign(self, call: Incoming, request: messages.Assign) -> None:
        """Replace the values by the chief's; between two clocks in sync mode.

        Args:
            call: the request at the listener, which is answered.
            request: its decoded meta.
        """
        self.check_manifest(request.manifest_hash)
        self._values_in.check_size(call.payload_bytes, "assign")
        sender = request_id(call.peer, request.number)
        staged = self._pool.take()
        try:
            self._values_in.stage(call, staged)
            self._counters.add_received(call.payload_bytes)
            with self.gate.between_clocks():
                number = request.number
                ticket = self.gate.begin(sender, *number.acked)
                if ticket.verdict is not Verdict.DUPLICATE:
                    self._set_values(staged)
                    ticket.complete(is_update=True)
        finally:
            self._pool.give(staged)
        call.reply(messages.encode(Ack(self.gate.clock, applied=True)))

    def fill(self, call: Incoming) -> None:
        """Read the first values from a seed's payload; nobody else sees the shard yet."""
        for bucket_id, values in self._values_in.values(call):
            self.dense.check_finite(bucket_id, values)
            self.dense.set_values(bucket_id, values)

    def replace_seed(
        self, call: Incoming, request: messages.Seed, manifest: Manifest, frozen: FrozenValues
    ) -> None:
        """Take the values of a seed instead of one that not all servers have.

        Args:
            call: the request at the listener; what is left of its payload is the values.
            request: its decoded meta.
            manifest: the seed's.
            frozen: the seed's frozen values.

        Raises:
            StaleGeneration: the chief's process was replaced or lost while it brought them.
            ServerPhaseError: the values were trained.
        """
        staged = self._pool.take()
        try:
            self._values_in.stage(call, staged)
            with self.gate.between_clocks():  # no fence comes between
                if (sender := attempt_of(call.peer)) is not None:
                    self.gate.hear(*sender)
                if self.seed_id != request.replaces:
                    return  # a copy of the request was faster
                if self.dense.is_trained:
                    raise self._trained_alone()
                self._set_values(staged)
                self.take(manifest, frozen)
                self.seed_id = request.seed_id
        finally:
            self._pool.give(staged)

    def applied(self, push: PendingPush[StagedGradient]) -> None:
        """See ps.consistency.waiting.Updates."""
        if push.gradient is not None:
            self._pool.give(push.gradient)
            push.gradient = None
        self._counters.count_push(push.id.worker, push.rows, push.staleness)
        if isinstance(push.tables, PushedRows):
            push.tables.gradients.clear()
            if push.tables.parts:
                self._counters.count(push.id.worker, table_pushes=1)
        if push.metadata is not None:
            self._keep_metadata(push, push.metadata)

    def moved(self) -> None:
        """See ps.consistency.waiting.Updates."""
        if self.snapshots.wanted is not None:
            self.snapshots.check()

    def _keep_metadata(self, push: PendingPush[StagedGradient], brought: AttachedMetadata) -> None:
        """Keep what a push brings; where there is no room, its sender and every copy hear so.

        Only ps:0 can refuse it, so it does once the push counts: the other servers take theirs.
        """
        try:
            self.metadata.check_room(brought.name, brought.text)
        except PSSettingsError as error:
            clock = str(self.gate.clock_of(push.id.worker))
            text = f"{error.message}. It is not kept; the push counts at every server"
            push.ticket.refuse(PSSettingsError(text, {messages.WORKER_CLOCK: clock}))
        else:
            self.reduction.keep_metadata(brought)

    def _set_values(self, staged: StagedGradient) -> None:
        for index, bucket in enumerate(self.dense.owned):
            with bucket.lock:
                self._guard.before(index)
                self.dense.set_values(bucket.bucket.id, staged.arrays[index])

    def _trained_alone(self) -> ServerPhaseError:
        return ServerPhaseError(
            f"ps:{self.dense.rank} has trained the values of its seed, but another server was "
            "started again and has lost its parameters. Start new servers, then seed() or "
            "restore() all of them"
        )

    def _squares(
        self, ack: Ack, push: PendingPush[StagedGradient], *, pulls: bool
    ) -> tuple[Ack, Sequence[Buffer]]:
        """Return what answers the first of two rounds, instead of values."""
        is_late = self.gate.has_lost(push)
        squares = None if is_late else self.reduction.squares(ack.clock)
        ack = msgspec.structs.replace(ack, has_squares=squares is not None, is_late=is_late)
        sent = np.zeros(self.reduction.num_squares) if squares is None else squares
        return ack, [sent] if pulls else ()

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

    def _check_push(self, call: Incoming, request: messages.Push) -> PushedRows | None:
        """Refuse what fits no manifest; return the rows that the push brings and asks for."""
        if request.manifest_hash != self.manifest_hash:
            self.check_manifest(request.manifest_hash)
        tables = request.tables
        if request.null:
            return self._check_null(call, request)
        if tables is msgspec.UNSET and call.payload_bytes != self._gradients_in.nbytes:
            self._gradients_in.check_size(call.payload_bytes, "push")
        hyper = request.hyper
        if hyper is None:
            raise PSSettingsError("a push needs the learning rate: send `hyper`, or push_null()")
        if request.rows < 1:
            raise PSSettingsError(f"a push needs at least 1 row, got {request.rows}")
        if hyper.scalars:
            self._check_scalars(hyper)
        if tables is msgspec.UNSET:
            return None
        return self.tables.begin(call, request, tables, self._gradients_in.nbytes)

    def _check_null(self, call: Incoming, request: messages.Push) -> PushedRows | None:
        if request.tables is not msgspec.UNSET and not request.tables.pushed:
            return self.tables.begin(call, request, request.tables, 0)
        if call.payload_bytes:
            raise ShapeError(f"a null push takes no payload, got {call.payload_bytes} bytes")
        return None

    def _check_scalars(self, hyper: Hyper) -> None:
        """Refuse scalars that do not fit rule or mode, before anything is applied."""
        if self._is_staleness_aware:
            raise PSSettingsError(
                "staleness_aware scales a push's learning rate on the server, so a push cannot "
                "bring step scalars; send the learning rate alone"
            )
        for group in self.manifest.groups:
            step_scalars(group.rule, group.name, hyper, 1, np.dtype(group.dtype))

    def _apply_arriving(
        self,
        call: Incoming,
        push: PendingPush[StagedGradient],
        rows: PushedRows | None,
        deadline_s: float,
        *,
        pulls: bool,
    ) -> int:
        """Apply each bucket when it is here, then rows; returns how many values were sent back.

        Raises:
            PushError: the push is refused.
        """
        ticket, hyper = push.ticket, push.hyper or Hyper(0.0)
        hyper = slowed(hyper, push.staleness) if self._is_staleness_aware else hyper
        answers_early = pulls and push.decision is PushDecision.APPLY
        dense, guard, intake = self.dense, self._guard, self._gradients_in
        ticket.expect(len(dense.buckets) + (0 if rows is None else len(rows.units)))
        scratch, unpacked = intake.scratch()
        sent, unsent_bytes, apply_s = 0, 0, 0.0
        try:
            for run in intake.runs:
                call.read_into(scratch.data[: run.nbytes])
                started_s = time.perf_counter()
                for part in run.parts:
                    gradient = scratch[part.start : part.stop]
                    if part.kind == "none":
                        gradient = gradient.view(part.dtype)
                    else:
                        gradient = intake.unpack(part, gradient, unpacked)
                    with part.bucket.lock:
                        if ticket.needs(part.at):
                            if guard.snapshot is not None:
                                guard.before(part.at)
                            ticket.mark(part.at, dense.update(part.bucket, gradient, hyper))
                apply_s += time.perf_counter() - started_s
                unsent_bytes += run.buckets.nbytes
                if answers_early and unsent_bytes >= SEND_BYTES:
                    call.send(self._values[sent : run.buckets.stop])
                    sent, unsent_bytes = run.buckets.stop, 0
            if rows is not None:
                apply_s += self.tables.updates.apply(call, rows, ticket, hyper)
            if (overflow := ticket.overflow) is not None:
                raise overflow
        except REFUSALS as error:
            self._refuse(call, push, error, deadline_s)
        finally:
            self._counters.applied(apply_s, call.payload_bytes)
        return sent

    def _stage(
        self,
        call: Incoming,
        push: PendingPush[StagedGradient],
        rows: PushedRows | None,
        deadline_s: float,
    ) -> PendingPush[StagedGradient]:
        """Receive a whole gradient and bring it to the barrier."""
        staged = self._pool.take()
        try:
            self._gradients_in.stage(call, staged)
            if rows is not None:
                self._take_rows(call, push, rows)
            self._counters.add_received(call.payload_bytes)
        except REFUSALS as error:
            self._pool.give(staged)
            self._refuse(call, push, error, deadline_s)
        push.gradient = staged
        taken = self.gate.arrive(push)
        if taken is not push:
            self._pool.give(staged)
        return taken

    def _take_rows(
        self, call: Incoming, push: PendingPush[StagedGradient], rows: PushedRows
    ) -> None:
        """Receive the rows of a push whose groups wait for the barrier; hybrid's do not."""
        if self.tables.waits:
            self.tables.updates.stage(call, rows)
            return
        ticket, hyper = push.ticket, push.hyper or Hyper(0.0)
        # One more than can be marked: the barrier is what completes it.
        ticket.expect(len(self.dense.buckets) + len(rows.units) + 1)
        self._counters.applied(self.tables.updates.apply(call, rows, ticket, hyper))
        self.tables.end_batch(rows)

    def _refuse(
        self,
        call: Incoming,
        push: PendingPush[StagedGradient],
        error: PushError,
        deadline_s: float,
    ) -> None:
        """Drain and refuse; a barrier counts the push as null.

        The refusal is sent when that barrier is complete, so its worker may push again at once.
        """
        worker, sequence = push.id.worker, push.id.sequence
        call.discard_rest()
        buckets = range(len(self.dense.buckets))
        changed = push.ticket.num_marked(buckets)
        details = {**error.details, "worker": str(worker), "changed_buckets": str(changed)}
        of_tables = ""
        if isinstance(push.tables, PushedRows):
            segments = push.tables.units
            details["changed_segments"] = str(push.ticket.num_marked(segments))
            of_tables = f" and {details['changed_segments']} of the {len(segments)} segments"
            self.tables.end_batch(push.tables, is_refused=True)
        refused = type(error)(
            f"{error.message} (worker:{worker}, request {sequence}, which has changed {changed} of "
            f"the {len(buckets)} buckets{of_tables} of ps:{self.dense.rank})",
            details,
        )
        self._counters.count(worker, refused=1)
        null = self.gate.refuse(push, refused)
        if null is not None:
            try:
                with self._counters.waiting(worker):
                    self.gate.wait(null, deadline_s, call.peer_gone)
            except RequestTimeout:
                raise  # it still stands at the barrier, so its worker must not push beside it
            except PSError:
                pass  # the refusal is the news, not what ended the wait
        raise refused from error
