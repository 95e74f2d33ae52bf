"""Table segment: rows, their ids, and everything that changes them, under one lock.

Covers: lookup, push with creation of rows, loading rows, eviction by age, copying rows out and in.
Does not: know servers or requests (ps.tables.table, ps.server.table_handlers), compile
(ps.tables.kernels).
Runs in: PS processes.

Threads: any; the caller of every method holds `lock`, which guards everything.
Compiled loops run without the GIL, so segments work in parallel.

Rows are numbered 0, 1, 2, … without holes: the last row moves into the place of an evicted one. A
row is `[value | slot | slot …]` (ps.optim.row_rules) in one piece of memory; id and version are in
separate arrays (shapes: ps.tables).

Every push gets the next `version` and writes it to its rows. So versions say which rows have
changed since a checkpoint, which were pushed least recently, and (ps.tables.eviction) how long ago.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ps.errors import TableFull
from ps.manifest.table_spec import TableSpec
from ps.tables import kernels
from ps.tables.admission import AdmissionFilter
from ps.tables.deliveries import RecentLookups
from ps.tables.eviction import RowAges, Tombstones, TtlClock
from ps.tables.growable_array import GrowingArray
from ps.tables.hash_index import HashIndex
from ps.tables.ids import repeated
from ps.tables.initializers import initialize, key_of, recipe_of
from ps.tables.quota import Elsewhere, NoRoom, Quota
from ps.tables.row_snapshot import RowSnapshot
from ps.tables.rows import RowBatch

Array = np.ndarray[Any, Any]
Update = Callable[[Array, Array, Array], None]
"""Applies gradients to rows of a slab: (slab, rows, gradients)."""

EVICTED_SHARE = 16
"""A full segment evicts a 16th of its rows at once: finding the oldest costs a pass over all."""


class Pushed(NamedTuple):
    """Counts of one push to a segment."""

    added: int = 0
    refused: int = 0
    """Ids that were not admitted; their gradients were dropped."""
    evicted: int = 0


class Segment:
    """Rows of one segment.

    Args:
        spec: the table.
        slots: [width - dim] of the table's dtype, a row's initial slots; see row_starts.
        quota: limit of the rows of all segments of one server.
        clock: returns monotonic seconds, for the time to live.
        num_segments: number of segments that share the quota.
    """

    def __init__(
        self,
        spec: TableSpec,
        slots: Array,
        quota: Quota,
        clock: Callable[[], float],
        *,
        num_segments: int = 1,
    ) -> None:
        self.lock = threading.Lock()
        self.num_rows = 0
        self.version = 0
        """Pushes so far; also the step of the rule."""
        self.num_loads = 0
        """Calls of `load_new` that have created rows."""
        self.drops = Tombstones()
        limit = quota.limit
        self.admission = AdmissionFilter(spec, limit and -(-limit // num_segments))
        self.ttl = TtlClock(spec.ttl_s, clock)
        self.snapshot: RowSnapshot | None = None
        """Snapshot of a save in progress: the rows that it still needs."""
        self._spec = spec
        self._slot_starts = slots
        self._quota = quota
        self._recipe = recipe_of(spec.initializer, spec.dim)
        self._key = key_of(spec.row_seed)
        self._reads_zeros = spec.admission.is_selective and spec.admission.unknown == "zeros"
        self._unseen = np.array(spec.unseen or 0.0, spec.dtype)
        self._slab = GrowingArray(np.dtype(spec.dtype), spec.dim + slots.size)
        self._ids = GrowingArray(np.dtype(np.int64))
        self._versions = GrowingArray(np.dtype(np.int64))
        self._index = HashIndex()
        self._lookups = RecentLookups()

    def set_limits(self, spec: TableSpec) -> None:
        """Have this table's LIMITS; the caller has set the quota's, and holds the lock."""
        self._spec = spec
        self.ttl.set_ttl(spec.ttl_s)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row with its id."""
        return self._slab.row_nbytes + self._ids.row_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the rows with their ids, versions and index."""
        row_nbytes = self.row_nbytes + self._versions.row_nbytes
        return self.num_rows * row_nbytes + self._index.nbytes + self.admission.nbytes

    def lookup(self, ids: Array, out: Array, *, training: bool = True) -> int:
        """Write the values of these ids to `out`; change no row.

        For training, an id without a row gets its initial values, or zeros if the table has an
        admission filter with `unknown="zeros"`. Else it gets the table's `unseen`.

        Args:
            ids: [n] int64.
            out: [n, dim] of the table's dtype; filled.
            training: whether the rows are looked up to train on them.

        Returns:
            Number of ids without a row.
        """
        rows = np.empty(ids.size, np.int64)
        missing = self._index.find(self._ids.rows, ids, rows)
        kernels.gather(self._slab.rows, rows, out)
        if missing:
            (places,) = np.nonzero(rows < 0)
            if not training:
                out[places] = self._unseen
            elif self._reads_zeros:
                out[places] = 0
            else:
                initialize(out, places, ids[places], self._recipe, self._key)
        if training:
            self._lookups.keep(ids, rows)
        return missing

    def push(
        self, ids: Array, grads: Array, update: Update, elsewhere: Elsewhere | None = None
    ) -> Pushed:
        """Create missing rows that are admitted, then update all rows: all of that or nothing.

        Args:
            ids: [n] int64, each id once.
            grads: [n, dim] of the table's dtype, finite.
            update: applies the rule with this push's scalars: (slab, rows, grads), in place.
            elsewhere: eviction from all segments, for the second attempt after NoRoom.

        Returns:
            Counts of added, refused and evicted rows.

        Raises:
            TableFull: there is no room for the new rows, and no row may be evicted.
            NoRoom: this segment alone has too few rows that may be evicted.
            IdError: an id occurs twice.
        """
        # Before the new version: TtlClock maps the versions so far to their ages.
        evicted = self._evict_old()
        self.version += 1
        if not ids.size:
            return Pushed(evicted=evicted)
        rows, missing = self._found(ids)
        # Before mark(): a save in progress needs the rows with their old versions.
        self._keep(rows)
        before = np.empty(ids.size, np.int64)
        self._refuse_repeated(ids, kernels.mark(self._versions.rows, rows, self.version, before))
        added = 0
        if missing:
            unknown = ids[rows < 0]
            wanted = self._admitted(unknown, elsewhere)
            added = wanted.size
            try:
                evicted += self._add(wanted, elsewhere)
            except (TableFull, NoRoom) as error:
                is_known = rows >= 0
                self._undo(RowAges(ids[is_known], before[is_known]))
                if isinstance(error, NoRoom):
                    # The second attempt must neither count nor draw these ids again.
                    error.refused = np.setdiff1d(unknown, wanted)
                raise
            if not evicted and added == missing:
                rows[rows < 0] = np.arange(self.num_rows - added, self.num_rows)
            # Else again for all: eviction moves rows.
            elif self._index.find(self._ids.rows, ids, rows):
                rows, grads = rows[rows >= 0], grads[rows >= 0]
        update(self._slab.rows, rows, grads)
        return Pushed(added, missing - added, evicted)

    def load_new(self, ids: Array, rows: Array, elsewhere: Elsewhere | None = None) -> Pushed:
        """Create rows with these values and initial slots, admitted or not: all new ones or none.

        An id that has a row keeps it, and the row becomes as recent as the last push. It is no step
        of the rule, so the version stays; if it creates a row, the next save writes the segment
        whole, and the time to live of all rows starts again.

        Args:
            ids: [n] int64, each id once.
            rows: [n, dim] of the table's dtype, finite.
            elsewhere: eviction from all segments, for the second attempt after NoRoom.

        Returns:
            Counts of added and evicted rows.

        Raises:
            TableFull, NoRoom, IdError: as `push`.
        """
        places = np.empty(ids.size, np.int64)
        missing = self._index.find(self._ids.rows, ids, places)
        is_new = places < 0
        new, known = ids[is_new], places[~is_new]
        self._refuse_repeated_missing(new)
        # As recent as the new rows: else those, or those of the load's next request, evict them.
        self._keep(known)
        self._versions.rows[known] = self.version
        if not missing:
            return Pushed()
        start, stop, evicted = self._append_empty(new, elsewhere)
        self._slab.rows[start:stop, : self._spec.dim] = rows[is_new]
        self.num_loads += 1
        self.drops.forget()
        self.ttl.restart()
        return Pushed(new.size, evicted=evicted)

    def dump(
        self, stop: int, max_rows: int, since: int = -1, until: int | None = None
    ) -> tuple[RowBatch, int]:
        """Copy the rows below `stop` of versions above `since`, up to `until`, from the last on.

        Backwards, because eviction moves rows to lower numbers only: a row that moves between two
        batches may be copied twice, the newer copy later, but is never missed.

        Args:
            stop: row number below which to copy.
            max_rows: row numbers to visit at most.
            since: newest version that is not copied; -1: copy all.
            until: newest version that is copied; None: copy all above `since`.

        Returns:
            The rows of up to `max_rows` row numbers, and the next `stop`; 0 at the end.
        """
        stop = min(stop, self.num_rows)
        start = max(0, stop - max_rows)
        versions = self._versions.rows[start:stop]
        is_chosen = versions > since
        if until is not None:
            is_chosen &= versions <= until
        chosen = np.nonzero(is_chosen)[0] + start
        columns = (self._ids, self._slab, self._versions)
        return RowBatch(*(column.rows[chosen] for column in columns)), start

    def load(self, batch: RowBatch) -> None:
        """Insert the rows of `dump` whose ids have no row yet, also above the limit.

        Raises:
            TableFull: the system has no memory for them.
            IdError: an id occurs twice in the batch.
        """
        self.version = max(self.version, int(batch.versions.max(initial=0)))
        rows = np.empty(batch.ids.size, np.int64)
        missing = self._index.find(self._ids.rows, batch.ids, rows)
        if not missing:
            return
        is_all = missing == batch.ids.size
        new = batch if is_all else RowBatch(*(column[rows < 0] for column in batch))
        self._refuse_repeated_missing(new.ids)
        self._quota.take_anyway(new.ids.size)
        start, stop = self._append(new.ids)
        self._slab.rows[start:stop] = new.rows
        self._versions.rows[start:stop] = new.versions

    def row_ages(self) -> RowAges:
        """Copy ids and versions of all rows."""
        stop = self.num_rows
        return RowAges(self._ids.rows[:stop].copy(), self._versions.rows[:stop].copy())

    def drop(self, ids: Array) -> int:
        """Remove the rows of these ids, [n] int64; return how many existed."""
        rows = np.empty(ids.size, np.int64)
        self._index.find(self._ids.rows, ids, rows)
        return self._evict(np.unique(rows[rows >= 0]))

    def forget_ages(self) -> None:
        """Reset the versions: no push was applied, and all rows have the same age."""
        self.version = 0
        self._versions.rows[: self.num_rows] = 0

    def without_slots(self, batch: RowBatch) -> RowBatch:
        """Return rows of any rule with their values and this rule's initial slots."""
        rows = np.empty((batch.ids.size, self._slab.rows.shape[1]), batch.rows.dtype)
        rows[:, : self._spec.dim] = batch.rows[:, : self._spec.dim]
        rows[:, self._spec.dim :] = self._slot_starts
        return RowBatch(batch.ids, rows, batch.versions)

    def _found(self, ids: Array) -> tuple[Array, int]:
        """Return the rows of a push's ids and how many have none."""
        rows = self._lookups.take(ids)
        if rows is not None:
            return rows, self._index.find_again(self._ids.rows, ids, rows)
        rows = np.empty(ids.size, np.int64)
        return rows, self._index.find(self._ids.rows, ids, rows)

    def _undo(self, before: RowAges) -> None:
        """Undo the marks of a push: restore the versions that these rows had before it."""
        rows = np.empty(before.ids.size, np.int64)
        self._index.find(self._ids.rows, before.ids, rows)  # making room may have moved them
        self._versions.rows[rows] = before.versions
        self.version -= 1

    def _admitted(self, missing: Array, elsewhere: Elsewhere | None) -> Array:
        self._refuse_repeated_missing(missing)
        if elsewhere is not None:
            return missing[~np.isin(missing, elsewhere.refused)]
        if not self._spec.admission.is_selective:
            return missing
        return missing[self.admission.admit(missing, self.version)]

    def _add(self, ids: Array, elsewhere: Elsewhere | None) -> int:
        """Create rows with their initial values; return how many others were evicted for them."""
        if not ids.size:
            return 0
        start, stop, evicted = self._append_empty(ids, elsewhere)
        initialize(self._slab.rows, np.arange(start, stop), ids, self._recipe, self._key)
        return evicted

    def _append_empty(self, ids: Array, elsewhere: Elsewhere | None) -> tuple[int, int, int]:
        """Append rows with initial slots, without values; return first number, end, evictions."""
        evicted = self._take(ids.size, elsewhere)
        start, stop = self._append(ids)
        self._versions.rows[start:stop] = self.version
        self._slab.rows[start:stop, self._spec.dim :] = self._slot_starts
        return start, stop, evicted

    def _append(self, ids: Array) -> tuple[int, int]:
        """Append rows that the quota has admitted; return their first number and their end."""
        start, stop = self.num_rows, self.num_rows + ids.size
        try:
            for column in (self._slab, self._ids, self._versions):
                column.reserve(stop)
            self._ids.rows[start:stop] = ids
            self._index.add(self._ids.rows, stop)
        except MemoryError as error:
            self._quota.give(ids.size)
            raise TableFull(
                f"table {self._spec.name!r}: {error}; lower max_rows or max_bytes, or add servers"
            ) from error
        self.num_rows = stop
        return start, stop

    def _take(self, num_rows: int, elsewhere: Elsewhere | None) -> int:
        """Take `num_rows` rows from the quota, evicting others if the table may."""
        evicted = 0
        while lacking := self._quota.take(num_rows):
            if self._spec.when_full == "refuse":
                raise self._quota.full(self._spec, num_rows)
            oldest = self._oldest(lacking)
            # Rows above a lowered limit go from all segments. If all here do not suffice, none go.
            if oldest.size >= lacking and not self._quota.excess:
                evicted += self._evict(oldest)
            elif elsewhere is None:
                raise NoRoom
            elif dropped := elsewhere.drop(lacking):
                evicted += dropped
            else:
                raise self._quota.full(self._spec, num_rows)
        return evicted

    def _oldest(self, num_rows: int) -> Array:
        """Return the numbers of the least recently pushed rows, at least `num_rows` if possible."""
        versions = self._versions.rows[: self.num_rows]
        (others,) = np.nonzero(versions < self.version)
        wanted = min(others.size, max(num_rows, self.num_rows // EVICTED_SHARE))
        if not wanted:
            return others
        order = np.argpartition(versions[others], wanted - 1)[:wanted]
        return np.sort(others[order])

    def _evict_old(self) -> int:
        """Evict the rows whose time to live is over."""
        expired = self.ttl.expired(self.version)
        if expired is None:
            return 0
        return self._evict(np.nonzero(self._versions.rows[: self.num_rows] <= expired)[0])

    def _evict(self, victims: Array) -> int:
        if not victims.size:
            return 0
        self._keep(victims)
        slots = self._index.settled()
        stop = self.num_rows
        ids, versions = self._ids.rows[:stop], self._versions.rows[:stop]
        self.drops.add(ids[victims])
        left = int(kernels.evict(slots, ids, self._index.key, versions, self._slab.rows, victims))
        self._index.removed(left)
        self._quota.give(stop - left)
        self.num_rows = left
        return stop - left

    def _keep(self, rows: Array) -> None:
        """Copy rows that a save still needs, before they change."""
        if self.snapshot is not None:
            self.snapshot.keep(rows, (self._ids.rows, self._slab.rows, self._versions.rows))

    def _refuse_repeated_missing(self, missing: Array) -> None:
        heads = np.full(1 << (2 * missing.size).bit_length(), -1, np.int32)
        place = kernels.first_repeated(missing, self._index.key, heads)
        self._refuse_repeated(missing, place)

    def _refuse_repeated(self, ids: Array, place: int) -> None:
        if place >= 0:
            raise repeated(self._spec, ids[place])
