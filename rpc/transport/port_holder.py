"""Who holds a TCP port of this host, read from /proc; for error messages only."""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path

_LISTEN = "0A"


def describe_holder(port: int) -> str:
    """Return `pid 4711 (python, user bob)`, or what little can be seen without rights."""
    inodes = _listening_inodes(port)
    if not inodes:
        return "another socket (closed since, or not listening)"
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _holds(process, inodes):
            return _describe(process)
    return "a process of another user or container"


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        descriptors = list((process / "fd").iterdir())
    except OSError:
        return False
    for descriptor in descriptors:
        # A descriptor may be closed between the listing and the reading.
        with contextlib.suppress(OSError):
            link = os.readlink(descriptor)
            if link.startswith("socket:[") and link[8:-1] in inodes:
                return True
    return False


def _describe(process: Path) -> str:
    try:
        name = (process / "comm").read_text().strip()
        uid = process.stat().st_uid
    except OSError:
        return f"pid {process.name}"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return f"pid {process.name} ({name}, user {user})"
