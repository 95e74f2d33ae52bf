"""Pages of memory, straight from the system: zeroed, aligned for huge pages, moved without copies.

Covers: mapping, growing and releasing private memory.
Does not: know rows (ps.tables.growable_array) or slots (ps.tables.hash_index).
Runs in: PS processes, on Linux.
Threads: none; the owner serialises `grow` with every use of a view.

A translation buffer of a processor covers gigabytes only with huge pages, of 2 MiB. The system
keeps them when memory grows only if its old and its new address are multiples of 2 MiB; Python's
`mmap.resize` cannot ask for that. Where the system has no huge pages, ordinary ones do the same.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

HUGE_PAGE_BYTES = 2 << 20
HUGE_FROM_BYTES = 8 << 20
"""From this size on huge pages: the last one is half empty on average, an eighth of that."""

_NO_ACCESS = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MOVE = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED
_FAILED = ctypes.c_void_p(-1).value
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def _declared(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype, function.argtypes = result, arguments
    return function


_mmap = _declared("mmap", _POINTER, _POINTER, _SIZE, _INT, _INT, _INT, ctypes.c_long)
_mremap = _declared("mremap", _POINTER, _POINTER, _SIZE, _SIZE, _INT, _POINTER)
_munmap = _declared("munmap", _INT, _POINTER, _SIZE)
_madvise = _declared("madvise", _INT, _POINTER, _SIZE, _INT)


class Pages:
    """Zeroed memory that grows by moving its pages.

    Args:
        nbytes: size; rounded up to whole pages.

    Raises:
        MemoryError: the system has no more.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = _whole(nbytes)
        address = _mapped(nbytes, _READ_WRITE)
        _advise(address, nbytes)
        self.array: Array
        """[nbytes] uint8; it and its views keep the memory."""
        self._own(_Keeper(address, nbytes))

    def grow(self, nbytes: int) -> None:
        """Make `array` another one of at least `nbytes`: the old content, and zeros behind it.

        The pages move if nobody holds a view of the old array; else they are copied, and the view
        keeps its memory.

        Args:
            nbytes: size; rounded up to whole pages.

        Raises:
            MemoryError: the system has no more; nothing has changed.
        """
        nbytes = _whole(nbytes)
        old_address, old_nbytes = self._address, self.array.nbytes
        self._release.detach()
        self.array = np.empty(0, np.uint8)
        keeper = self._keeper()
        try:
            if keeper is None:
                address = _mapped(nbytes, _NO_ACCESS)
                if _mremap(old_address, old_nbytes, nbytes, _MOVE, address) == _FAILED:
                    error = _no_memory(nbytes)  # before another call changes errno
                    _munmap(address, nbytes)
                    raise error
            else:
                address = _mapped(nbytes, _READ_WRITE)
                ctypes.memmove(address, old_address, old_nbytes)
        except MemoryError:
            self._own(keeper or _Keeper(old_address, old_nbytes))
            raise
        if keeper is not None:
            _release_with(keeper, old_address, old_nbytes)
        _advise(address, nbytes)
        self._own(_Keeper(address, nbytes))

    def _own(self, keeper: _Keeper) -> None:
        """Make the array of this memory, which is released with the keeper, after its last view."""
        self._keeper = weakref.ref(keeper)
        self._address = keeper.address
        self.array = np.asarray(keeper)
        self._release = _release_with(keeper, self._address, self.array.nbytes)


class _Keeper:
    """What all views of one piece of memory refer to; numpy reads its array from the interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),
        }


def _release_with(keeper: _Keeper, address: int, nbytes: int) -> weakref.finalize[..., Any]:
    release = weakref.finalize(keeper, _munmap, address, nbytes)
    release.atexit = False  # a thread may still read; the system takes it all anyway
    return release


def _whole(nbytes: int) -> int:
    return nbytes + -nbytes % (HUGE_PAGE_BYTES if nbytes >= HUGE_FROM_BYTES else mmap.PAGESIZE)


def _mapped(nbytes: int, access: int) -> int:
    """Map memory at a multiple of 2 MiB if huge pages are worth it."""
    spare = HUGE_PAGE_BYTES if nbytes >= HUGE_FROM_BYTES else 0
    address = _mmap(None, nbytes + spare, access, _PRIVATE, -1, 0)
    if address == _FAILED:
        raise _no_memory(nbytes)
    before = -address % HUGE_PAGE_BYTES if spare else 0
    if before:
        _munmap(address, before)
    if spare - before:
        _munmap(address + before + nbytes, spare - before)
    return int(address + before)


def _advise(address: int, nbytes: int) -> None:
    """Ask for huge pages; a system without them says no, and goes on with small ones."""
    if nbytes >= HUGE_FROM_BYTES:
        _madvise(address, nbytes, mmap.MADV_HUGEPAGE)


def _no_memory(nbytes: int) -> MemoryError:
    why = os.strerror(ctypes.get_errno())
    return MemoryError(f"no memory for {nbytes} bytes of table rows: {why}")
