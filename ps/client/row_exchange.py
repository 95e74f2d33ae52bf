"""Rows in a push: which gradients of rows a push takes along, and which rows it brings back.

Covers: checking and clipping what a program gives, the batches that a push ends and begins, the
payload's part of each server.
Does not: send (ps.client.dense), look up alone (ps.client.tables).
Runs in: worker processes; imports no numba.
Threads: one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ps.client.lookup_batch import OpenBatches
from ps.client.server_group import Buffers, ServerGroup
from ps.errors import ClosedError, ManifestMismatch, PSSettingsError, ShapeError
from ps.manifest.manifest import Manifest
from ps.manifest.table_spec import TableSpec
from ps.optim.clipping import clipped
from ps.protocol.messages import MAX_STAGED_BYTES, BatchName, RowExchange
from rpc.array_bytes import bytes_of

if TYPE_CHECKING:
    from ps.tables.routing import RoutedIds

Array = np.ndarray[Any, Any]
Rows = Mapping[str, "tuple[RoutedIds, Array]"]
"""By name of the table: routed ids, and [num_unique, dim] of the table's dtype."""


BatchTurn = tuple[BatchName | None, BatchName | None, tuple[int, ...]]
"""The batch that a push ends, the one that it begins, and the numbers of those under way."""


@dataclass(frozen=True, slots=True)
class OutgoingRows:
    """The rows of one push, by server."""

    part: RowExchange
    heads: Sequence[Buffers]
    """Counts and ids, before the groups' gradient."""
    gradients: Sequence[Sequence[memoryview]]
    """Behind it."""
    intos: Sequence[Sequence[memoryview]]
    """Where rows go that come back behind the groups' values."""

    def around(self, payloads: Sequence[Buffers]) -> list[Buffers]:
        """Return payloads with the rows' parts; none for a push without a gradient.

        Args:
            payloads: payloads of the groups, one per server, or none.
        """
        dense = payloads or [()] * len(self.heads)
        return [
            [*head, *middle, *rows]
            for head, middle, rows in zip(self.heads, dense, self.gradients, strict=True)
        ]

    def behind(self, intos: Sequence[Sequence[memoryview]]) -> list[Sequence[memoryview]]:
        """Return where the values of the groups go, then the rows.

        Args:
            intos: buffers of the groups, one per server, or none.
        """
        first = intos or [()] * len(self.intos)
        return [[*values, *rows] for values, rows in zip(first, self.intos, strict=True)]

    def given_up(self) -> OutgoingRows:
        """Return what only ends the batch: the push brings no gradient after all."""
        nothing: list[Sequence[memoryview]] = [()] * len(self.heads)
        return OutgoingRows(RowExchange(batch=self.part.batch), nothing, nothing, nothing)


class RowExchanger:
    """Makes the rows' part of one client's pushes.

    Args:
        servers: the links to the servers.
    """

    def __init__(self, servers: ServerGroup) -> None:
        self.batches = OpenBatches()
        """hybrid: the client's batches that are under way."""
        self._servers = servers
        self._consistency = ""
        self._specs: dict[str, TableSpec] = {}
        self._numbers: dict[str, int] = {}

    def adopt(self, manifest: Manifest) -> None:
        """Use these tables from now on."""
        self._consistency = manifest.consistency
        self._specs = {spec.name: spec for spec in manifest.tables}
        self._numbers = {spec.name: at for at, spec in enumerate(manifest.tables)}

    @contextlib.contextmanager
    def exchange(self, grads: Rows | None, wanted: Rows | None) -> Iterator[OutgoingRows]:
        """Give the rows of one push, which is sent within the block.

        Args:
            grads: distinct ids and their summed gradients.
            wanted: distinct ids and the arrays to fill.

        Raises:
            ManifestMismatch, PSSettingsError, ShapeError: as PSClient.push_pull; nothing is sent.
        """
        wanted = wanted or {}
        for name, (ids, rows) in wanted.items():
            check_rows(self._spec(name), ids, rows, "next_rows", fills=True)
        given: dict[str, tuple[RoutedIds, Array]] = {}
        for name, (ids, rows) in (grads or {}).items():
            check_rows(self._spec(name), ids, rows, "table_grads", fills=False)
            given[name] = ids, clipped(self._spec(name).rule, rows)
        if self._consistency == "hybrid":
            with self._turned(given, wanted) as names:
                yield self._outgoing(given, wanted, names)
            return
        found = self._outgoing(given, wanted)
        if self._consistency == "sync":
            check_staged(found.gradients)
        yield found

    @contextlib.contextmanager
    def _turned(self, grads: Rows, wanted: Rows) -> Iterator[BatchTurn]:
        """Name the batch that a push ends, and the one that it begins."""
        ended = self.batches.of(ids for ids, _ in grads.values()) if grads else None
        if grads and ended is None:
            raise PSSettingsError(
                f"hybrid takes gradients of rows ({', '.join(grads)}) only for a batch that was "
                "looked up to train on, and none is in progress: look it up with "
                "tables.lookup_into(training=True), or with next_rows of the previous push"
            )
        begun: int | None = None
        still_open: tuple[int, ...] = ()
        if wanted:
            begun, still_open = self.batches.begin(ids for ids, _ in wanted.values())
        try:
            yield self._name(ended), self._name(begun), still_open
        except BaseException as error:
            self.batches.end(begun)
            if not isinstance(error, (ShapeError, ClosedError)):  # else nothing was sent
                self.batches.end(ended)
            raise
        self.batches.end(ended)

    def _name(self, number: int | None) -> BatchName | None:
        session = self._servers.separate("lookups").session
        return None if number is None else BatchName(session, number)

    def _outgoing(
        self, grads: Rows, wanted: Rows, turn: BatchTurn = (None, None, ())
    ) -> OutgoingRows:
        routed = [ids for ids, _ in (*grads.values(), *wanted.values())]
        servers = range(len(self._servers.links))
        pushed, asked = (tuple(self._numbers[name] for name in rows) for rows in (grads, wanted))
        return OutgoingRows(
            RowExchange(pushed, asked, *turn),
            [ids_of(routed, server) for server in servers],
            [rows_of(grads, server) for server in servers],
            [rows_of(wanted, server) for server in servers],
        )

    def _spec(self, name: str) -> TableSpec:
        spec = self._specs.get(name)
        if spec is None:
            raise no_table(name, self._specs)
        return spec


def no_table(name: str, known: Iterable[str]) -> ManifestMismatch:
    """The error for a table that the manifest does not have.

    Args:
        name: the one that was asked for.
        known: those of the manifest.
    """
    names = ", ".join(map(repr, known)) or "none"
    return ManifestMismatch(f"no table {name!r}; the manifest has {names}")


def check_rows(spec: TableSpec, ids: RoutedIds, rows: Array, what: str, *, fills: bool) -> None:
    """Refuse an array that has not one row for each distinct id.

    Args:
        spec: the table.
        ids: what `route` made of them.
        rows: [num_unique, dim] of the table's dtype, C order.
        what: names the argument in messages.
        fills: whether it will be filled.

    Raises:
        PSSettingsError: the ids were not routed.
        ShapeError: another shape, dtype or order, or it cannot be written where that is needed.
    """
    if not hasattr(ids, "server_ends"):
        raise PSSettingsError(
            f"{what}[{spec.name!r}] takes what client.tables.route returned for the table, got "
            f"{type(ids).__name__}; route the ids first"
        )
    expected = (ids.unique.size, spec.dim)
    got = type(rows).__name__
    if isinstance(rows, np.ndarray):
        flags = rows.flags
        is_usable = flags.c_contiguous and (flags.writeable or not fills)
        if rows.dtype == spec.dtype and rows.shape == expected and is_usable:
            return
        kind = "" if is_usable else ", read-only or not in C order"
        got = f"{rows.dtype}{list(rows.shape)}{kind}"
    raise ShapeError(
        f"{what}[{spec.name!r}] must be {spec.dtype}{list(expected)} in C order, one row per "
        f"distinct id{' and writable' if fills else ''}, got {got}; see RoutedIds.summed and expand"
    )


def check_staged(payloads: Sequence[Sequence[memoryview]]) -> None:
    """Refuse more gradients than a server keeps until the clock.

    Args:
        payloads: payloads of rows, by server.
    """
    for server, views in enumerate(payloads):
        nbytes = sum([view.nbytes for view in views])
        if nbytes > MAX_STAGED_BYTES:
            raise ShapeError(
                f"the gradients of rows for ps:{server} take {nbytes} bytes; in sync they wait "
                f"there for all workers, and the limit is {MAX_STAGED_BYTES}: push fewer ids at "
                "once, add servers, or use hybrid"
            )


def ids_of(routed: Sequence[RoutedIds], server: int) -> list[memoryview]:
    """Return counts and ids as they travel to one server.

    Args:
        routed: one per table.
        server: rank.
    """
    counts = np.array([(ids.num_own(server), ids.given(server)) for ids in routed], np.int64)
    own = [ids.unique[ids.own(server)] for ids in routed]
    return [bytes_of(array) for array in (counts, *own) if array.size]


def rows_of(given: Rows, server: int) -> list[memoryview]:
    """Return the bytes of one server's rows, as views of the arrays.

    Args:
        given: routed ids and arrays.
        server: rank.
    """
    parts = [rows[ids.own(server)] for ids, rows in given.values()]
    return [bytes_of(part) for part in parts if part.size]
