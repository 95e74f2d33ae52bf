"""Sparse table: one server's share, its segments, and operations over all of them.

Covers: the ids of this server, lookup and push by segment, copying rows out and in, counters.
Does not: change rows itself (ps.tables.segment), answer requests (ps.server.table_handlers).
Runs in: PS processes.
Threads: any; each segment has a lock. A call that needs several takes all, in their order
(`locked`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ps.errors import IdError, NonFiniteGradient, NonFiniteUpdate
from ps.manifest.manifest import Hyper, Manifest, TableSpec
from ps.manifest.rule_spec import Moments
from ps.manifest.table_spec import MOST_CHOSEN_SEGMENTS
from ps.optim import kernels
from ps.optim.row_rules import row_hyper, row_scalars, row_starts, row_width
from ps.optim.rules import stands_still
from ps.stats.server_stats import TableStats
from ps.tables import kernels as table_kernels
from ps.tables.deliveries import RowStaleness
from ps.tables.eviction import lru_victims
from ps.tables.hash_index import new_key
from ps.tables.ids import shown
from ps.tables.kernels import NUM_BUCKETS
from ps.tables.quota import Elsewhere, NoRoom, Quota
from ps.tables.routing import arranged, parts_of_buckets
from ps.tables.rows import ROWS_AT_ONCE, RowBatch
from ps.tables.segment import EVICTED_SHARE, Pushed, Segment

Array = np.ndarray[Any, Any]


def warm_for(spec: TableSpec) -> Any:
    """Load or compile all that a server calls for such a table; return the rule's kernel."""
    table_kernels.warm_server([spec.dtype])
    kernels.warm([("largest_masked", spec.dtype)])
    return kernels.sparse_for(spec.rule, spec.dtype, row_steps=spec.row_steps)


class Table:
    """A table's rows on one server.

    The constructor loads or compiles the kernels that it needs.

    Args:
        spec: the table.
        rank: this server's rank.
        num_servers: servers that share the table.
        segments: of this share, if its TableSpec leaves them open; None: by the machine's cores.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        rank: int,
        num_servers: int,
        segments: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.dtype: np.dtype[Any] = np.dtype(spec.dtype)
        self._update = warm_for(spec)
        num_segments = spec.segments or segments or segments_for(available_cores())
        self._parts = parts_of_buckets(num_servers, num_segments)
        self._first_part = rank * num_segments
        owned = np.count_nonzero(self._parts // num_segments == rank)
        row_nbytes = row_width(spec) * spec.itemsize
        self._server = f"ps:{rank}"
        self._quota = Quota(spec, row_nbytes, owned / NUM_BUCKETS, self._server)
        self.has_left_out = False
        """Whether a checkpoint had more rows than the limit."""
        self._spare = 0
        """Rows above the limit that a restore may hold while it reads: finding the oldest takes a
        pass over all."""
        if spec.when_full == "lru":
            self._spare = max(ROWS_AT_ONCE, (self._quota.limit or 0) // EVICTED_SHARE)
        self.segments = tuple(
            Segment(spec, row_starts(spec), self._quota, clock, num_segments=num_segments)
            for _ in range(num_segments)
        )
        self.staleness = RowStaleness()
        self._key = new_key()
        self._count_lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._last_scalars: tuple[float, Array] | None = None

    def set_limits(self, spec: TableSpec) -> None:
        """Have this table's LIMITS. Rows above them go with the next pushes, if the table evicts.

        Args:
            spec: this table, with other LIMITS.
        """
        with self.locked():
            self.spec = spec
            self._quota.set_limits(spec)
            for segment in self.segments:
                segment.set_limits(spec)

    @property
    def num_rows(self) -> int:
        """Rows on this server."""
        return self._quota.used

    @property
    def nbytes(self) -> int:
        """Bytes of the rows with their ids, versions and index."""
        return sum(segment.nbytes for segment in self.segments)

    def split(self, ids: Array) -> list[slice]:
        """Return the slice of each segment in these ids.

        Args:
            ids: [n] int64, sorted by part.

        Raises:
            IdError: an id is too large, is another server's, or out of order.
        """
        ends = np.empty(len(self.segments), np.int64)
        bits = self.spec.largest_id
        largest = bits - 2**64 if bits >= 2**63 else bits
        bad = table_kernels.check_parts(ids, self._parts, self._first_part, largest, ends)
        if bad >= 0:
            raise self._bad_id(ids[bad], int(bad))
        starts = [0, *ends[:-1].tolist()]
        return [slice(*pair) for pair in zip(starts, ends.tolist(), strict=True)]

    def merged(self, ids: Sequence[Array]) -> tuple[Array, Array]:
        """Return the distinct ids of several requests, sorted by part, and where each one is.

        Args:
            ids: [n] int64 each, of this server.

        Returns:
            [num_unique] int64; [sum of n] int32, positions in it.
        """
        ends = np.empty(int(self._parts[-1]) + 1, np.int64)
        return arranged(np.concatenate(ids), self._parts, ends, self._key)

    def lookup(self, at: int, ids: Array, out: Array, *, training: bool = True) -> None:
        """Write the values of ids of segment number `at` to `out`; change no row.

        Args:
            at: number of the segment.
            ids: [n] int64, ids of this segment.
            out: [n, dim] of the table's dtype; filled.
            training: False: an id without a row reads as the table's `unseen`.
        """
        segment = self.segments[at]
        with segment.lock:
            missed = segment.lookup(ids, out, training=training)
        self.count(looked_up=ids.size, missed=missed)

    def push(
        self,
        at: int,
        ids: Array,
        grads: Array,
        hyper: Hyper,
        elsewhere: Elsewhere | None = None,
    ) -> NonFiniteUpdate | None:
        """Update rows of segment number `at`, whose lock the caller holds.

        Returns a NonFiniteUpdate where elements would not be finite: they keep their numbers, and
        the push's other segments are updated before it is refused.

        Args:
            at: number of the segment.
            ids: [n] int64, ids of this segment, each once.
            grads: [n, dim] of the table's dtype.
            hyper: this push's scalars.
            elsewhere: for the second attempt, in which the caller holds all locks.

        Raises:
            NonFiniteGradient, TableFull, IdError: the rows are unchanged.
            NoRoom: the rows are unchanged, and `room_elsewhere` may help.
        """
        segment = self.segments[at]
        self.check_finite(ids, grads)
        hyper = row_hyper(self.spec, hyper)
        scalars = self._scalars(hyper, segment.version + 1)

        left = 0

        def update(slab: Array, rows: Array, gradients: Array) -> None:
            nonlocal left
            if not stands_still(self.spec.rule, hyper.learning_rate, self.dtype):
                left = self._update(slab, rows, gradients, scalars)

        done: Pushed = segment.push(ids, grads, update, elsewhere)
        self.count(pushed=ids.size, added=done.added, dropped=done.refused, evicted=done.evicted)
        if not left:
            return None
        return NonFiniteUpdate(
            f"{left} of {grads.size} values pushed to table {self.spec.name!r}, or their slots, "
            f"would become NaN or infinite at learning rate {hyper.learning_rate:g}; they keep "
            "their numbers, all others are updated; lower the rate, clip the gradient or raise "
            "epsilon",
            {"table": self.spec.name, "count": str(left)},
        )

    def load_new(self, at: int, ids: Array, rows: Array, elsewhere: Elsewhere | None = None) -> int:
        """Create rows of segment number `at`, whose lock the caller holds; return how many.

        An id that has a row keeps it. A new row has the rule's initial slots.

        Args:
            at: number of the segment.
            ids: [n] int64, ids of this segment, each once.
            rows: [n, dim] of the table's dtype.
            elsewhere: for the second attempt, in which the caller holds all locks.

        Raises:
            NonFiniteGradient, TableFull, IdError: no row was created.
            NoRoom: no row was created, and `room_elsewhere` may help.
        """
        self.check_finite(ids, rows, "loaded into")
        done = self.segments[at].load_new(ids, rows, elsewhere)
        self.count(added=done.added, evicted=done.evicted)
        return done.added

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the locks of all segments."""
        with ExitStack() as stack:
            for segment in self.segments:
                stack.enter_context(segment.lock)
            yield

    def room_elsewhere(self, error: NoRoom, *kept: Array) -> Elsewhere:
        """Return the eviction for the second attempt of a push; use it under all locks.

        Args:
            error: the error of the first attempt.
            kept: [n] int64, the ids of the request, which must keep their rows; then fewer of
                them, for where that leaves too few rows to drop.
        """

        def drop(num_rows: int) -> int:
            return next(filter(None, (self._drop_oldest(num_rows, ids) for ids in kept)), 0)

        return Elsewhere(error.refused, drop)

    def check_hyper(self, hyper: Hyper) -> None:
        """Refuse scalars that do not fit the rule, before anything is applied."""
        row_scalars(self.spec, row_hyper(self.spec, hyper), 1)

    def check_finite(self, ids: Array, grads: Array, what: str = "pushed to") -> None:
        """Raise NonFiniteGradient, naming the first id, unless all values are finite.

        Args:
            ids: [n] int64.
            grads: [n, dim] of the table's dtype.
            what: is done with them, for the message.
        """
        count = kernels.count_nonfinite(grads.reshape(-1))
        if not count:
            return
        row = int(np.argmin(np.isfinite(grads).all(axis=1)))
        number = shown(self.spec, ids[row])
        raise NonFiniteGradient(
            f"{count} of {grads.size} values {what} table {self.spec.name!r} are NaN or "
            f"infinite, the first for id {number}; its segment is unchanged",
            {"table": self.spec.name, "id": str(number), "count": str(count)},
        )

    def dump_some(self, at: int, stop: int, max_nbytes: int) -> tuple[RowBatch, int]:
        """Copy rows of segment number `at` below `stop`; return them and the next stop, or 0.

        Args:
            at: number of the segment.
            stop: row below which to copy; rows go from the last to the first.
            max_nbytes: largest copy, in bytes.
        """
        segment = self.segments[at]
        with segment.lock:
            return segment.dump(stop, max(1, max_nbytes // segment.row_nbytes))

    def load(self, batch: RowBatch) -> None:
        """Insert the rows of a batch that belong to this server.

        Any number of servers may have dumped the batch. Of a repeated id the first row counts. The
        table may exceed its limit afterwards: call `fit` at the end.
        """
        for segment, own in self._own(batch.ids):
            is_all = own.size == batch.ids.size  # as in every piece that one server saved
            some = batch if is_all else RowBatch(*(column[own] for column in batch))
            with segment.lock:
                segment.load(some)
        if self._quota.excess > self._spare:
            self.fit()

    def fit(self) -> None:
        """Evict the oldest rows above the limit, in all segments; a table that refuses keeps them.

        It may have been saved so, after its limit was lowered.
        """
        excess = self._quota.excess
        if not excess or self.spec.when_full == "refuse":
            return
        self.has_left_out = True
        with self.locked():
            self._drop_oldest(excess)

    def is_own(self, ids: Array) -> Array:
        """Return for each id, [n] int64, whether this server owns it: [n] bool."""
        at = self.parts_of(ids) - self._first_part
        own: Array = (at >= 0) & (at < len(self.segments))
        return own

    def forget_ages(self) -> None:
        """Reset the versions: no push was applied, and all rows have the same age."""
        for segment in self.segments:
            segment.forget_ages()

    def without_slots(self, batch: RowBatch) -> RowBatch:
        """Return rows of any rule with their values and this table's initial slots."""
        return self.segments[0].without_slots(batch)

    def parts_of(self, ids: Array) -> Array:
        """Return the part of each id, [n] int64, counted through all servers: [n] int32."""
        parts = np.empty(ids.size, np.int32)
        table_kernels.find_parts(ids, self._parts, parts)
        return parts

    def count(self, **amounts: int) -> None:
        """Add to counters of `stats`."""
        with self._count_lock:
            for name, amount in amounts.items():
                self._counts[name] = self._counts.get(name, 0) + amount

    def stats(self) -> TableStats:
        """The counters as they are now."""
        with self._count_lock:
            counts = dict(self._counts)
        early = [each.admission.admitted_early for each in self.segments]
        return TableStats(
            self.spec.name,
            rows=self.num_rows,
            max_rows=self._quota.limit,
            memory_bytes=self.nbytes,
            admitted_early=sum(early) / len(early),
            staleness=self.staleness.bins,
            forgotten=self.staleness.forgotten,
            **counts,
        )

    def _drop_oldest(self, num_rows: int, kept: Array | None = None) -> int:
        """Drop the oldest rows of all segments, whose locks the caller holds.

        Args:
            num_rows: rows to drop.
            kept: [n] int64, ids whose rows must stay; the call then drops a 16th of all rows at
                least.

        Returns:
            Number of dropped rows; 0 if too few other rows exist.
        """
        ages = [segment.row_ages() for segment in self.segments]
        if kept is not None:
            ages = [each.without(kept) for each in ages]
            num_others = sum(each.ids.size for each in ages)
            if num_others < num_rows:
                return 0
            num_rows = min(num_others, max(num_rows, self.num_rows // EVICTED_SHARE))
        victims = lru_victims(ages, num_rows)
        return sum(segment.drop(ids) for segment, ids in zip(self.segments, victims, strict=True))

    def _own(self, ids: Array) -> Iterator[tuple[Segment, Array]]:
        """Yield each segment that has some of the ids, with their positions."""
        parts = self.parts_of(ids) - self._first_part
        for at, segment in enumerate(self.segments):
            (own,) = np.nonzero(parts == at)
            if own.size:
                yield segment, own

    def _scalars(self, hyper: Hyper, step: int) -> Array:
        """Return the scalars of a push; reuse the last ones where only the rate matters."""
        last = self._last_scalars  # one read: other threads may replace it
        is_plain = self.spec.row_steps or not isinstance(self.spec.rule, Moments)
        if is_plain and last is not None and last[0] == hyper.learning_rate:
            return last[1]
        scalars = row_scalars(self.spec, hyper, step)
        if is_plain:
            self._last_scalars = (hyper.learning_rate, scalars)
        return scalars

    def _bad_id(self, bits: np.int64, place: int) -> IdError:
        spec = self.spec
        number = shown(spec, bits)
        details = {"table": spec.name, "id": str(number), "position": str(place)}
        if not 0 <= number <= spec.largest_id:
            return IdError(
                f"table {spec.name!r} takes {spec.id_kind} ids 0..{spec.largest_id}, got {number} "
                f"at position {place} of the request to {self._server}",
                details,
            )
        return IdError(
            f"table {spec.name!r}: id {number} at position {place} of the request is not "
            f"{self._server}'s, or out of order; do both sides use the same servers?",
            details,
        )


def segments_for(cores: int) -> int:
    """Return how many segments a table has on a server with so many cores: a power of 2."""
    return int(min(1 << (cores - 1).bit_length(), MOST_CHOSEN_SEGMENTS))


def available_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def make_tables(
    manifest: Manifest,
    *,
    rank: int,
    num_servers: int,
    segments: Mapping[str, int] | None = None,
) -> tuple[Table, ...]:
    """Make a server's shares of the manifest's tables, without rows.

    Args:
        manifest: has the tables.
        rank: rank of the server.
        num_servers: number of servers that share the tables.
        segments: by table, instead of this machine's choice; those of a checkpoint.
    """
    chosen = segments or {}
    return tuple(
        Table(spec, rank=rank, num_servers=num_servers, segments=chosen.get(spec.name))
        for spec in manifest.tables
    )
