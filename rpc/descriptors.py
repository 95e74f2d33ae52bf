"""Descriptors of this process: room for all connections of a server before the first one comes.

Covers: raising the soft limit of RLIMIT_NOFILE (`ulimit -n`), refusing what cannot fit, what is
left of it.
Does not: bound what strangers take of it (rpc.limits).
Threads: any.
"""

from __future__ import annotations

import os
import resource
import sys

from rpc.errors import SettingsError
from rpc.limits import MAX_SPARE_DESCRIPTORS, SPARE_PART

_OTHERS = 64
"""What a process opens beside connections: files, pipes, its own calls."""


def make_room(num_connections: int, *, at_least: int = 0, server: str = "this server") -> None:
    """Raise the soft limit of open files so that a server's connections fit, as far as allowed.

    Args:
        num_connections: number of connections that peers may open.
        at_least: as many will be open at once.
        server: what listens, for the error.

    Raises:
        SettingsError: the hard limit has no room for `at_least` connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = _num_open() + _OTHERS
    limit, wanted = soft, _limit_for(taken + max(num_connections, at_least))
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        limit = most
    needed = _limit_for(taken + at_least) if at_least else 0
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise SettingsError(
            f"{server} needs a limit of {needed} open files for {at_least} connections, but the "
            f"hard limit of this process is {hard} (`ulimit -Hn`): raise it where the process is "
            "started (limits.conf, systemd's LimitNOFILE, a container's --ulimit), or use fewer "
            "nodes"
        )


def num_free() -> int:
    """Return how many files this process may open beside those that it has open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (sys.maxsize if soft == resource.RLIM_INFINITY else soft) - _num_open()


def _num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def _limit_for(num_descriptors: int) -> int:
    """Return the limit that leaves that many beside what strangers may hold of it."""
    with_part = -(-num_descriptors * SPARE_PART // (SPARE_PART - 1))
    return min(with_part, num_descriptors + MAX_SPARE_DESCRIPTORS)
