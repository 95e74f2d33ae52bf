"""Memory that two processes of one host share: one made it and writes, the other one reads.

Covers: sealed anonymous segments (memfd), what must be true of a peer's before it is mapped,
whether this host can share at all, how much a listener shares.
Does not: pass descriptors (transport), say what stands in a segment (shared_stream).
Threads: a segment may be used from any thread; who may write when is its users' affair.

A segment has no name and no file: it is gone with the last process that maps it, however that
ends, and the size of /dev/shm does not matter. Its size is sealed, and so is everybody else's
writing. A peer's segment is refused unless it is sealed alike: a mapping whose pages its maker
takes away would end this process by SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import stat
import threading

from rpc.errors import ProtocolError

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SEAL_SEAL = 0x01
_SEAL_SHRINK = 0x02
_SEAL_GROW = 0x04
_SEAL_FUTURE_WRITE = 0x10
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE
"""FUTURE_WRITE: only the maker's own mapping writes; it also forbids to punch holes."""
_STRONG_ORDER = ("x86_64", "AMD64")


def cannot_share() -> str:
    """Say why this host cannot share memory between processes; empty if it can.

    A reader that sees a counter must also see the bytes stored before it: x86 keeps stores and
    loads in order, other processors would need fences that Python does not have.
    """
    if platform.machine() not in _STRONG_ORDER:
        return f"{platform.machine()} may reorder memory accesses; only x86-64 is supported"
    if not hasattr(os, "memfd_create"):
        return "this Python has no memfd_create"
    return ""


class SharedRoom:
    """How much memory the connections of one listener may share altogether.

    Threads: any.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._left_bytes = limit_bytes
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Take some of it; False, and nothing taken, if that is more than is left."""
        with self._lock:
            if num_bytes > self._left_bytes:
                return False
            self._left_bytes -= num_bytes
            return True

    def give_back(self, num_bytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._left_bytes += num_bytes


class SharedMemory:
    """Mapped shared memory; close it when nobody uses its bytes any more."""

    def __init__(self, descriptor: int, num_bytes: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=protection)
        self.bytes = memoryview(self._map)
        """All of it; read-only for a peer's segment."""

    @classmethod
    def make(cls, name: str, num_bytes: int) -> tuple[SharedMemory, int]:
        """Make a segment that this process alone may write.

        Its memory is taken at once: too little of it is an error here, and no SIGBUS later.

        Args:
            name: shown in /proc to whoever looks for the memory.
            num_bytes: its size for good.

        Returns:
            The segment, and the descriptor to pass on and then to close.

        Raises:
            OSError: no memory, or this kernel does not seal.
        """
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
        """Map a peer's segment for reading; the descriptor stays the caller's.

        Raises:
            ProtocolError: it is no memory, has another size, or is not sealed.
            OSError: it cannot be mapped.
        """
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
            raise ProtocolError(
                f"the peer announced shared memory of {num_bytes} bytes, its descriptor is of "
                f"mode {status.st_mode:o} and {status.st_size} bytes"
            )
        try:
            seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
        except OSError as error:
            raise ProtocolError(f"the peer's shared memory is a file: {error.strerror}") from error
        if seals & _SEALS != _SEALS:
            raise ProtocolError(
                f"the peer's shared memory has the seals {seals:#x}, expected {_SEALS:#x}: its "
                "maker could take pages away"
            )
        return cls(descriptor, num_bytes, writable=False)

    def close(self) -> None:
        """Unmap; every view of `bytes` must have been released. Idempotent."""
        self.bytes.release()
        self._map.close()
