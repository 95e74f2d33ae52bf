"""Hash index from an id to its row number: open addressing, linear probing, growth in steps.

Covers: finding, adding and removing ids; the compiled loops of it.
Does not: hold rows (ps.tables.segment), lock. Runs in: PS processes; imports numba.
Threads: none; a segment's lock serialises all calls. Loops run without the GIL.

A slot is 64 bits: 0 when empty, else the upper 32 bits of the id's keyed hash and 32 bits of
row + 1. The 32 bits of hash as a fraction of 1 say at which fraction of the slots a search begins.
The ids are stored once, with the rows (`row_ids`), and confirm a match of the 32 bits. At most 5/8
of the slots are used: 13 to 20 bytes a row. With 3/4 a search for an unknown id took twice as long.

Growth has two parts, a bounded piece of each with every `add`: an array of 1.5 times the size gets
its memory, then the entries move to it in the order of their slots. Meanwhile a search continues in
the old array.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import types

from ps.jit.cache import inlined, kernel
from ps.jit.intrinsics import prefetch
from ps.tables.pages import HUGE_PAGE_BYTES, Pages

Array = np.ndarray[Any, Any]

MAX_SLOTS = 1 << 32
"""Homes are told apart by 32 bits of hash: 1.8 billion rows."""
MIN_SLOTS = 64
_MOST_USED = (5, 8)
"""Share of the slots that rows may use: numerator, denominator."""
_PREPARED_FROM = (9, 16)
"""Share from which the next array gets its memory."""
MOVED_AT_ONCE = 1 << 14
"""Slots whose entries one `add` moves to the new array at least: a tenth of a millisecond."""
_MOVED_PER_ROW = 16
"""Slots of the old array that are moved for each added row: all, before a third array is there."""
_TOUCHED_PER_ROW = 256
"""Bytes of the next array that get memory for each added row: all of it, when the rows that
still fit have come."""

_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1 = np.uint64(30)
_SHIFT_2 = np.uint64(27)
_SHIFT_3 = np.uint64(31)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_AHEAD = 16
"""Distance of the prefetch, in ids: a cache miss lasts about as long."""
_LINE = 8
"""Slots of a cache line: one search in four goes on to a second one."""


@inlined
def mix(number: Any) -> Any:
    """Return 64 well mixed bits of a 64-bit integer; one to one.

    Source: the finalizer of SplitMix64; Steele, Lea and Flood, Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014, with the constants of David Stafford's variant 13.
    """
    bits = np.uint64(number)
    bits = (bits ^ (bits >> _SHIFT_1)) * _MULTIPLIER_1
    bits = (bits ^ (bits >> _SHIFT_2)) * _MULTIPLIER_2
    return bits ^ (bits >> _SHIFT_3)


@inlined
def keyed(number: Any, key: Any) -> Any:
    """Return mixed bits of an id that only this process can foresee; one to one.

    Without a key anybody can compute ids that share one slot: 80,000 of them took 12 s to enter.

    Args:
        number: int64, the id.
        key: uint64, of the index.
    """
    return mix(np.uint64(number) ^ key)


def new_key() -> np.uint64:
    """Return a random key; home slots are in memory only, so no checkpoint depends on it."""
    return np.uint64(secrets.randbits(64))


@inlined
def _home(slots: Array, bits: Any) -> Any:
    """Return the slot where the search for an id with these bits of hash begins."""
    return np.int64(((bits >> _HALF) * np.uint64(slots.size)) >> _HALF)


@inlined
def _next(slots: Array, position: Any) -> Any:
    """Return the slot after this one, the first after the last."""
    return position + 1 if position + 1 < slots.size else 0


@inlined
def _distance(slots: Array, start: Any, stop: Any) -> Any:
    """Return the steps of `_next` from `start` to `stop`."""
    return stop - start if stop >= start else stop - start + slots.size


@inlined
def _prefetch_home(slots: Array, bits: Any) -> None:
    """Prefetch where a search begins, and the cache line behind that."""
    home = _home(slots, bits)
    prefetch(slots, home)
    prefetch(slots, min(home + _LINE, slots.size - 1))


@inlined
def _slot_of(slots: Array, row_ids: Array, bits: Any, wanted: Any) -> Any:
    """Return the slot that holds the id with these bits, or -1."""
    position = _home(slots, bits)
    for _ in range(slots.size):
        slot = slots[position]
        if slot == 0:
            return -1
        if (slot ^ bits) >> _HALF == 0:
            row = np.int64(slot & _LOW) - 1
            if row < row_ids.size and row_ids[row] == wanted:
                return position
        position = _next(slots, position)
    return -1


@inlined
def _candidate(slots: Array, bits: Any) -> Any:
    """Return the row of the first slot with the upper half of these bits, or -1."""
    position = _home(slots, bits)
    for _ in range(slots.size):
        slot = slots[position]
        if slot == 0:
            return -1
        if (slot ^ bits) >> _HALF == 0:
            return np.int64(slot & _LOW) - 1
        position = _next(slots, position)
    return -1


@kernel
def find(slots: Array, row_ids: Array, key: int, wanted: Array, rows: Array) -> int:
    """Write the row of each wanted id to `rows`, -1 for unknown ones; return how many are unknown.

    Three steps for each id, some ids apart, so that many cache misses overlap: its slot is
    prefetched; the slot's row is read and the row's id prefetched; that id is compared.

    Args:
        slots: [capacity] uint64, the index.
        row_ids: [num_rows] int64, the id of each row, or longer.
        key: key of the index, uint64.
        wanted: [n] int64.
        rows: [n] int64; filled.
    """
    ahead = np.empty(_AHEAD, np.uint64)  # the bits of the next ids, mixed once
    missing = 0
    for i in range(wanted.size + 2 * _AHEAD):
        last = i - 2 * _AHEAD
        if last >= 0:
            row = rows[last]
            if row >= 0 and (row >= row_ids.size or row_ids[row] != wanted[last]):
                # Another id with the same upper half: one of some billions.
                at = _slot_of(slots, row_ids, keyed(wanted[last], key), wanted[last])
                row = np.int64(slots[at] & _LOW) - 1 if at >= 0 else -1
                rows[last] = row
            missing += row < 0
        middle = i - _AHEAD
        if 0 <= middle < wanted.size:
            row = _candidate(slots, ahead[middle % _AHEAD])
            rows[middle] = row
            if row >= 0:
                prefetch(row_ids, row)
        if i < wanted.size:
            bits = keyed(wanted[i], key)
            ahead[i % _AHEAD] = bits
            _prefetch_home(slots, bits)
    return missing


@kernel
def confirm(row_ids: Array, wanted: Array, rows: Array) -> int:
    """Write -1 to `rows` where a row is not, or no longer, that of the wanted id; return how often.

    Args:
        row_ids: [num_rows] int64, the id of each row, none longer.
        wanted: [n] int64.
        rows: [n] int64, what an earlier search has found; changed.
    """
    unconfirmed = 0
    for i in range(wanted.size):
        if i + _AHEAD < wanted.size and 0 <= rows[i + _AHEAD] < row_ids.size:
            prefetch(row_ids, rows[i + _AHEAD])
        row = rows[i]
        if row < 0 or row >= row_ids.size or row_ids[row] != wanted[i]:
            rows[i] = -1
            unconfirmed += 1
    return unconfirmed


@kernel
def insert(slots: Array, row_ids: Array, key: int, start: int, stop: int) -> None:
    """Enter the rows [start, stop), whose ids are unknown yet; at least one slot stays empty.

    Args:
        slots: [capacity] uint64, the index; changed.
        row_ids: [at least stop] int64, the id of each row.
        key: key of the index, uint64.
        start: first row to enter.
        stop: end of the rows to enter.
    """
    for row in range(start, stop):
        if row + _AHEAD < stop:
            _prefetch_home(slots, keyed(row_ids[row + _AHEAD], key))
        bits = keyed(row_ids[row], key)
        _enter(slots, (bits & ~_LOW) | np.uint64(row + 1))


@inlined
def _enter(slots: Array, entry: Any) -> None:
    """Write an entry to the first empty slot from its home on."""
    position = _home(slots, entry)
    while slots[position] != 0:
        position = _next(slots, position)
    slots[position] = entry


@kernel
def move(old: Array, new: Array, start: int, stop: int) -> None:
    """Enter the slots [start, stop) of a smaller index into a larger one.

    An entry's upper half is that of its hash, which says where its home is: no id is read, and both
    arrays are passed through in order.

    Args:
        old: [capacity] uint64, the slots of an index.
        new: [larger capacity] uint64, another one; changed.
        start: first slot to move.
        stop: end of the slots to move.
    """
    for position in range(max(0, start), min(stop, old.size)):
        if old[position] != 0:
            _enter(new, old[position])


@inlined
def relink(slots: Array, row_ids: Array, key: Any, row: Any, to_row: Any) -> None:
    """Change the row of an id from `row` to `to_row`.

    Args:
        slots: [capacity] uint64, the index.
        row_ids: [rows] int64, the id of each row.
        key: key of the index, uint64.
        row: the row that the id has now.
        to_row: the row that it gets.
    """
    position = _slot_of(slots, row_ids, keyed(row_ids[row], key), row_ids[row])
    if position >= 0:
        slots[position] = (slots[position] >> _HALF << _HALF) | np.uint64(to_row + 1)


@inlined
def unlink(slots: Array, row_ids: Array, key: Any, row: Any) -> None:
    """Remove the id of `row`; displaced entries move back, so no tombstone is left.

    Args:
        slots: [capacity] uint64, the index.
        row_ids: [rows] int64, the id of each row.
        key: key of the index, uint64.
        row: the row whose id is removed.

    Source: Knuth, The Art of Computer Programming, volume 3, section 6.4, algorithm R.
    """
    found = _slot_of(slots, row_ids, keyed(row_ids[row], key), row_ids[row])
    if found < 0:
        return
    hole = position = found
    for _ in range(slots.size):
        position = _next(slots, position)
        slot = slots[position]
        if slot == 0:
            break
        if _distance(slots, _home(slots, slot), position) >= _distance(slots, hole, position):
            slots[hole] = slot
            hole = position
    slots[hole] = 0


class HashIndex:
    """Row numbers by id, for rows that are numbered 0, 1, 2, … without holes.

    The argument `row_ids` is always [num_rows or more] int64: the id of every row.
    """

    def __init__(self) -> None:
        self.key = new_key()
        """Key for the loops that remove rows."""
        self._slots: Array = np.zeros(MIN_SLOTS, np.uint64)
        self._num_rows = 0
        self._larger: Array | None = None
        """Array of 1.5 times the size; its memory is touched step by step before it is used."""
        self._touched = 0
        self._old: Array | None = None
        """Array of two thirds of the size; its entries move to the new one."""
        self._moved = 0
        """Slots of the old array whose entries are also in the new one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        arrays = (self._slots, self._old, self._larger)
        return sum(each.nbytes for each in arrays if each is not None)

    def find(self, row_ids: Array, wanted: Array, rows: Array) -> int:
        """Write the rows of the wanted ids, -1 for an unknown one; return how many are unknown.

        Args:
            row_ids: the id of every row.
            wanted: [n] int64.
            rows: [n] int64; filled.
        """
        missing = int(find(self._slots, row_ids, self.key, wanted, rows))
        if not missing or self._old is None:
            return missing
        return _fill(wanted, rows, partial(find, self._old, row_ids, self.key))

    def find_again(self, row_ids: Array, wanted: Array, rows: Array) -> int:
        """As `find`, but only rows that are no longer where an earlier search found them.

        Args:
            row_ids: the id of every row.
            wanted: [n] int64.
            rows: [n] int64, what was found then, right or wrong; corrected.
        """
        if not confirm(row_ids[: self._num_rows], wanted, rows):
            return 0
        return _fill(wanted, rows, partial(self.find, row_ids))

    def add(self, row_ids: Array, stop: int) -> None:
        """Enter the rows from the number of known ones up to `stop`, whose ids are unknown yet.

        Args:
            row_ids: the id of every row, at least `stop` of them.
            stop: end of the rows to enter.

        Raises:
            MemoryError: no memory for more slots; the index is unchanged.
        """
        added = stop - self._num_rows
        self._move(max(_MOVED_PER_ROW * added, MOVED_AT_ONCE))
        self._prepare(stop, max(added * _TOUCHED_PER_ROW, HUGE_PAGE_BYTES))
        while not _fits(stop, _MOST_USED, self._slots.size):
            self._grow()
        insert(self._slots, row_ids, self.key, self._num_rows, stop)
        self._num_rows = stop

    def settled(self) -> Array:
        """Finish a growth in progress and return the slots, for a loop that removes rows."""
        if self._old is not None:
            self._move(self._old.size)
        return self._slots

    def removed(self, num_rows: int) -> None:
        """Record that a loop has removed all rows from `num_rows` on."""
        self._num_rows = num_rows

    def _prepare(self, num_rows: int, nbytes: int) -> None:
        """Touch `nbytes` more of the next array, soon before `num_rows` need it.

        New rows hash to all of it: at its first use they would touch every page at once.
        """
        if self._larger is None:
            if _fits(num_rows, _PREPARED_FROM, self._slots.size):
                return
            self._larger, self._touched = _next_slots(self._slots), 0
        step = HUGE_PAGE_BYTES // 8
        stop = self._touched + nbytes // 8
        self._larger[self._touched : stop : step] = 0
        self._touched = stop

    def _grow(self) -> None:
        larger, self._larger = self._larger, None
        if larger is None:
            larger = _next_slots(self._slots)
        self.settled()
        self._old, self._slots, self._moved = self._slots, larger, 0
        self._move(MOVED_AT_ONCE)

    def _move(self, num_slots: int) -> None:
        """Enter the entries of `num_slots` more slots of the old array into the new one."""
        if self._old is None:
            return
        stop = min(self._old.size, self._moved + num_slots)
        move(self._old, self._slots, self._moved, stop)
        self._moved = stop
        if stop == self._old.size:
            self._old = None


def _fill(wanted: Array, rows: Array, search: Callable[[Array, Array], int]) -> int:
    """Search for the ids without a row and write what is found; return how many are unknown."""
    (places,) = np.nonzero(rows < 0)
    found = np.empty(places.size, np.int64)
    missing = int(search(wanted[places], found))
    rows[places] = found
    return missing


def _fits(num_rows: int, share: tuple[int, int], num_slots: int) -> bool:
    """Whether that many rows are at most this share of the slots."""
    return num_rows * share[1] <= num_slots * share[0]


def _next_slots(slots: Array) -> Array:
    """Return zeros for the next size of an index, which take memory when they are touched."""
    size = slots.size + slots.size // (2 * _LINE) * _LINE
    if size > MAX_SLOTS:
        raise MemoryError(f"an index has at most {MAX_SLOTS} slots, {size} are needed")
    return Pages(8 * size).array[: 8 * size].view(np.uint64)


_SLOTS = types.Array(types.uint64, 1, "C")
_READ_SLOTS = types.Array(types.uint64, 1, "C", readonly=True)
_IDS = types.Array(types.int64, 1, "C", readonly=True)
_ROWS = types.Array(types.int64, 1, "C")

SIGNATURES: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (find, (_READ_SLOTS, _IDS, types.uint64, _IDS, _ROWS)),
    (confirm, (_IDS, _IDS, _ROWS)),
    (insert, (_SLOTS, _IDS, types.uint64, types.int64, types.int64)),
    (move, (_READ_SLOTS, _SLOTS, types.int64, types.int64)),
)
"""Each kernel with the one signature that it is compiled for."""
