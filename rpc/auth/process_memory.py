"""Memory of a process that holds the cluster's secret: no core dumps, no other process reads it.

Covers: the soft limit of core dumps, PR_SET_DUMPABLE.
Does not: protect from root, or a process of another kernel (not Linux: only the limit is set).
Threads: call it before the secret is read.
"""

from __future__ import annotations

import ctypes
import resource
import sys

_PR_SET_DUMPABLE = 4


def forbid_core_dumps() -> None:
    """Set the soft limit of core dumps to 0; programs started from here inherit it.

    The hard limit stays: user code that needs a core dump can raise the soft one again.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def forbid_reading() -> None:
    """Also keep other processes of this user from reading the memory (ptrace, /proc/PID/mem).

    Not inherited by a program that this one starts. Debuggers need root afterwards.
    """
    forbid_core_dumps()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
