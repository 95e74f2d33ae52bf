"""Handlers of requests to tables: lookups out, gradients in, exactly once.

Covers: the data path of lookup, push, scan and load; the rows of a push to the groups; what a
refused push leaves.
Does not: phases and roles (ps.server.handlers), sizes and ids (ps.server.table_intake), apply
(ps.server.row_updates), change rows (ps.tables.table).
Runs in: PS processes.
Threads: one per connection. No lock is held while a socket is read or written.

    counts, ids ──read──► checked    a segment's gradients ──read──► applied under its lock    …
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ps.checkpoint.snapshot import CopyOnWrite
from ps.consistency.gate import Gate
from ps.consistency.policy import Policy
from ps.consistency.row_gate import LookupTurn, RowGate
from ps.consistency.waiting import PendingPush
from ps.errors import ManifestMismatch, PushError
from ps.exactly_once import RequestId, Ticket, Verdict
from ps.manifest.manifest import Hyper, WorkerRank
from ps.protocol import messages
from ps.protocol.messages import Ack, BatchName, RowExchange, is_update
from ps.server.request import Incoming, request_id
from ps.server.row_updates import PushedRows, RowUpdates
from ps.server.table_intake import TableIntake, TablePart
from ps.stats.counters import Counters
from ps.stats.server_stats import TableStats
from rpc.auth.handshake import Role
from rpc.client.connection import Buffer

Array = np.ndarray[Any, Any]

SEND_BYTES = 1 << 20
"""Values that are sent while the next ones are gathered."""
SCAN_BYTES = 8 << 20
"""Rows of one answer to a scan."""


class TableServing:
    """The tables of one server.

    Args:
        gate: the gate that they share with the dense buckets.
        policy: the gate's.
        guard: has the tables, in the order of the manifest; asked before a segment changes.
        counters: where to count.
        waits: whether the gradients of rows in a push to the groups wait for its clock.
    """

    def __init__(
        self,
        gate: Gate[Any],
        policy: Policy,
        guard: CopyOnWrite,
        counters: Counters,
        *,
        waits: bool,
    ) -> None:
        self.tables = guard.tables
        self.updates = RowUpdates(guard)
        self.waits = waits
        self._intake = TableIntake(guard.tables, first_unit=len(guard.dense.buckets))
        self._gate = gate
        self._rows = RowGate(gate, policy)
        self._counters = counters

    def stats(self) -> tuple[TableStats, ...]:
        """Every table's counters."""
        return tuple(table.stats() for table in self.tables)

    def answer(self, call: Incoming, request: TableRequest) -> None:
        """Answer one request.

        Args:
            call: the request at the listener, which is answered.
            request: its decoded meta.

        Raises:
            PSError: a refused push; its number is done with, and a retry is refused again.
        """
        if isinstance(request, messages.Lookup | messages.LookupBatch):
            self._lookup(call, request)
        elif isinstance(request, messages.PushRows):
            self._push(call, request)
        elif isinstance(request, messages.LoadRows):
            self._load(call, request)
        else:
            self._scan(call, request)

    def begin(
        self, call: Incoming, request: messages.Push, tables: RowExchange, dense_nbytes: int
    ) -> PushedRows:
        """Read which rows a push to the groups brings and asks for, and check all of its sizes.

        Args:
            call: the request, whose payload was not read yet.
            request: its decoded meta.
            tables: what that says of rows.
            dense_nbytes: what the groups take of its payload.

        Raises:
            PushError, PSSettingsError: nothing has changed, and the push has not begun.
        """
        sender = request_id(call.peer, request.number)
        batch = _batch_of(sender, tables.batch)
        if tables.pushed:
            self._check_pushed(tables.pushed, request.hyper or Hyper(0.0))
            self._rows.check_batch(batch)
        parts, wanted = self._intake.read(
            call, tables.pushed, tables.wanted, others_nbytes=dense_nbytes
        )
        following = _batch_of(sender, tables.next_batch)
        lookup = None
        if following is not None:
            lookup = _turn(call, following, tables.still_open, request.wait_s)
        rows = PushedRows(parts, wanted, batch, lookup)
        if self.waits:
            rows.check_staged()
        return rows

    def end_batch(self, rows: PushedRows, *, is_refused: bool = False) -> None:
        """The rows of a push to the groups are applied, or refused: its batch is over.

        Args:
            rows: rows of the push.
            is_refused: whether nobody is answered with further rows.
        """
        following = None if rows.lookup is None or is_refused else rows.lookup.batch
        self._rows.end_batch(rows.batch, following)

    def reply(
        self,
        call: Incoming,
        ack: Ack,
        first: Sequence[Buffer],
        rows: PushedRows,
        push: PendingPush[Any],
    ) -> None:
        """Answer a push to the groups with the rows that it asks for, as they are now.

        Args:
            call: the request at the listener, which is answered.
            ack: the answer.
            first: what comes before the rows.
            rows: rows of the request.
            push: what it is answered with; perhaps begun by an earlier copy of the request.

        Raises:
            NonFiniteUpdate: of rows that were applied before their groups (hybrid), which waited
                for the barrier meanwhile.
            PSError: there is no permit for the next batch, or its worker has left.
        """
        self.end_batch(rows)
        if (overflow := push.ticket.overflow) is not None:
            overflow.details[messages.WORKER_CLOCK] = str(ack.worker_clock)
            push.ticket.refuse(overflow)
            raise overflow
        if rows.lookup is not None:
            self._rows.look_up_next(push.ticket, rows.lookup)
        self._reply_rows(call, messages.encode(ack), first, rows.wanted)

    def reply_refused(
        self, call: Incoming, ack: Ack, first: Sequence[Buffer], rows: PushedRows | None
    ) -> None:
        """Answer a push that was refused; the rows that it asks for come as if for evaluation.

        Args:
            call: the request at the listener, which is answered.
            ack: the answer.
            first: what comes before the rows.
            rows: rows of the request.
        """
        wanted = () if rows is None else rows.wanted
        self._reply_rows(call, messages.encode(ack), first, wanted, training=False)

    def _check_pushed(self, numbers: Sequence[int], hyper: Hyper) -> None:
        for number in numbers:
            self._intake.table(number).check_hyper(hyper)

    def _reply_rows(
        self,
        call: Incoming,
        meta: bytes,
        first: Sequence[Buffer],
        parts: Sequence[TablePart],
        *,
        training: bool = True,
    ) -> None:
        """Send values of rows behind what comes first, and end the reply."""
        ready: list[Buffer] = [*first]
        num_ready = num_sent = 0
        for part in parts:
            if training and call.peer.role is Role.WORKER:
                part.table.staleness.delivered(WorkerRank(call.peer.rank), part.ids)
            out = np.empty((part.ids.size, part.table.spec.dim), part.table.dtype)
            for at, own in enumerate(part.slices):
                if not part.ids[own].size:
                    continue
                part.table.lookup(at, part.ids[own], out[own], training=training)
                ready.append(out[own])
                num_ready += out[own].nbytes
                if num_ready >= SEND_BYTES:
                    call.send(ready)
                    num_sent, num_ready, ready = num_sent + num_ready, 0, []
        call.reply(meta, ready)
        self._counters.add_sent(num_sent + num_ready)

    def _lookup(self, call: Incoming, request: messages.Lookup | messages.LookupBatch) -> None:
        """Answer with the values of the rows that are asked for, as they are once it may."""
        _, parts = self._intake.read(call, wanted=request.tables)
        training = True
        if isinstance(request, messages.LookupBatch):
            batch = request_id(call.peer, request.number)
            self._rows.look_up(_turn(call, batch, request.still_open, request.wait_s))
        else:
            training = request.training
        meta = messages.encode(Ack(self._gate.clock))
        self._counters.add_received(call.payload_bytes)
        self._reply_rows(call, meta, (), parts, training=training)

    def _push(self, call: Incoming, request: messages.PushRows) -> None:
        """Update the rows that a push brings gradients for, each once."""
        self._check_pushed(request.tables, request.hyper)
        parts, _ = self._intake.read(call, request.tables)
        sender = request_id(call.peer, request.number)
        rows = PushedRows(parts, batch=_batch_of(sender, request.batch))
        ticket = self._gate.begin(sender, *request.number.acked)
        if ticket.verdict is Verdict.DUPLICATE:
            self._counters.count(sender.worker, repeated=1)
            call.discard_rest()
        else:
            if request.tables:  # else a batch is given up, which nothing forbids
                self._rows.admit(ticket, rows.batch)
            ticket.expect(len(rows.units))
            apply_s = 0.0
            try:
                apply_s = self.updates.apply(call, rows, ticket, request.hyper)
                if (overflow := ticket.overflow) is not None:
                    raise overflow
            except PushError as error:
                self._refuse(call, ticket, rows, error)
            finally:
                self._counters.applied(apply_s, call.payload_bytes)
            if self._rows.applied(ticket, rows.batch, is_update=is_update(request)):
                self._counters.count(sender.worker, table_pushes=1)
        call.reply(messages.encode(Ack(self._gate.clock, applied=True)))

    def _scan(self, call: Incoming, request: messages.Scan) -> None:
        """Answer with some rows of one segment."""
        table = self._intake.table(request.table)
        if request.segment >= len(table.segments):
            raise ManifestMismatch(
                f"table {table.spec.name!r} has the segments 0..{len(table.segments) - 1} on a "
                f"server, asked was {request.segment}"
            )
        batch, stop = table.dump_some(request.segment, request.stop, SCAN_BYTES)
        rows = batch.rows
        if not request.with_slots:
            rows = np.ascontiguousarray(rows[:, : table.spec.dim])
        payload = [batch.ids, rows] if batch.ids.size else []
        scanned = messages.Scanned(batch.ids.size, stop, len(table.segments), self._counters.start)
        call.reply(messages.encode(scanned), payload)
        self._counters.add_sent(sum(array.nbytes for array in payload))

    def _load(self, call: Incoming, request: messages.LoadRows) -> None:
        """Create the rows that a request brings, where their ids have none."""
        peer = call.peer
        if peer.role is Role.WORKER:
            self._gate.hear(WorkerRank(peer.rank), peer.generation)
        (part,), _ = self._intake.read(call, (request.table,))
        added = self.updates.load(call, part)
        self._counters.add_received(call.payload_bytes)
        call.reply(messages.encode(messages.RowsLoaded(added)))

    def _refuse(self, call: Incoming, ticket: Ticket, rows: PushedRows, error: PushError) -> None:
        """Remember why the push was refused, then say so."""
        sender, units = ticket.id, rows.units
        changed = ticket.num_marked(units)
        refused = type(error)(
            f"{error.message} (worker:{sender.worker}, request {sender.sequence}, which has "
            f"changed {changed} of its {len(units)} segments on this server)",
            {**error.details, "worker": str(sender.worker), "changed_segments": str(changed)},
        )
        self._counters.count(sender.worker, refused=1)
        self._rows.refused(ticket, rows.batch, refused)
        call.discard_rest()
        raise refused from error


TableRequest = (
    messages.Lookup | messages.LookupBatch | messages.PushRows | messages.Scan | messages.LoadRows
)


def _turn(call: Incoming, batch: RequestId, still_open: Sequence[int], wait_s: float) -> LookupTurn:
    return LookupTurn(batch, still_open, time.monotonic() + wait_s, call.peer_gone)


def _batch_of(sender: RequestId, name: BatchName | None) -> RequestId | None:
    """Return the name of a batch as its lookup bore it."""
    if name is None:
        return None
    return sender._replace(session=name.session, sequence=name.sequence)
