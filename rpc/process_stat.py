"""Process figures from /proc: the fields of a process's stat, and its resident memory.

Covers: reading them, also of a process that ends meanwhile.
Does not: name processes for good (rpc.process_id), list or end them (tfos.node.procfs).
Threads: any.
"""

from __future__ import annotations

import os
from pathlib import Path


def stat_fields(pid: int) -> list[bytes]:
    """Return state, parent and the fields after them; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return stat.rpartition(b")")[2].split()  # the process name before it may contain anything


def resident_bytes(pid: int) -> int:
    """Return the memory that a process has resident; 0 if there is no such process, or no /proc."""
    return _memory(pid)[0]


def private_bytes(pid: int) -> int:
    """Return its resident memory but for mapped files and shared memory; 0 as resident_bytes."""
    resident, shared = _memory(pid)
    return resident - shared


def _memory(pid: int) -> tuple[int, int]:
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_bytes().split()[1:3]
    except OSError:
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return int(resident) * page, int(shared) * page
