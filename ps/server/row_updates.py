"""Gradients of rows: applied segment by segment as they arrive, or staged and reduced at a clock.

Covers: the rows of one push, of whichever request; the weighted sum of several workers' rows; rows
that are loaded with their values.
Does not: begin or answer requests (ps.server.table_handlers, ps.server.shard), change rows
(ps.tables.table), decide (ps.consistency.gate).
Runs in: PS processes.

Threads: one per connection applies; `reduce` runs under the gate's lock. A segment is the unit of
the exactly-once record: its lock makes "update the rows and note it" one step. No socket is read
under it.

    async, ssp, hybrid   a segment's gradients ──read──► applied under its lock    …
    sync                 all gradients ──read──► staged … at the clock: merged, applied once

so a push that was cut in the middle leaves some segments done, and its retry does the others. A
reduction adds up g0 * w0, then + g1 * w1 and so on in the order of ranks, rounded at each step as
in the groups; a worker that did not push an id adds nothing. A single push is taken as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ps.checkpoint.snapshot import CopyOnWrite
from ps.consistency.row_gate import LookupTurn
from ps.errors import IdError, NonFiniteUpdate, PushError, ShapeError
from ps.exactly_once import RequestId, Ticket
from ps.manifest.manifest import Hyper, WorkerRank
from ps.protocol.messages import MAX_STAGED_BYTES
from ps.server.request import Incoming
from ps.server.table_intake import TablePart, read_array
from ps.tables import kernels
from ps.tables.ids import repeated
from ps.tables.quota import NoRoom

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class PushedRows:
    """The rows of one push."""

    parts: Sequence[TablePart]
    """What it brings gradients for."""
    wanted: Sequence[TablePart] = ()
    """What it is answered with."""
    batch: RequestId | None = None
    """The name of the lookup that it ends."""
    lookup: LookupTurn | None = None
    """hybrid: the batch that it begins."""
    gradients: list[Array] = field(default_factory=list)
    """Gradients of each part, [ids, dim], where they wait for a clock."""

    @property
    def units(self) -> list[int]:
        """The segments that it changes, by their numbers in the record."""
        return [part.first_unit + at for part in self.parts for at in range(len(part.slices))]

    def check_staged(self) -> None:
        """Refuse more gradients than may wait for a clock, before memory is taken."""
        nbytes = sum(part.ids.size * part.table.spec.value_nbytes for part in self.parts)
        if nbytes > MAX_STAGED_BYTES:
            raise ShapeError(
                f"a push brings {nbytes} bytes of rows' gradients, which wait for everybody's in "
                f"sync; the limit is {MAX_STAGED_BYTES}: push fewer ids at once, or use hybrid"
            )


class RowUpdates:
    """Changes the rows of one server's tables.

    Args:
        guard: asked before a segment changes.
    """

    def __init__(self, guard: CopyOnWrite) -> None:
        self._guard = guard

    def apply(self, call: Incoming, rows: PushedRows, ticket: Ticket, hyper: Hyper) -> float:
        """Read the gradients of one push, segment by segment, and apply those that are new.

        Segments without ids count the push too: it is a step of its tables' rule.

        Args:
            call: the request, whose ids were read.
            rows: rows of the push.
            ticket: ticket of the push; notes the overflow.
            hyper: learning rate and scalars of the push.

        Returns:
            The seconds that the updates took, waits for segments' locks included.

        Raises:
            PushError: a segment refused its part and is unchanged; the rest is not read.
        """
        apply_s = 0.0
        for part in rows.parts:
            part.table.staleness.pushed(ticket.id.worker, part.ids)
            for at, own in enumerate(part.slices):
                grads = np.empty((own.stop - own.start, part.table.spec.dim), part.table.dtype)
                read_array(call, grads)
                started_s = time.perf_counter()
                self._update(part, at, grads, hyper, ticket)
                apply_s += time.perf_counter() - started_s
            part.table.staleness.updated()
        return apply_s

    def load(self, call: Incoming, part: TablePart) -> int:
        """Read rows, segment by segment, and create those whose ids have none.

        Args:
            call: the request, whose ids were read.
            part: the ids.

        Returns:
            Number of new rows.

        Raises:
            PushError: a segment refused its part and is unchanged; the rest is not read.
        """
        table, added = part.table, 0
        for at, own in enumerate(part.slices):
            ids = part.ids[own]
            rows = np.empty((ids.size, table.spec.dim), table.dtype)
            read_array(call, rows)
            if not ids.size:
                continue
            try:
                with table.segments[at].lock:
                    self._guard.before(part.first_unit + at)
                    added += table.load_new(at, ids, rows)
                continue
            except NoRoom as error:  # rows of other segments have to go
                room = table.room_elsewhere(error, part.ids, ids)
            with table.locked():
                for unit in range(len(part.slices)):
                    self._guard.before(part.first_unit + unit)
                added += table.load_new(at, ids, rows, room)
        return added

    def stage(self, call: Incoming, rows: PushedRows) -> None:
        """Read the gradients of one push and keep them with it.

        Args:
            call: the request, whose ids were read.
            rows: rows of the push; takes the gradients.

        Raises:
            NonFiniteGradient: the rest of the payload is not read.
        """
        for part in rows.parts:
            grads = np.empty((part.ids.size, part.table.spec.dim), part.table.dtype)
            read_array(call, grads)
            part.table.check_finite(part.ids, grads)
            rows.gradients.append(grads)
            part.table.staleness.pushed(WorkerRank(call.peer.rank), part.ids)

    def reduce(
        self, staged: Sequence[PushedRows | None], weights: Sequence[float], hyper: Hyper
    ) -> PushError | None:
        """Apply the staged gradients of one clock: one update of each table that any push names.

        Args:
            staged: rows of the clock's pushes in the order of ranks; None: one brings none.
            weights: weight of each push.
            hyper: learning rate and scalars of this clock's update.

        Returns:
            Why some rows are unchanged, or some elements; the first reason, all others are updated.
        """
        terms: dict[int, list[_Term]] = {}
        for rows, weight in zip(staged, weights, strict=True):
            if rows is not None:
                for part, grads in zip(rows.parts, rows.gradients, strict=True):
                    terms.setdefault(part.first_unit, []).append(_Term(part, grads, weight))
        refused: PushError | None = None
        for first_unit in sorted(terms):
            of_table = terms[first_unit]
            try:
                part, grads = of_table[0][:2] if len(staged) == 1 else _weighted_sum(of_table)
            except IdError as error:
                refused = refused or error
                continue
            for at, own in enumerate(part.slices):
                try:
                    overflow = self._update(part, at, grads[own], hyper)
                except PushError as error:
                    refused = refused or error
                else:
                    refused = refused or overflow
            part.table.staleness.updated()
        return refused

    def _update(
        self, part: TablePart, at: int, grads: Array, hyper: Hyper, ticket: Ticket | None = None
    ) -> NonFiniteUpdate | None:
        """Update rows of segment number `at`, unless that is done; raises as Table.push."""
        table, first = part.table, part.first_unit
        ids = part.ids[part.slices[at]]
        try:
            with table.segments[at].lock:
                if ticket is not None and not ticket.needs(first + at):
                    return None
                self._guard.before(first + at)
                overflow = table.push(at, ids, grads, hyper)
                if ticket is not None:
                    ticket.mark(first + at, overflow)
                return overflow
        except NoRoom as error:  # rows of other segments have to go
            room = table.room_elsewhere(error, part.ids)
        with table.locked():
            if ticket is not None and not ticket.needs(first + at):
                return None
            for unit in range(len(part.slices)):
                self._guard.before(first + unit)
            overflow = table.push(at, ids, grads, hyper, room)
            if ticket is not None:
                ticket.mark(first + at, overflow)
            return overflow


class _Term(NamedTuple):
    """One push's part of a table's sum."""

    part: TablePart
    grads: Array
    weight: float


def _weighted_sum(terms: Sequence[_Term]) -> tuple[TablePart, Array]:
    """Return each id of these pushes once, and its weighted sum: [num_unique, dim].

    Raises:
        IdError: an id occurs twice in one push.
    """
    first = terms[0].part
    table = first.table
    ids, inverse = table.merged([term.part.ids for term in terms])
    total = np.zeros((ids.size, table.spec.dim), table.dtype)
    last = np.full(ids.size, -1, np.int32)
    start = 0
    for number, (part, grads, weight) in enumerate(terms):
        places = inverse[start : start + part.ids.size]
        factor = np.array([weight], table.dtype)
        bad = kernels.add_weighted(grads, places, factor, last, number, total)
        if bad >= 0:
            raise repeated(table.spec, part.ids[bad])
        start += part.ids.size
    return TablePart(table, first.first_unit, ids, table.split(ids)), total
