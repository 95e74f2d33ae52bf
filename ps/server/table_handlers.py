"""Handlers of requests to tables: lookups out, gradients in, exactly once.

Covers: the data path of lookup, push and scan; payload sizes; what a refused push leaves.
Does not: phases and roles (ps.server.handlers), change rows (ps.tables.table).
Runs in: PS processes.

Threads: one per connection. A segment is the unit of the exactly-once record: its lock makes
"update the rows and note it" one step. No lock is held while a socket is read or written.

    counts, ids ──read──► checked    a segment's gradients ──read──► applied under its lock    …

so a push that was cut in the middle leaves some segments done, and its retry does the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ps.checkpoint.snapshot import CopyOnWrite
from ps.consistency.gate import Gate
from ps.errors import ManifestMismatch, NonFiniteUpdate, PushError, ShapeError
from ps.exactly_once import RequestId, Ticket, Verdict
from ps.manifest.manifest import Hyper
from ps.protocol import messages
from ps.protocol.messages import Ack, BatchName, is_update
from ps.server.request import Incoming, request_id
from ps.stats.counters import Counters
from ps.stats.server_stats import TableStats
from ps.tables.ids import MAX_IDS
from ps.tables.quota import NoRoom
from ps.tables.table import Table

Array = np.ndarray[Any, Any]

SEND_BYTES = 1 << 20
"""Values that are sent while the next ones are gathered."""
SCAN_BYTES = 8 << 20
"""Rows of one answer to a scan."""


@dataclass(frozen=True, slots=True)
class TableLog:
    """What tables use of their shard's exactly-once record."""

    gate: Gate[Any]
    guard: CopyOnWrite
    first_unit: int
    """Number of the first table segment among the record's units; the dense buckets come first."""


class TablePart(NamedTuple):
    """What a request brings for one table."""

    table: Table
    first_unit: int
    """Of the table's segments, in the record."""
    ids: Array
    slices: list[slice]
    """Which of the ids are each segment's."""


@dataclass(slots=True)
class RowsPush:
    """One push of rows that is under way."""

    ticket: Ticket
    hyper: Hyper
    batch: RequestId | None
    """The name of the lookup that it ends."""
    parts: Sequence[TablePart]
    overflow: NonFiniteUpdate | None = None
    """The first one; all segments are updated before the push is refused."""

    @property
    def units(self) -> list[int]:
        """Its segments, by their numbers in the record."""
        return [part.first_unit + at for part in self.parts for at in range(len(part.slices))]


class TableServing:
    """The tables of one server.

    Args:
        tables: its shares, in the order of the manifest.
        table_log: the record and the gate that they share with the dense buckets.
        counters: where to count.
    """

    def __init__(self, tables: Sequence[Table], table_log: TableLog, counters: Counters) -> None:
        self.tables = tuple(tables)
        self._gate = table_log.gate
        self._guard = table_log.guard
        self._counters = counters
        self._first_units: list[int] = []
        unit = table_log.first_unit
        for table in tables:
            self._first_units.append(unit)
            unit += len(table.segments)

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
        else:
            self._scan(call, request)

    def _lookup(self, call: Incoming, request: messages.Lookup | messages.LookupBatch) -> None:
        """Answer with the values of the rows that are asked for, as they are once it may."""
        parts = self._read_ids(call, request)
        if isinstance(request, messages.LookupBatch):
            self._wait_for_permit(call, request)
        ready: list[Array] = []
        num_ready = num_sent = 0
        for part in parts:
            out = np.empty((part.ids.size, part.table.spec.dim), part.table.dtype)
            for at, own in enumerate(part.slices):
                if not part.ids[own].size:
                    continue
                part.table.lookup(at, part.ids[own], out[own])
                ready.append(out[own])
                num_ready += out[own].nbytes
                if num_ready >= SEND_BYTES:
                    call.send(ready)
                    num_sent, num_ready, ready = num_sent + num_ready, 0, []
        call.reply(messages.encode(Ack(self._gate.clock)), ready)
        self._counters.add_received(call.payload_bytes)
        self._counters.add_sent(num_sent + num_ready)

    def _push(self, call: Incoming, request: messages.PushRows) -> None:
        """Update the rows that a push brings gradients for, each once."""
        for at in request.tables:
            self._table(at).check_hyper(request.hyper)
        parts = self._read_ids(call, request)
        sender = request_id(call.peer, request.number)
        batch = _batch_of(sender, request.batch)
        ticket = self._gate.begin(sender, *request.number.acked)
        push = RowsPush(ticket, request.hyper, batch, parts)
        if ticket.verdict is Verdict.DUPLICATE:
            self._counters.count(sender.worker, repeated=1)
            call.discard_rest()
        else:
            if request.tables:  # else a batch is given up, which nothing forbids
                self._gate.rows.admit(ticket, batch)
            ticket.expect(sum(len(part.slices) for part in parts))
            apply_s = 0.0
            try:
                for part in parts:
                    apply_s += self._apply(call, part, push)
                if push.overflow is not None:
                    raise push.overflow
            except PushError as error:
                self._refuse(call, push, error)
            finally:
                self._counters.applied(apply_s, call.payload_bytes)
            if self._gate.rows.applied(ticket, batch, is_update=is_update(request)):
                self._counters.count(sender.worker, table_pushes=1)
        call.reply(messages.encode(Ack(self._gate.clock, applied=True)))

    def _scan(self, call: Incoming, request: messages.Scan) -> None:
        """Answer with some rows of one segment."""
        table = self._table(request.table)
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
        call.reply(messages.encode(messages.Scanned(batch.ids.size, stop)), payload)
        self._counters.add_sent(sum(array.nbytes for array in payload))

    def _apply(self, call: Incoming, part: TablePart, push: RowsPush) -> float:
        """Read the gradients of one table, segment by segment, and apply those that are new.

        Segments without ids count the push too: it is a step of its tables' rule. Returns the
        seconds that the updates took, waits for segments' locks included.
        """
        table, ticket = part.table, push.ticket
        apply_s = 0.0
        for at, own in enumerate(part.slices):
            ids = part.ids[own]
            grads = np.empty((ids.size, table.spec.dim), table.dtype)
            _read_array(call, grads)
            unit = part.first_unit + at
            started_s = time.perf_counter()
            try:
                with table.segments[at].lock:
                    if ticket.needs(unit):
                        self._guard.before(unit)
                        overflow = table.push(at, ids, grads, push.hyper)
                        push.overflow = push.overflow or overflow
                        ticket.mark(unit)
            except NoRoom as error:
                room = table.room_elsewhere(error, part.ids)
                update = partial(table.push, at, ids, grads, push.hyper, room)
                self._apply_in_full(part, at, update, push)
            apply_s += time.perf_counter() - started_s
        return apply_s

    def _apply_in_full(
        self,
        part: TablePart,
        at: int,
        update: Callable[[], NonFiniteUpdate | None],
        push: RowsPush,
    ) -> None:
        """Update rows of segment number `at` where rows of other segments have to go."""
        with part.table.locked():
            if push.ticket.needs(part.first_unit + at):
                for unit in range(len(part.slices)):
                    self._guard.before(part.first_unit + unit)
                overflow = update()
                push.overflow = push.overflow or overflow
                push.ticket.mark(part.first_unit + at)

    def _wait_for_permit(self, call: Incoming, request: messages.LookupBatch) -> None:
        batch, deadline_s = request_id(call.peer, request.number), time.monotonic() + request.wait_s
        self._gate.rows.look_up(batch, request.still_open, deadline_s, call.peer_gone)

    def _refuse(self, call: Incoming, push: RowsPush, error: PushError) -> None:
        """Remember why the push was refused, then say so."""
        sender, units = push.ticket.id, push.units
        changed = push.ticket.num_marked(units)
        refused = type(error)(
            f"{error.message} (worker:{sender.worker}, request {sender.sequence}, which has "
            f"changed {changed} of its {len(units)} segments on this server)",
            {**error.details, "worker": str(sender.worker), "changed_segments": str(changed)},
        )
        self._counters.count(sender.worker, refused=1)
        self._gate.rows.refused(push.ticket, push.batch, refused)
        call.discard_rest()
        raise refused from error

    def _read_ids(self, call: Incoming, request: IdRequest) -> list[TablePart]:
        """Read counts and ids, and check them against the payload and the tables.

        Raises:
            ShapeError: the payload has another size than the counts say.
            ManifestMismatch: there is no such table.
            IdError: an id that its table does not take, or that is not this server's.
        """
        tables = [self._table(number) for number in request.tables]
        if len(set(request.tables)) < len(tables):
            raise ShapeError("a table occurs twice in one request; join its ids")
        counts = np.empty((len(tables), 2), np.int64)
        if call.payload_bytes < counts.nbytes:
            raise ShapeError(
                f"the counts of {len(tables)} tables take {counts.nbytes} bytes, the payload has "
                f"{call.payload_bytes}"
            )
        _read_array(call, counts)
        _check_counts(tables, counts, call.payload_bytes, request)
        ids = np.empty(int(counts[:, 0].sum()), np.int64)
        _read_array(call, ids)
        parts: list[TablePart] = []
        start = 0
        for number, table, (size, given) in zip(
            request.tables, tables, counts.tolist(), strict=True
        ):
            own = ids[start : start + size]
            parts.append(TablePart(table, self._first_units[number], own, table.split(own)))
            table.count(given=given)
            start += size
        return parts

    def _table(self, number: int) -> Table:
        if number >= len(self.tables):
            raise ManifestMismatch(
                f"the manifest has {len(self.tables)} tables, asked was number {number}"
            )
        return self.tables[number]


IdRequest = messages.Lookup | messages.LookupBatch | messages.PushRows
TableRequest = IdRequest | messages.Scan


def _batch_of(sender: RequestId, name: BatchName | None) -> RequestId | None:
    """Return the name of a push's batch as its lookup bore it."""
    if name is None:
        return None
    return sender._replace(session=name.session, sequence=name.sequence)


def _read_array(call: Incoming, array: Array) -> None:
    if array.size:
        call.read_into(array.data.cast("B"))


def _check_counts(
    tables: Sequence[Table],
    counts: Array,
    payload_bytes: int,
    request: IdRequest,
) -> None:
    """Refuse counts that are out of range or do not fit the payload, before memory is taken."""
    sizes: list[int] = counts[:, 0].tolist()
    expected = counts.nbytes
    for table, (size, given) in zip(tables, counts.tolist(), strict=True):
        if not 0 <= size <= MAX_IDS or not 0 <= given <= MAX_IDS:
            raise ShapeError(
                f"table {table.spec.name!r}: {size} ids for {given} in one request; each must be "
                f"in 0..{MAX_IDS}"
            )
        has_gradients = isinstance(request, messages.PushRows)
        expected += size * (8 + has_gradients * table.spec.value_nbytes)
    if payload_bytes != expected:
        raise ShapeError(
            f"{sizes} ids of {len(tables)} tables take {expected} bytes, the payload has "
            f"{payload_bytes}"
        )
