"""Lease of a checkpoint directory: one job at a time saves there.

Covers: taking, keeping and giving back the lease; when one of a dead owner is taken over.
Does not: lock files (ps.checkpoint.storage), save (ps.client.saver).
Runs in: the process that commits checkpoints.
Threads: `ps-lease` renews while the lease is held; the public calls from any, one at a time.

An owner is a job, not a process: chief and driver of one cluster share a lease. Another job's is
taken over when its process is certainly gone: on the same host when no process has its pid and
start time; on any other host when it was not renewed for `SILENT_S` of our own monotonic clock, of
which only the time counts in which the file system answered. No wall clock is compared with another
one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ps import codec
from ps.checkpoint.storage import Storage, typed_errors
from ps.codec import UNREADABLE
from ps.errors import CheckpointError
from rpc.endpoint import boot_id

_logger = logging.getLogger(__name__)

LEASE_NAME = "lease.json"
RENEW_S = 15.0
SILENT_S = 60.0
"""Four missed renewals; only a lease of another host is waited for."""
_LOOK_S = 0.5


class Holder(msgspec.Struct, frozen=True):
    """The process that wrote the lease."""

    owner: str
    host: str
    kernel: str
    """Boot id and pid namespace: where `pid` means something."""
    pid: int
    started: str
    """The process's start in clock ticks since boot; tells it from a later one of this pid."""
    beat: int = 0
    """Grows with each renewal."""

    def __str__(self) -> str:
        return f"job {self.owner!r} (host {self.host}, pid {self.pid})"

    def is_same_process(self, other: Holder) -> bool:
        """Whether both were written by one process."""
        return (self.kernel, self.pid, self.started) == (other.kernel, other.pid, other.started)


def this_process(owner: str) -> Holder:
    """Return the holder that this process is."""
    pid = os.getpid()
    return Holder(owner, socket.gethostname(), _kernel(), pid, _start_of(pid))


def is_gone(holder: Holder) -> bool | None:
    """Whether that process has ended; None: it cannot be seen from here."""
    if holder.kernel != _kernel():
        return None
    return _start_of(holder.pid) != holder.started


def read_holder(data: bytes) -> Holder | None:
    """Return who stands in a lease file; None for nobody, or for what nobody can have written."""
    if not data:
        return None
    try:
        return codec.json(data, Holder)
    except UNREADABLE as error:
        _logger.warning("%s is not readable and counts as nobody's: %s", LEASE_NAME, error)
        return None


class Silence:
    """For how long what is seen has been the same, looked at again and again.

    A look counts for as much as a few polls at most: a file system that was away has shown nothing
    meanwhile, and a holder could not write.
    """

    def __init__(self, longest_look_s: float) -> None:
        self._longest_look_s = longest_look_s
        self._seen: bytes | None = None
        self._looked_s = 0.0
        self._silent_s = 0.0

    def look(self, seen: bytes, now_s: float) -> float:
        """Return for how many seconds this was seen."""
        if seen != self._seen:
            self._seen, self._silent_s = seen, 0.0
        else:
            self._silent_s += min(now_s - self._looked_s, self._longest_look_s)
        self._looked_s = now_s
        return self._silent_s


class Lease:
    """A job's right to commit in one directory.

    Args:
        storage: the checkpoint root.
        owner: the job's name; all its processes use the same.
        silent_s: as SILENT_S.
        renew_s: as RENEW_S.
    """

    def __init__(
        self,
        storage: Storage,
        owner: str,
        *,
        silent_s: float = SILENT_S,
        renew_s: float = RENEW_S,
    ) -> None:
        self._storage = storage
        self._me = this_process(owner)
        self._silent_s = silent_s
        self._renew_s = renew_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> bool:
        """Make sure that this job holds the directory.

        May wait `silent_s` for a lease of another host.

        Returns:
            Whether nobody held it before, so whatever is staged there belongs to nobody.

        Raises:
            CheckpointError: another job that lives, or may live, saves here; names it.
        """
        self._ended.clear()
        silence = Silence(3 * _LOOK_S)
        watched: Holder | None = None
        while True:
            with self._locked() as (holder, write):
                if holder is not None and holder.owner == self._me.owner:
                    if is_gone(holder):
                        write(self._me)
                        self._keep_renewing()
                    return False
                silent_s = silence.look(_encode(holder), time.monotonic())
                gone = True if holder is None else is_gone(holder)
                was_silent = gone is None and holder == watched and silent_s >= self._silent_s
                if holder is None or gone or was_silent:
                    self._note_takeover(holder)
                    write(self._me)
                    self._keep_renewing()
                    return True
                if gone is False or (watched is not None and holder != watched):
                    raise self._refused(holder)
                watched = holder
            if self._ended.wait(min(_LOOK_S, self._silent_s)):
                raise self._refused(holder)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do something that no other job may do meanwhile: commit.

        Raises:
            CheckpointError: another job has taken over since `take`.
        """
        with self._locked() as (holder, write):
            if holder is None:  # another process of this job gave it back, or a user removed it
                write(self._me)
                self._keep_renewing()
            elif holder.owner != self._me.owner:
                raise self._refused(holder)
            yield

    def release(self) -> None:
        """Give the directory back if this process holds it. Idempotent, raises nothing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with contextlib.suppress(CheckpointError), self._locked() as (holder, write):
            if holder is not None and holder.is_same_process(self._me):
                write(None)

    @contextmanager
    def _locked(self) -> Iterator[tuple[Holder | None, Callable[[Holder | None], None]]]:
        with (
            typed_errors(self._storage, LEASE_NAME, "lock"),
            self._storage.locked(LEASE_NAME) as file,
        ):
            yield read_holder(file.read()), lambda holder: file.write(_encode(holder))

    def _refused(self, holder: Holder) -> CheckpointError:
        return CheckpointError(
            f"{self._storage.where()} is used by {holder}, so job {self._me.owner!r} (host "
            f"{self._me.host}, pid {self._me.pid}) does not save there; give each job a directory "
            "of its own, or end the other one"
        )

    def _note_takeover(self, holder: Holder | None) -> None:
        if holder is not None:
            _logger.warning("%s: taking over from %s, which is gone", self._storage.where(), holder)

    def _keep_renewing(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._renew, name="ps-lease", daemon=True)
            self._thread.start()

    def _renew(self) -> None:
        beat = 0
        while not self._ended.wait(self._renew_s):
            beat += 1
            try:
                with self._locked() as (holder, write):
                    if holder is None or not holder.is_same_process(self._me):
                        return  # another process of this job has it, or `held` will tell
                    write(msgspec.structs.replace(self._me, beat=beat))
            except CheckpointError as error:
                _logger.warning("the lease was not renewed: %s", error)


def _encode(holder: Holder | None) -> bytes:
    return b"" if holder is None else msgspec.json.encode(holder)


def _kernel() -> str:
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot_id()} {namespace}"


def _start_of(pid: int) -> str:
    """Return a process's start time, empty if there is none with this pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return ""  # ended, and only not yet reaped
    return fields[19]
