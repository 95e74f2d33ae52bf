"""Find the processes that a test's program left, by a marker in the environment they inherited."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

MARKER = "TFOS_TEST_MARK"


def marked(mark: str) -> dict[int, str]:
    """Map pid to command line of every live process whose environment carries `mark`."""
    needle = f"{MARKER}={mark}".encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                continue
            found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def wait_gone(mark: str, timeout_s: float) -> dict[int, str]:
    """Wait until no process carries `mark`; return those left at the deadline."""
    deadline = time.monotonic() + timeout_s
    pulse = threading.Event()
    while True:
        left = marked(mark)
        if not left or time.monotonic() > deadline:
            return left
        pulse.wait(0.1)


def below(directory: Path) -> dict[int, str]:
    """Map pid to command line of every process whose arguments or environment name `directory`.

    YARN's daemons, the drivers and executors in its containers, and what those have started.
    """
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            line = (entry / "cmdline").read_bytes()
            if os.fsencode(directory) in line + (entry / "environ").read_bytes():
                found[int(entry.name)] = line.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def kill(pids: dict[int, str]) -> None:
    """End what is left, so that one failing test does not disturb the next."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
