"""Hash index from an id to its row number: open addressing, linear probing, growth in steps.

Covers: finding, adding and removing ids; the compiled loops of it.
Does not: hold rows (ps.tables.segment), lock. Runs in: PS processes; imports numba.
Threads: none; a segment's lock serialises all calls. Loops run without the GIL.

A slot is 64 bits: 0 when empty, else 32 bits of the id's keyed hash and 32 bits of row + 1. The
ids are stored once, with the rows (`row_ids`), and confirm a match of the 32 bits of hash. At most
three quarters of the slots are used: 11 to 21 bytes a row.

Growth allocates an empty array of twice the size and moves the rows in their order, a bounded
number with every `add`; meanwhile a search continues in the old array.
"""

from __future__ import annotations

import mmap
import secrets
from typing import Any

import numpy as np
from numba import types

from ps.jit.cache import inlined, kernel
from ps.jit.intrinsics import prefetch

Array = np.ndarray[Any, Any]

MAX_ROWS = (1 << 32) - 2
MIN_SLOTS = 64
MOVED_AT_ONCE = 1 << 12
"""Rows that one `add` moves to the new array at least: a few milliseconds with the new pages."""

_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1 = np.uint64(30)
_SHIFT_2 = np.uint64(27)
_SHIFT_3 = np.uint64(31)
_TAG_SHIFT = np.uint64(20)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ONE = np.uint64(1)
_AHEAD = 16
"""Distance of the prefetch, in ids: a cache miss lasts about as long."""


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
    """
    return mix(np.uint64(number) ^ key)


def new_key() -> np.uint64:
    """Return a random key; home slots are in memory only, so no checkpoint depends on it."""
    return np.uint64(secrets.randbits(64))


@inlined
def _slot_of(slots: Array, row_ids: Array, bits: Any, wanted: Any) -> Any:
    """Return the slot that holds the id with these bits, or -1."""
    mask = np.uint64(slots.size - 1)
    tag = (bits >> _TAG_SHIFT) & _LOW
    position = bits & mask
    for _ in range(slots.size):
        slot = slots[position]
        if slot == 0:
            return -1
        if slot >> _HALF == tag:
            row = np.int64(slot & _LOW) - 1
            if row < row_ids.size and row_ids[row] == wanted:
                return np.int64(position)
        position = (position + _ONE) & mask
    return -1


@kernel
def find(slots: Array, row_ids: Array, key: int, wanted: Array, rows: Array) -> int:
    """Write the row of each wanted id to `rows`, -1 for unknown ones; return how many are unknown.

    Slots are prefetched some ids ahead, so that many cache misses overlap.

    Args:
        slots: [power of 2] uint64, the index.
        row_ids: [num_rows] int64, the id of each row, or longer.
        key: of the index, uint64.
        wanted: [n] int64.
        rows: [n] int64; filled.
    """
    mask = np.uint64(slots.size - 1)
    ahead = np.empty(_AHEAD, np.uint64)  # the bits of the next ids, mixed once
    missing = 0
    for i in range(min(_AHEAD, wanted.size)):
        ahead[i] = keyed(wanted[i], key)
        prefetch(slots, np.int64(ahead[i] & mask))
    for i in range(wanted.size):
        bits = ahead[i % _AHEAD]
        if i + _AHEAD < wanted.size:
            following = keyed(wanted[i + _AHEAD], key)
            ahead[i % _AHEAD] = following
            prefetch(slots, np.int64(following & mask))
        position = _slot_of(slots, row_ids, bits, wanted[i])
        if position < 0:
            rows[i] = -1
            missing += 1
        else:
            rows[i] = np.int64(slots[position] & _LOW) - 1
    return missing


@kernel
def insert(slots: Array, row_ids: Array, key: int, start: int, stop: int) -> None:
    """Enter the rows [start, stop), whose ids are unknown yet; at least one slot stays empty.

    Args:
        slots: [power of 2] uint64, the index; changed.
        row_ids: [at least stop] int64, the id of each row.
        key: of the index, uint64.
        start: first row to enter.
        stop: end of the rows to enter.
    """
    mask = np.uint64(slots.size - 1)
    for row in range(start, stop):
        if row + _AHEAD < stop:
            prefetch(slots, np.int64(keyed(row_ids[row + _AHEAD], key) & mask))
        bits = keyed(row_ids[row], key)
        tag = (bits >> _TAG_SHIFT) & _LOW
        position = bits & mask
        while slots[position] != 0:
            position = (position + _ONE) & mask
        slots[position] = (tag << _HALF) | np.uint64(row + 1)


@inlined
def relink(slots: Array, row_ids: Array, key: Any, row: Any, to_row: Any) -> None:
    """Change the row of an id from `row` to `to_row`.

    Args:
        slots: [capacity] uint64, the index.
        row_ids: [rows] int64, the id of each row.
        key: of the index, uint64.
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
        key: of the index, uint64.
        row: whose id is removed.

    Source: Knuth, The Art of Computer Programming, volume 3, section 6.4, algorithm R.
    """
    found = _slot_of(slots, row_ids, keyed(row_ids[row], key), row_ids[row])
    if found < 0:
        return
    mask = np.uint64(slots.size - 1)
    hole = np.uint64(found)
    position = hole
    for _ in range(slots.size):
        position = (position + _ONE) & mask
        slot = slots[position]
        if slot == 0:
            break
        home = keyed(row_ids[np.int64(slot & _LOW) - 1], key) & mask
        if ((position - home) & mask) >= ((position - hole) & mask):
            slots[hole] = slot
            hole = position
    slots[hole] = 0


def _empty_slots(size: int) -> Array:
    """Return [size] uint64 zeros on small pages, which Linux zeroes one by one at first use.

    numpy requests huge pages, and the first few thousand rows would touch all of them at once.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, 8 * size, flags=flags), np.uint64)


class HashIndex:
    """Row numbers by id, for rows that are numbered 0, 1, 2, … without holes.

    The argument `row_ids` is always [num_rows or more] int64: the id of every row.
    """

    def __init__(self) -> None:
        self.key = new_key()
        """For the loops that remove rows."""
        self._slots: Array = np.zeros(MIN_SLOTS, np.uint64)
        self._num_rows = 0
        self._old: Array | None = None
        self._num_old = 0
        """Rows in the old array; those below `_moved` are also in the new one."""
        self._moved = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self._slots.nbytes + (0 if self._old is None else self._old.nbytes)

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
        (places,) = np.nonzero(rows < 0)
        found = np.empty(places.size, np.int64)
        missing = int(find(self._old, row_ids, self.key, wanted[places], found))
        rows[places] = found
        return missing

    def add(self, row_ids: Array, stop: int) -> None:
        """Enter the rows from the number of known ones up to `stop`, whose ids are unknown yet.

        Args:
            row_ids: the id of every row, at least `stop` of them.
            stop: end of the rows to enter.

        Raises:
            MemoryError: no memory for more slots; the index is unchanged.
        """
        self._move(row_ids, max(4 * (stop - self._num_rows), MOVED_AT_ONCE))
        if 4 * stop > 3 * self._slots.size:
            self._grow(row_ids, stop)
        insert(self._slots, row_ids, self.key, self._num_rows, stop)
        self._num_rows = stop

    def settled(self, row_ids: Array) -> Array:
        """Finish a growth in progress and return the slots, for a loop that removes rows."""
        self._move(row_ids, self._num_old)
        return self._slots

    def removed(self, num_rows: int) -> None:
        """Record that a loop has removed all rows from `num_rows` on."""
        self._num_rows = num_rows

    def _grow(self, row_ids: Array, num_rows: int) -> None:
        self.settled(row_ids)
        size = self._slots.size
        while 4 * num_rows > 3 * size:
            size *= 2
        self._old, self._slots = self._slots, _empty_slots(size)
        self._num_old, self._moved = self._num_rows, 0
        self._move(row_ids, MOVED_AT_ONCE)

    def _move(self, row_ids: Array, num_rows: int) -> None:
        """Enter `num_rows` more of the old array's rows into the new one."""
        if self._old is None:
            return
        stop = min(self._num_old, self._moved + num_rows)
        insert(self._slots, row_ids, self.key, self._moved, stop)
        self._moved = stop
        if stop == self._num_old:
            self._old = None


_SLOTS = types.Array(types.uint64, 1, "C")
_READ_SLOTS = types.Array(types.uint64, 1, "C", readonly=True)
_IDS = types.Array(types.int64, 1, "C", readonly=True)
_ROWS = types.Array(types.int64, 1, "C")

SIGNATURES: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (find, (_READ_SLOTS, _IDS, types.uint64, _IDS, _ROWS)),
    (insert, (_SLOTS, _IDS, types.uint64, types.int64, types.int64)),
)
"""Each kernel with the one signature that it is compiled for."""
