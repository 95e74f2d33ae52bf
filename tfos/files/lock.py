"""Shutting others out of a small file on a file system that has no locks.

Whoever makes the file `.NAME.lock` first has the lock; its content is who that is and a number that
grows every few seconds. A lock is taken away when its process has certainly ended: at once on this
host, and of any other host when its number stood still for `SILENT_S` of our own monotonic clock,
of which only the time counts in which the file system answered.

Limits: a process that was frozen for longer than `SILENT_S` within its lock does not know that it
has lost it until it writes; what it does then beside the file (one rename) may still happen. Where
a rename is not exclusive (all but HDFS), whoever has made the file looks again a moment later
whether it is still its own; two that come while the store is slower than that moment both have the
lock, and the lease that is kept under it (ps.checkpoint.lease) still has one owner.

Covers: taking, keeping and giving back one lock at a time.
Does not: know what is locked and why (ps.checkpoint.lease).
Threads: any; `storage-lock` keeps a lock while it is held.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from feeding.filesystem.interface import FileSystem
from feeding.filesystem.location import HADOOP, Location
from ps.checkpoint.format import STAGING_PREFIX
from ps.checkpoint.lease import Holder, Silence, is_gone, read_holder, this_process
from ps.errors import CheckpointError

_logger = logging.getLogger(__name__)

BEAT_S = 5.0
SILENT_S = 45.0
"""A beat is a small file, which may wait 20 s for the end of a DataNode that is dead."""
TIMEOUT_S = 90.0
"""For a lock that another one keeps, or that falls silent."""
POLL_S = 0.2
SETTLE_S = 0.3
_MAX_NBYTES = 1 << 20
_MAX_REMEMBERED = 256


class RemoteLock:
    """Locks of one directory's files.

    Args:
        fs: the directory's file system.
        cleaning: the same one with less patience, to let go of what is not worth a long wait.
    """

    def __init__(self, fs: FileSystem, cleaning: FileSystem) -> None:
        self._fs = fs
        self._cleaning = cleaning
        self._given_back: deque[str] = deque(maxlen=_MAX_REMEMBERED)
        """Owners in locks that may still be there: a request that was given up may be carried out
        when its server thaws."""

    @contextmanager
    def held(self, directory: Location, name: str) -> Iterator[RemoteFile]:
        """Hold the lock of a file; yields the file.

        Raises:
            CheckpointError: another process keeps it for too long.
            OSError: the file system fails.
        """
        mine = this_process(secrets.token_hex(8))
        lock = _LockFile(self._fs, directory, name)
        if self._take(lock, mine):
            lock.remove_unfinished()
        ended = threading.Event()
        quick = _LockFile(self._cleaning, directory, name)
        keeper = threading.Thread(
            target=_keep, args=(quick, mine, ended), name="storage-lock", daemon=True
        )
        keeper.start()
        try:
            yield RemoteFile(self._fs, str(directory.child(name)), lock, mine)
        finally:
            ended.set()
            keeper.join()
            self._give_back(quick, mine)

    def _take(self, lock: _LockFile, mine: Holder) -> bool:
        """Wait for the lock; returns whether it was taken away from one that is gone."""
        is_taken_away = False
        silence = Silence(3 * POLL_S)
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            if lock.make(mine) and lock.is_settled(mine):
                return is_taken_away
            found = lock.read()
            holder = read_holder(found) if found else None
            if holder is not None and holder.owner == mine.owner and lock.is_settled(mine):
                return is_taken_away  # the answer to an earlier attempt was lost
            silent_s = silence.look(found, time.monotonic())
            if holder is not None and (holder.owner in self._given_back or is_gone(holder)):
                silent_s = SILENT_S
            if found and silent_s >= SILENT_S:
                _logger.warning("%s: taken away from %s, which is gone", lock.path, _named(holder))
                lock.take_away(found)
                is_taken_away = True
            elif time.monotonic() >= deadline_s:
                raise CheckpointError(
                    f"{lock.path} is kept by {_named(holder)} for more than {TIMEOUT_S:.0f} s"
                )
            else:
                time.sleep(POLL_S)

    def _give_back(self, lock: _LockFile, mine: Holder) -> None:
        self._given_back.append(mine.owner)
        try:
            if lock.is_of(mine):
                lock.remove()
        except OSError as error:
            _logger.warning("%s was not removed, and will be: %s", lock.path, error)


class RemoteFile:
    """See ps.checkpoint.storage.LockedFile."""

    def __init__(self, fs: FileSystem, path: str, lock: _LockFile, mine: Holder) -> None:
        self._fs = fs
        self._path = path
        self._lock = lock
        self._mine = mine

    def read(self) -> bytes:
        """See LockedFile."""
        return _read(self._fs, self._path)

    def write(self, data: bytes) -> None:
        """See LockedFile.

        Raises:
            CheckpointError: the lock was taken away, for this process was silent.
        """
        if not self._lock.is_of(self._mine):
            raise CheckpointError(f"{self._lock.path} was taken away: this process was frozen")
        if data:
            self._fs.write(self._path, data)
        else:
            self._fs.delete(self._path)


class _LockFile:
    def __init__(self, fs: FileSystem, directory: Location, name: str) -> None:
        self._fs = fs
        self._is_exclusive = directory.scheme in HADOOP
        self._directory = directory
        self._unfinished = (f".{name}.", f"..{name}.lock.")
        """How the names begin under which this file and the locked one are written."""
        self.path = str(directory.child(f".{name}.lock"))

    def make(self, holder: Holder) -> bool:
        """Make the file, unless there is one."""
        try:
            self._fs.write(self.path, msgspec.json.encode(holder), overwrite=False)
        except (FileExistsError, FileNotFoundError):  # the latter: see remove_unfinished
            return False
        return True

    def is_settled(self, holder: Holder) -> bool:
        """Whether nobody has made the file at the same time."""
        if self._is_exclusive:
            return True
        time.sleep(SETTLE_S)
        return self.is_of(holder)

    def read(self) -> bytes:
        return _read(self._fs, self.path)

    def is_of(self, holder: Holder) -> bool:
        found = read_holder(self.read())
        return found is not None and found.owner == holder.owner

    def beat(self, holder: Holder) -> None:
        if self.is_of(holder):
            self._fs.write(self.path, msgspec.json.encode(holder))

    def take_away(self, found: bytes) -> None:
        """Remove the file if its content is `found`; of many who try this, one renames it."""
        aside = str(self._directory.child(f"{STAGING_PREFIX}{secrets.token_hex(8)}"))
        try:
            self._fs.rename(self.path, aside)
        except FileNotFoundError:
            return
        if _read(self._fs, aside) == found:
            self._fs.delete(aside)
            return
        # Somebody else's, made meanwhile: back to its place, if nobody has taken or cleaned it.
        with suppress(FileExistsError, FileNotFoundError):
            self._fs.rename(aside, self.path)

    def remove_unfinished(self) -> None:
        """Remove what a holder has left that was killed while it wrote; only with the lock.

        Another one that waits for the lock may lose its attempt, and makes another.
        """
        with suppress(OSError):
            for entry in self._fs.entries(str(self._directory)):
                if entry.name.startswith(self._unfinished) and entry.name.endswith(".tmp"):
                    self._fs.delete(entry.path)

    def remove(self) -> None:
        self._fs.delete(self.path)


def _keep(lock: _LockFile, mine: Holder, ended: threading.Event) -> None:
    beat = 0
    while not ended.wait(BEAT_S):
        beat += 1
        try:
            lock.beat(msgspec.structs.replace(mine, beat=beat))
        except OSError as error:
            _logger.warning("%s was not renewed: %s", lock.path, error)


def _read(fs: FileSystem, path: str) -> bytes:
    try:
        with fs.open(path) as reader:
            return reader.read_range(0, min(reader.size_bytes, _MAX_NBYTES))
    except FileNotFoundError:
        return b""


def _named(holder: Holder | None) -> str:
    return f"host {holder.host}, pid {holder.pid}" if holder else "nobody who can be read"
