"""Named shared memory that processes left behind: files in /dev/shm that no living one uses."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

DIRECTORY = Path("/dev/shm")
File = tuple[int, int]
"""Device and inode: a semaphore is renamed after it was mapped."""


def named() -> set[str]:
    return set(os.listdir(DIRECTORY))


def left_since(before: set[str], timeout_s: float) -> set[str]:
    """Wait until each new file is gone or some process's; return the others.

    Ask when our own processes have ended: what a living one uses is another program's.
    """
    deadline_s = time.monotonic() + timeout_s
    pulse = threading.Event()
    while (left := _unused(named() - before)) and time.monotonic() < deadline_s:
        pulse.wait(0.1)
    return left


def _unused(names: set[str]) -> set[str]:
    files: dict[File, str] = {}
    for name in names:
        try:
            found = (DIRECTORY / name).stat()
        except FileNotFoundError:
            continue
        if found.st_uid == os.getuid():
            files[found.st_dev, found.st_ino] = name
    if not files:
        return set()
    for process in Path("/proc").glob("[0-9]*"):
        for used in _used_by(process):
            files.pop(used, None)
    return set(files.values()) & named()


def _used_by(process: Path) -> Iterator[File]:
    """Give what a process maps or holds open; nothing of one that has ended meanwhile."""
    try:
        for line in (process / "maps").read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if f"{DIRECTORY}/" in fields[-1]:
                major, minor = fields[3].split(":")
                yield os.makedev(int(major, 16), int(minor, 16)), int(fields[4])
        for entry in (process / "fd").iterdir():
            found = entry.stat()
            yield found.st_dev, found.st_ino
    except OSError:
        return
