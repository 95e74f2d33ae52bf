"""Table client: `client.tables.lookup_into`, `.batch`, `.lookup`, `.push`, `.scan`, `.load_rows`.

Covers: the public calls, one request per server for any number of tables.
Does not: put rows into pushes to the groups (ps.client.row_exchange), deduplicate
(ps.tables.routing), number or repeat requests (ps.client.server_group, ps.client.retry).
Runs in: worker processes; drivers for lookup, Spark tasks for scan and load_rows.
Imports numba only when the manifest has tables.
Threads: any; the client's lock makes one call wait for another. `lookup_into`, and in hybrid
`batch`, have connections and a lock of their own: they may wait for a permit that a push of another
thread gives back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ps.client.channel import Channel, OutgoingCall
from ps.client.lookup_batch import OpenBatches, TrainingBatch
from ps.client.row_exchange import Rows, check_rows, ids_of, no_table, rows_of
from ps.client.server_group import ServerGroup, joined
from ps.errors import IdError, PSError, ServerPhaseError, ShapeError
from ps.manifest.manifest import Hyper, Manifest
from ps.manifest.table_spec import MAX_INT64, TableSpec
from ps.optim.clipping import clipped
from ps.protocol import messages
from ps.protocol.messages import Ack, BatchName, Number, RowsLoaded, Scanned
from ps.tables.ids import as_bits, from_bits, shown
from rpc.errors import RpcError

if TYPE_CHECKING:
    from ps.tables.routing import RoutedIds, Router

Array = np.ndarray[Any, Any]


LOAD_BYTES = 8 << 20
"""Ids and rows of one request that loads them."""
GIVE_UP_S = 2.0
"""For each of the two requests by which a client that closes returns its permits."""


class TableClient:
    """The tables of the servers' manifest; belongs to a PSClient, as its `tables`.

    Args:
        servers: the links to the servers.
        lock: held during each call.
        batches: those that are under way, of pushes too.
        before_batch: called before a lookup that begins a batch of hybrid.
    """

    def __init__(
        self,
        servers: ServerGroup,
        lock: threading.RLock,
        batches: OpenBatches,
        before_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self._servers = servers
        self._lock = lock
        self._hash = ""
        self._has_permits = False
        self._lookup_lock = threading.Lock()
        self._batches = batches
        self._before_batch = before_batch
        self._numbers: dict[str, int] = {}
        self._routers: dict[str, Router] = {}

    def adopt(self, manifest: Manifest, digest: str) -> None:
        """Use these tables from now on; loads or compiles what they need.

        Args:
            manifest: names the tables and their rules.
            digest: its hash.
        """
        self._hash = digest
        self._has_permits = manifest.consistency == "hybrid"
        self._numbers = {spec.name: at for at, spec in enumerate(manifest.tables)}
        self._routers = {}
        if not manifest.tables:
            return
        from ps.tables import kernels, routing  # numba

        kernels.warm_client({spec.dtype for spec in manifest.tables})
        num_servers = len(self._servers.links)
        self._routers = {spec.name: routing.Router(spec, num_servers) for spec in manifest.tables}

    def route(self, ids: Mapping[str, ArrayLike]) -> dict[str, RoutedIds]:
        """Deduplicate ids once, for a lookup and the push that follows it.

        Args:
            ids: by name of the table: integers of any shape.

        Raises:
            IdError: not integers, or out of the table's range; names table, value and position.
            ManifestMismatch: there is no such table.
        """
        return {name: self._router(name).route(given) for name, given in ids.items()}

    def lookup(self, ids: Mapping[str, ArrayLike | RoutedIds]) -> dict[str, Array]:
        """Return the rows of ids; changes nothing on the servers.

        Args:
            ids: by name of the table: integers of any shape, or what `route` made of them.

        Returns:
            By name of the table one row per id: an array [*shape of the ids, dim] of its own. An
            id that was never pushed has the values that its row would start with.

        Raises:
            IdError, ManifestMismatch: as `route`.
        """
        routed = self._routed(ids)
        found = self._empty(routed)
        request = messages.Lookup(self._known_hash(), self._order(routed))
        with self._lock:
            self._fill(self._servers, found, request)
        return _expanded(found)

    def lookup_into(self, into: Mapping[str, tuple[RoutedIds, Array]], *, training: bool) -> None:
        """Fill arrays with the rows of distinct ids; changes nothing on the servers.

        It has its own connections, so it waits only for lookups of other threads.

        Args:
            into: by name of the table: what `route` made of the ids, and a writable array
                [num_unique, dim] of the table's dtype in C order, filled in the order of
                `RoutedIds.unique`.
            training: an id without a row reads as the row that it would get, as in `lookup`. In
                hybrid the rows begin a batch: it waits for a permit, as `batch` does, and the push
                with these routed ids as its `table_grads` ends it. False: such an id, also one that
                is not admitted yet, reads as the table's `unseen`.

        Raises:
            ManifestMismatch: there is no such table.
            PSSettingsError, ShapeError: not routed ids, or another array; nothing was sent.
            RequestTimeout, ServerPhaseError, StaleGeneration, WorkerLost: see `batch`.
        """
        for name, (ids, rows) in into.items():
            check_rows(self._spec(name), ids, rows, "into", fills=True)
        routed = {name: ids for name, (ids, _) in into.items()}
        if training and self._has_permits:
            self._begin_batch(routed, into, known_by=list(routed.values()))
            return
        request = messages.Lookup(self._known_hash(), self._order(routed), training)
        servers = self._servers.separate("lookups")
        with self._lookup_lock:
            self._fill(servers, into, request)

    def give_up(self, ids: Mapping[str, RoutedIds]) -> None:
        """Give a batch of `lookup_into` or `next_rows` up: its gradients will not come.

        In hybrid its permit is free with the next lookup, which informs the servers. A batch is
        also given up once nothing refers to its routed ids; tracebacks of errors may do so for a
        while.

        Args:
            ids: by name of the table: the routed ids of the batch.
        """
        if self._has_permits:
            self._batches.end(self._batches.known_by(ids.values()))

    def return_permits(self) -> None:
        """Give all batches up before this client closes; another client of the worker may wait.

        A new batch informs each server that the client's others are over, and ends itself at once.
        A server that is not reached in time keeps their permits. Hold the client's lock.
        """
        servers = self._servers
        if not (self._has_permits and self._batches.have_begun):
            return
        if servers.is_inactive or servers.may_differ:  # it would take a permit, and not end it
            return
        digest, (number, _) = self._known_hash(), self._batches.begin()
        with contextlib.suppress(PSError, RpcError):
            lookups = servers.separate("lookups")
            lookups.close()  # first: a lookup that waits ends by this client's end
            session = lookups.session
            last = messages.LookupBatch(digest, Number(session, number), (), (number,))
            # It is refused where other clients' batches are at the bound.
            with contextlib.suppress(PSError, RpcError):
                calls = [OutgoingCall(link, last) for link in servers.links]
                servers.answers(calls, Ack, timeout_s=GIVE_UP_S, restore_s=0.0)
            name = BatchName(session, number)
            servers.change(
                lambda own: messages.PushRows(digest, own, Hyper(0.0), (), name),
                timeout_s=GIVE_UP_S,
                restore_s=0.0,
            )

    def batch(
        self, ids: Mapping[str, ArrayLike | RoutedIds], *, timeout_s: float | None = None
    ) -> TrainingBatch:
        """Look rows up to train on them: `with tables.batch(ids) as batch: ... batch.push(...)`.

        In hybrid it waits while this worker has `staleness_bound` batches in progress; meanwhile
        another thread may push for them. In other modes it does not wait.

        Args:
            ids: by name of the table: integers of any shape, or what `route` made of them.
            timeout_s: hybrid: seconds to wait; None: the client's own.

        Returns:
            The rows, and the push that belongs to them.

        Raises:
            IdError, ManifestMismatch: as `route`.
            RequestTimeout: hybrid: none of the older batches was over in time.
            ServerPhaseError, StaleGeneration, WorkerLost: hybrid: this worker has left, was
                replaced, or the barrier is broken.
        """
        routed = self._routed(ids)
        if not self._has_permits:
            return TrainingBatch(routed, self.lookup(routed), self._push)
        found = self._empty(routed)
        name = self._begin_batch(routed, found, timeout_s)
        return TrainingBatch(
            routed, _expanded(found), self._push, name, lambda: self._batches.end(name.sequence)
        )

    def push(
        self, grads: Mapping[str, tuple[ArrayLike | RoutedIds, Array]], *, hyper: Hyper
    ) -> Ack:
        """Push gradients of rows; each is applied exactly once, on arrival, in every mode.

        Gradients of equal ids are summed first, so a row is updated once per push; then they are
        clipped if the table's rule says so.

        Args:
            grads: by name of the table (ids, gradients): gradients are [*shape of the ids, dim] of
                the table's dtype.
            hyper: the learning rate of this push.

        Raises:
            IdError, ManifestMismatch: as `route`; nothing was sent.
            ShapeError: gradients of another shape or dtype; nothing was sent.
            NonFiniteGradient, TableFull: a segment of a server refused; that segment is unchanged,
                others may have been updated.
            NonFiniteUpdate: the update of some elements overflows; they keep their numbers, and all
                others are updated.
            PSSettingsError: in hybrid, where rows are pushed only for the batch of their lookup.
            StaleGeneration: a newer attempt of this worker runs: end this process.
            RequestTimeout, ServerGone: whether it was applied is unknown; this client is done.
        """
        return self._push(grads, hyper)

    def scan(
        self, name: str, *, with_slots: bool = False, servers: Collection[int] | None = None
    ) -> Iterator[tuple[Array, Array]]:
        """Give all rows of a table in batches, while training goes on.

        Args:
            name: name of the table.
            with_slots: whether the optimizer's slots follow the values.
            servers: ranks of the servers whose rows to give; None: all.

        Yields:
            (ids, rows): int64[n] (uint64 if the table's ids are) and [n, dim], or
            [n, width], see ps.optim.row_rules; at most 8 MiB of rows. If rows are evicted
            meanwhile, an id may come twice; the later one is newer.

        Raises:
            ManifestMismatch: there is no such table.
            ServerPhaseError: a server was started again between two batches of its rows: a restore
                renumbers them and undoes steps. Scan again from the start.
        """
        spec = self._spec(name)
        for link in self._servers.links:
            if servers is None or link.server in servers:
                yield from self._scan_server(link, spec, with_slots)

    def load_rows(
        self, name: str, ids: ArrayLike, rows: Array, *, named: ArrayLike | None = None
    ) -> int:
        """Create rows with given values and the rule's initial slots, in every mode at once.

        An id that has a row keeps it: a trained row never changes, and loading again changes
        nothing. It needs neither admission nor a permit. A failed call may have created some rows.

        Args:
            name: name of the table.
            ids: [n] integers, each once.
            rows: [n, dim] of the table's dtype.
            named: [n] the ids as messages name them, such as strings; None: as they are.

        Returns:
            Number of new rows. There may be more: rows whose answer was lost with its connection
            count as there before.

        Raises:
            IdError: as `route`, or an id occurs twice; nothing was sent.
            ShapeError: rows of another shape or dtype; nothing was sent.
            NonFiniteGradient: a value is NaN or infinite.
            TableFull: there is no room for the new rows, and no row may be evicted.
            ManifestMismatch: there is no such table.
            StaleGeneration: a newer attempt of this worker runs: end this process.
        """
        router = self._router(name)
        bits = as_bits(router.spec, ids)
        _check_loaded(router.spec, bits, rows)
        _check_once(router.spec, bits, ids if named is None else named)
        at_once = max(1, LOAD_BYTES // (8 + router.spec.value_nbytes))
        added = 0
        for start in range(0, bits.size, at_once):
            some = slice(start, start + at_once)
            added += self._load_some(router, bits[some], rows[some])
        return added

    def _load_some(self, router: Router, bits: Array, rows: Array) -> int:
        spec = router.spec
        routed = router.route(from_bits(spec, bits))
        arranged = np.empty(rows.shape, rows.dtype)
        arranged[routed.inverse] = rows
        request = messages.LoadRows(self._known_hash(), self._numbers[spec.name])
        with self._lock:
            calls = [
                OutgoingCall(
                    link,
                    request,
                    [
                        *ids_of([routed], link.server),
                        *rows_of({spec.name: (routed, arranged)}, link.server),
                    ],
                )
                for link in self._servers.links
                if routed.num_own(link.server)
            ]
            answers = self._servers.answers(calls, RowsLoaded)
        return sum(answer.num_added for answer in answers)

    def _begin_batch(
        self,
        routed: Mapping[str, RoutedIds],
        into: Rows,
        timeout_s: float | None = None,
        known_by: Sequence[RoutedIds] = (),
    ) -> BatchName:
        """Wait for a permit and look the rows up; return the batch's name."""
        self._before_batch()
        servers = self._servers.separate("lookups")
        with self._lookup_lock:
            number, still_open = self._batches.begin(known_by)
            named, order = Number(servers.session, number), self._order(routed)
            request = messages.LookupBatch(self._known_hash(), named, order, still_open)
            try:
                self._fill(servers, into, request, timeout_s=timeout_s)
            except BaseException:
                self._batches.end(number)
                raise
        return BatchName(servers.session, number)

    def _empty(self, routed: Mapping[str, RoutedIds]) -> Rows:
        return {
            name: (ids, np.empty((ids.unique.size, self._spec(name).dim), self._spec(name).dtype))
            for name, ids in routed.items()
        }

    def _fill(
        self,
        servers: ServerGroup,
        into: Rows,
        request: messages.Lookup | messages.LookupBatch,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Ask the servers that hold the ids."""
        routed = [ids for ids, _ in into.values()]
        calls = [
            OutgoingCall(
                link,
                request,
                ids_of(routed, link.server),
                rows_of(into, link.server),
                waits=isinstance(request, messages.LookupBatch),
            )
            for link in servers.links
            if any(ids.num_own(link.server) for ids in routed)
        ]
        servers.answers(calls, Ack, timeout_s=timeout_s)

    def _push(
        self,
        grads: Mapping[str, tuple[Any, Array]],
        hyper: Hyper,
        batch: BatchName | None = None,
    ) -> Ack:
        routed = self._routed({name: ids for name, (ids, _) in grads.items()})
        for name, (_, given) in grads.items():
            self._check_gradients(self._spec(name), routed[name], given)
        summed = {
            name: (routed[name], clipped(self._spec(name).rule, routed[name].summed(given)))
            for name, (_, given) in grads.items()
        }
        payloads = [
            [*ids_of(list(routed.values()), link.server), *rows_of(summed, link.server)]
            for link in self._servers.links
        ]
        with self._lock:
            digest, order = self._known_hash(), self._order(routed)
            acks = self._servers.change(
                lambda number: messages.PushRows(digest, number, hyper, order, batch),
                payloads=payloads,
            )
            return joined(acks)

    def _scan_server(
        self, link: Channel, spec: TableSpec, with_slots: bool
    ) -> Iterator[tuple[Array, Array]]:
        segment, num_segments = 0, 1
        start: int | None = None
        while segment < num_segments:
            stop = MAX_INT64
            while stop:
                batch, scanned = self._scan_some(link, spec, (segment, stop), with_slots)
                if start is None:
                    start = scanned.start
                elif scanned.start != start:
                    raise _started_again(link, spec, start, scanned.start)
                stop, num_segments = scanned.stop, scanned.num_segments
                if batch[0].size:
                    yield batch
            segment += 1

    def _scan_some(
        self, link: Channel, spec: TableSpec, place: tuple[int, int], with_slots: bool
    ) -> tuple[tuple[Array, Array], Scanned]:
        with self._lock:
            request = messages.Scan(
                self._known_hash(), self._numbers[spec.name], *place, with_slots
            )
            call = OutgoingCall(link, request)
            (reply,) = self._servers.send([call])
        scanned = messages.decode_reply(reply.meta, Scanned)
        data = np.frombuffer(reply.payload, np.uint8)
        split = 8 * scanned.num_rows
        rows = data[split:].view(spec.dtype)
        return (
            (
                from_bits(spec, data[:split].view(np.int64)),
                rows.reshape(scanned.num_rows, rows.size // max(1, scanned.num_rows)),
            ),
            scanned,
        )

    def _routed(self, ids: Mapping[str, Any]) -> dict[str, RoutedIds]:
        from ps.tables.routing import RoutedIds

        return {
            name: given if isinstance(given, RoutedIds) else self._router(name).route(given)
            for name, given in ids.items()
        }

    def _router(self, name: str) -> Router:
        self._known_hash()
        if name not in self._routers:
            raise no_table(name, self._routers)
        return self._routers[name]

    def _spec(self, name: str) -> TableSpec:
        return self._router(name).spec

    def _order(self, names: Mapping[str, object]) -> tuple[int, ...]:
        return tuple(self._numbers[name] for name in names)

    def _known_hash(self) -> str:
        if not self._hash:
            raise ServerPhaseError("this client knows no tables yet; call seed() or attach() first")
        return self._hash

    def _check_gradients(self, spec: TableSpec, ids: RoutedIds, grads: Array) -> None:
        expected = (*ids.shape, spec.dim)
        got = f"{type(grads).__name__}"
        if isinstance(grads, np.ndarray):
            if grads.dtype == spec.dtype and grads.shape == expected:
                return
            got = f"{grads.dtype}{list(grads.shape)}"
        raise ShapeError(
            f"table {spec.name!r} takes gradients {spec.dtype}{list(expected)} for these ids, got "
            f"{got}; one row per id"
        )


def _check_loaded(spec: TableSpec, ids: Array, rows: Array) -> None:
    """Refuse rows that do not fit the table.

    Args:
        spec: the table.
        ids: theirs.
        rows: what a program wants to load.
    """
    expected = (*ids.shape, spec.dim)
    got = f"{type(rows).__name__}"
    if isinstance(rows, np.ndarray):
        if ids.ndim == 1 and rows.dtype == spec.dtype and rows.shape == expected:
            return
        got = f"{rows.dtype}{list(rows.shape)}"
    raise ShapeError(
        f"table {spec.name!r} takes rows {spec.dtype}{list(expected)} for these ids "
        f"{list(ids.shape)}, got {got}; pass one row per id, and convert the values yourself, so "
        "that nothing is rounded silently"
    )


def _check_once(spec: TableSpec, bits: Array, named: ArrayLike) -> None:
    """Refuse an id that comes twice, however far apart; names the first in order.

    Args:
        spec: the table.
        bits: [n] int64, of all rows to load.
        named: [n] the ids as messages name them.
    """
    in_order = np.sort(bits)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    if twice.size:
        name = np.asarray(named, object).reshape(-1)[np.argmax(bits == twice[0])]
        first = repr(name) if isinstance(name, str | bytes) else shown(spec, twice[0])
        raise IdError(
            f"table {spec.name!r}: id {first} occurs twice in the rows to load; keep one row of "
            "each id",
            {"table": spec.name, "id": str(first)},
        )


def _started_again(link: Channel, spec: TableSpec, before: int, now: int) -> ServerPhaseError:
    return ServerPhaseError(
        f"ps:{link.server} was started again while table {spec.name!r} was scanned (start "
        f"{before}, now {now}). Its rows are in other places, and steps since its checkpoint are "
        "undone, so the rows before and after do not fit together. Drop them and scan again",
        {"server": str(link.server), "table": spec.name},
    )


def _expanded(found: Rows) -> dict[str, Array]:
    return {name: ids.expand(values) for name, (ids, values) in found.items()}
