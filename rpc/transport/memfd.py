"""Shared memory segments: one process makes and writes a sealed memfd, one other process maps it.

Covers: sealed anonymous segments, the checks of a peer's segment before it is mapped, whether this
host supports them, the quota of a listener.
Does not: pass descriptors (stream), define a segment's content (shm_stream).
Threads: any thread may use a segment; its users agree on who writes when.

A segment has no name and no file: the kernel frees it with the last process that maps it, and the
size of /dev/shm does not matter. Seals fix its size and forbid other processes to write. A peer's
segment must carry the same seals: if its maker could remove pages, reading them would end this
process by SIGBUS.
Source: memfd_create(2), fcntl(2) F_ADD_SEALS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import stat
import threading

from rpc.errors import ProtocolError
from rpc.linux_calls import MFD_ALLOW_SEALING, MFD_CLOEXEC, memfd_create

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SEAL_SEAL = 0x01
_SEAL_SHRINK = 0x02
_SEAL_GROW = 0x04
_SEAL_FUTURE_WRITE = 0x10
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE
"""FUTURE_WRITE: only the maker's own mapping may write; it also forbids punching holes."""


def cannot_share() -> str:
    """Return why this host cannot share memory between processes; empty if it can.

    A reader that sees a counter must also see the bytes stored before it. x86 keeps stores in order
    and loads in order (TSO); other processors need memory fences, which Python does not offer.
    """
    if platform.machine() != "x86_64":
        return f"{platform.machine()} may reorder memory accesses; only x86-64 is supported"
    return ""


class SharedMemoryQuota:
    """Bounds the memory that the connections of one listener share in total.

    Threads: any.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._left_bytes = limit_bytes
        self._lock = threading.Lock()

    def acquire(self, num_bytes: int) -> bool:
        """Reserve bytes; False, with nothing reserved, if fewer are left."""
        with self._lock:
            if num_bytes > self._left_bytes:
                return False
            self._left_bytes -= num_bytes
            return True

    def release(self, num_bytes: int) -> None:
        """Return reserved bytes."""
        with self._lock:
            self._left_bytes += num_bytes


class SharedMemory:
    """Mapped shared memory; close it when no view of its bytes is in use.

    Args:
        descriptor: an open memfd; the caller closes it.
        num_bytes: size of the mapping.
        writable: map it for writing too.
    """

    def __init__(self, descriptor: int, num_bytes: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=protection)
        self.bytes = memoryview(self._map)
        """All of it; read-only for a peer's segment."""

    @classmethod
    def make(cls, name: str, num_bytes: int) -> tuple[SharedMemory, int]:
        """Make a segment that this process alone may write.

        Its memory is allocated at once: a lack of memory is an error here and no SIGBUS later.

        Args:
            name: shown in /proc/PID/maps.
            num_bytes: size of the segment; it never changes.

        Returns:
            The segment, and its descriptor: the caller passes it on and closes it.

        Raises:
            OSError: out of memory, or this kernel does not support seals.
        """
        descriptor = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            os.posix_fallocate(descriptor, 0, num_bytes)
            segment = cls(descriptor, num_bytes, writable=True)
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        return segment, descriptor

    @classmethod
    def take(cls, descriptor: int, num_bytes: int) -> SharedMemory:
        """Map a peer's segment for reading.

        Args:
            descriptor: descriptor of the segment; the caller closes it.
            num_bytes: size that the peer announced.

        Raises:
            ProtocolError: it is not a memfd, has another size, or is not sealed.
            OSError: it cannot be mapped.
        """
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
            raise ProtocolError(
                f"the peer announced shared memory of {num_bytes} bytes, its descriptor has "
                f"mode {status.st_mode:o} and {status.st_size} bytes"
            )
        try:
            seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
        except OSError as error:
            raise ProtocolError(f"the peer's shared memory is a file: {error.strerror}") from error
        if seals & _SEALS != _SEALS:
            raise ProtocolError(
                f"the peer's shared memory has the seals {seals:#x}, expected {_SEALS:#x}: its "
                "maker could remove pages"
            )
        return cls(descriptor, num_bytes, writable=False)

    def close(self) -> None:
        """Unmap; every view of `bytes` must have been released. Idempotent."""
        self.bytes.release()
        self._map.close()
