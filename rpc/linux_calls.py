"""Linux' calls for files in memory and for processes, also where this Python has none of them.

Pythons of uv and conda are built for systems older than those they run on, and leave out the calls
that these lack, though the kernel has them. Signatures and errors are Python's own.

Covers: memfd_create, pidfd_open, pidfd_send_signal, and the constants that go with them.
Does not: work on other processors than x86-64 and arm64 where Python lacks memfd_create.
Threads: any.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal

MFD_CLOEXEC = 1
MFD_ALLOW_SEALING = 2
P_PIDFD = 3
"""Of os.waitid."""
_PIDFD_SEND_SIGNAL = 424
_PIDFD_OPEN = 434
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
"""Numbers of the calls; those of the newer ones are the same on every processor."""


def memfd_create(name: str, flags: int = MFD_CLOEXEC) -> int:
    """Return a descriptor of a new file in memory.

    Args:
        name: shown in /proc/PID/fd.
        flags: MFD_CLOEXEC, MFD_ALLOW_SEALING.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    number = _MEMFD_CREATE.get(platform.machine())
    if number is None:
        text = f"this Python has no memfd_create ({platform.machine()}): use another one"
        raise OSError(errno.ENOSYS, text)
    return _call(number, os.fsencode(name), flags)


def pidfd_open(pid: int) -> int:
    """Return a descriptor of a process, which becomes readable when that ends; close-on-exec.

    Raises:
        ProcessLookupError: there is no such process.
    """
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else _call(_PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Send a signal to the process of a descriptor, and never to a later one of its pid.

    Args:
        pidfd: from `pidfd_open`.
        number: the signal.

    Raises:
        ProcessLookupError: it has ended.
    """
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _call(_PIDFD_SEND_SIGNAL, pidfd, number, None, 0)


def _call(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    passed = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
