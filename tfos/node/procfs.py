"""Processes by /proc and pidfd: descendants, the executor's JVM, ending them.

Covers: the kernel's data about processes (procfs, pidfd, prctl).
Does not: start any, or decide which must end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from rpc.linux_calls import pidfd_open, pidfd_send_signal
from rpc.process_stat import resident_bytes, stat_fields

_PR_SET_CHILD_SUBREAPER = 36
_CHILD_LISTS = Path("/proc/thread-self/children")
"""Not there in a kernel without CONFIG_PROC_CHILDREN."""
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 has a number for no limit: the largest one, rounded to pages."""


def become_subreaper() -> None:
    """Make orphaned descendants of this process its children, so that none escapes a kill."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(errno)}")


def parent_of(pid: int) -> int | None:
    """Return the parent's pid, or None if there is no such process."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def is_suspended(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP; it neither runs nor ends."""
    return stat_fields(pid)[:1] == [b"T"]


def java_ancestor() -> int | None:
    """Return the pid of the nearest ancestor that is a JVM, or None.

    The parent of a PySpark worker is the Python daemon, whose parent is the executor; without the
    daemon, or with a wrapper script as Python, the distance differs.
    """
    pid = parent_of(os.getpid())
    while pid:
        words = command_line(pid)
        if words and Path(words[0]).name == "java":
            return pid
        pid = parent_of(pid)
    return None


def command_line_option(pid: int, option: str) -> str:
    """Return the word after `option` in a process's command line, or an empty string.

    Args:
        pid: pid of the process.
        option: the option, for example "--executor-id".
    """
    words = command_line(pid)
    return words[words.index(option) + 1] if option in words[:-1] else ""


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd, or None if there is no such process any more."""
    try:
        return pidfd_open(pid)
    except ProcessLookupError:
        return None


def wait_exited(pidfds: Collection[int], timeout_s: float) -> bool:
    """Wait until all of these processes have ended; False at the deadline.

    Args:
        pidfds: pidfds of the processes.
        timeout_s: seconds for all of them together.
    """
    deadline_s = time.monotonic() + timeout_s
    left = set(pidfds)
    poll = select.poll()
    for pidfd in left:
        poll.register(pidfd, select.POLLIN)
    while left:
        ready = poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000)
        if not ready:
            return False
        for pidfd, _ in ready:
            poll.unregister(pidfd)
            left.discard(pidfd)
    return True


def descendants(*, spare: Collection[int] = ()) -> dict[int, int]:
    """Return pid and parent of all descendants, but for `spare` and what descends from those."""
    children_of: dict[int, list[int]] = {}
    for pid in _all_pids():
        parent = parent_of(pid)
        if parent is not None:
            children_of.setdefault(parent, []).append(pid)
    found: dict[int, int] = {}
    waiting = [os.getpid()]
    while waiting:
        parent = waiting.pop()
        for pid in children_of.get(parent, ()):
            if pid not in spare:
                found[pid] = parent
                waiting.append(pid)
    return found


def descendants_rss_bytes(*, spare: Collection[int] = ()) -> int:
    """Return the memory that all descendants have resident, in bytes; pages they share count twice.

    Args:
        spare: pids that do not count, with what descends from them.
    """
    if not _CHILD_LISTS.exists():
        return sum(map(resident_bytes, descendants(spare=spare)))
    total_bytes, waiting = 0, [os.getpid()]
    while waiting:
        for pid in _children_of(waiting.pop()):
            if pid not in spare:
                total_bytes += resident_bytes(pid)
                waiting.append(pid)
    return total_bytes


def kill_descendants(*, spare: Collection[int] = (), timeout_s: float = 5.0) -> list[int]:
    """Kill every descendant of this process and wait until they have ended.

    Needs `become_subreaper`: this process adopts the orphans of a killed parent and finds them in
    the next round. Children stay zombies until their owner, or `reap_orphans`, waits for them.

    Args:
        spare: pids that are left alone.
        timeout_s: seconds for all of them together.

    Returns:
        The pids still alive at the deadline (a process in uninterruptible sleep cannot be killed).
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.ExitStack() as stack:
            alive = {
                pid: pidfd
                for pid, parent in descendants(spare=spare).items()
                if (pidfd := _pidfd_of(pid, parent, stack)) is not None
            }
            for pidfd in alive.values():
                with contextlib.suppress(ProcessLookupError):
                    pidfd_send_signal(pidfd, signal.SIGKILL)
            if not alive:
                return []
            remaining_s = deadline_s - time.monotonic()
            if not wait_exited(alive.values(), max(0.0, remaining_s)) or remaining_s <= 0:
                return [pid for pid, pidfd in alive.items() if not wait_exited([pidfd], 0)]


def reap_orphans(*, own: Collection[int]) -> None:
    """Reap ended orphans; other code reaps the processes in `own`."""
    for pid in _children_of(os.getpid()):
        if pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def oom_kills() -> int:
    """Return how often the kernel killed for memory in this process's cgroup (v2 or v1), or 0."""
    candidates = [
        _CGROUPS / path.lstrip("/") / "memory.events"
        if not controllers
        else _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
        for controllers, path in _own_cgroups()
    ]
    count = 0
    for candidate in candidates:
        with contextlib.suppress(OSError, ValueError):
            words = candidate.read_text().split()
            count += int(words[words.index("oom_kill") + 1])
    return count


def memory_limit_bytes() -> int | None:
    """Return the smallest memory limit of this process's cgroups (v2 or v1), or None."""
    found: list[int] = []
    for controllers, path in _own_cgroups():
        group = (_CGROUPS / "memory" if controllers else _CGROUPS) / path.lstrip("/")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        for candidate in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is not a number
                limit = int((candidate / name).read_text())
                found += [limit] if limit < _NO_LIMIT_BYTES else []
    return min(found, default=None)


def _own_cgroups() -> list[tuple[str, str]]:
    """Return (controllers, path) of the unified and of the memory hierarchy."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        fields = (line.split(":", 2) for line in lines)
        return [(name, path) for _, name, path in fields if name == "" or "memory" in name]
    return []


def _pidfd_of(pid: int, parent: int, stack: contextlib.ExitStack) -> int | None:
    """Open a pidfd of a live descendant, or None if it ended meanwhile."""
    pidfd = open_pidfd(pid)
    if pidfd is None:
        return None
    stack.callback(os.close, pidfd)
    # A pid given to a stranger between listing and opening has a parent that is not of our tree.
    is_ours = parent_of(pid) in (parent, os.getpid())
    return pidfd if is_ours and not wait_exited([pidfd], 0) else None


def _children_of(pid: int) -> list[int]:
    """Return a process's children; one may be missing while others end.

    The kernel lists them for each thread. To look at all processes of a host took 0.12 s for 2,000.
    """
    if not _CHILD_LISTS.exists():
        return [each for each in _all_pids() if parent_of(each) == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return found


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; none if it has ended."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").split("\0")
