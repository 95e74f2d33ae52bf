"""One process of a local HDFS: started apart from its starter, found again, ended by identity.

A pid alone may belong to somebody else by now, so a process is known by pid and start time, and is
signalled through a descriptor that cannot change its meaning.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.local_hdfs.errors import LocalHdfsError

STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Daemon:
    """A process that was started here; it may have ended since."""

    name: str
    pid: int
    start_ticks: int
    """Clock ticks since boot at which it began."""

    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return _start_ticks(self.pid) == self.start_ticks

    def signal(self, number: int) -> bool:
        """Send a signal to this process and to no other; False if it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def freeze(self, timeout_s: float = 10.0) -> None:
        """Stop it, and wait until no thread runs: one that was at work may finish an answer.

        Raises:
            LocalHdfsError: the daemon has ended, or a thread still runs after `timeout_s`.
        """
        if not self.signal(signal.SIGSTOP):
            raise LocalHdfsError(f"process {self.pid} has ended; nothing to freeze")
        deadline_s = time.monotonic() + timeout_s
        while running := _running_threads(self.pid):
            if time.monotonic() > deadline_s:
                raise LocalHdfsError(
                    f"{running} threads of process {self.pid} run {timeout_s:g} s after SIGSTOP"
                )
            time.sleep(0.001)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False at the deadline."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.is_alive():
                return True
            return bool(select.select([descriptor], [], [], timeout_s)[0])
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """End it: asked first, then killed."""
        self.signal(signal.SIGCONT)  # a stopped process would not hear the question
        if self.signal(signal.SIGTERM) and not self.wait(STOP_TIMEOUT_S):
            self.kill()

    def kill(self) -> None:
        """End it at once, as a crash of its host would."""
        if self.signal(signal.SIGKILL):
            self.wait(STOP_TIMEOUT_S)


def spawn(name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Daemon:
    """Start a process in a session of its own whose output is added to `log`."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )
    _STARTED_HERE.append(process)
    return Daemon(name, process.pid, _start_ticks(process.pid) or 0)


def reap() -> None:
    """Forget the children of this process that have ended."""
    _STARTED_HERE[:] = [process for process in _STARTED_HERE if process.poll() is None]


_STARTED_HERE: list[subprocess.Popen[bytes]] = []
"""A Popen object that is dropped while its process runs would warn."""


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return None if fields[0] == "Z" else int(fields[19])


def _running_threads(pid: int) -> int:
    """Count the threads of a process that SIGSTOP has not stopped yet."""
    running = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            running += stat.read_text().rpartition(")")[2].split()[0] not in ("T", "t")
    return running
