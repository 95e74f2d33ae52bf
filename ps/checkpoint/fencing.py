"""Fencing of PS processes: the newest generation of a rank serves, older ones exit.

A server that was replaced while it was frozen does not know it when it is thawed. So each start
takes the next number in a small file beside the checkpoints; one that finds a higher
number there ends.

Workers refuse a server whose number is lower than its predecessor's, so a number must outlive its
file: there are two copies, each with a digest. A damaged copy says nothing, and the server that
serves writes it again. Where both are gone before a start beside checkpoints, it takes the time as
its number, which is higher than all that were counted.

Covers: taking a number, finding a higher one, the two copies.
Does not: choose when to look (ps.successor_watch), end the process (ps.cli.serve), choose between
clients (ps.client.channel).
Runs in: PS processes.      Threads: any.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Iterable

import msgspec

from ps import codec
from ps.checkpoint.choice import steps_on_disk
from ps.checkpoint.digest import digest
from ps.checkpoint.lease import Lease
from ps.checkpoint.storage import Storage, patiently, read_small, typed_errors
from ps.errors import CheckpointError
from rpc.endpoint import Endpoint
from rpc.errors import UNREADABLE
from rpc.field_texts import with_field_texts

_logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""A server that has not looked for this long does so before it answers: it may have been frozen.
Its successor waits as long before it serves. Longer than the time between two looks."""

REPAIR_S = 5.0
"""Seconds between two attempts to rewrite a copy; a full disk is not tried more often."""
_REFUSAL = "does not serve; stop one of them"


@with_field_texts
class Generation(msgspec.Struct, frozen=True):
    """The first line of both copies; the second one is its digest."""

    cluster_id: str
    number: int
    host: str
    pid: int
    token: str
    """Drawn by each process, for two that have one number."""
    endpoint: Endpoint | None = None
    """Where it listens."""


class GenerationFence:
    """One server's number among all processes that were this server.

    Args:
        storage: the checkpoint root, the same for all of them.
        cluster_id: another cluster's files there mean nothing to this server.
        rank: rank of the server.

    Raises:
        CheckpointError: the file system still fails after a few seconds.
    """

    def __init__(self, storage: Storage, cluster_id: str, rank: int) -> None:
        self._storage = storage
        self._names = _names_of(rank)
        self.server = f"ps:{rank}"
        """Its name, for messages."""
        self._repair_s = 0.0
        """When a copy may be written again (monotonic)."""
        self._record = b""
        """What this process has written; empty before its claim."""
        self._mine = Generation(
            cluster_id, 0, socket.gethostname(), os.getpid(), secrets.token_hex(8)
        )
        self._mine = msgspec.structs.replace(self._mine, number=self._next_number())
        owner = f"{self.server}, start {self.number}, {secrets.token_hex(4)}"
        self._turn = Lease(storage, owner, name=f"{self._names[0]}.lease", refusal=_REFUSAL)
        """Lease to write the copies; one object, so that later attempts continue a wait."""

    def claim(self, endpoint: Endpoint | None = None) -> None:
        """Take the number, once this process can serve; a process with a lower number ends.

        Args:
            endpoint: where it listens.

        Raises:
            CheckpointError: another process was faster, or the disk fails.
        """
        self._mine = msgspec.structs.replace(self._mine, endpoint=endpoint)
        self._write()

    def wait_for_older(self) -> None:
        """Wait until no process with a lower number answers any more.

        One that was frozen may have looked just before the claim; it looks again after LOOK_S.
        """
        if self.number > 1:
            time.sleep(LOOK_S)

    @property
    def number(self) -> int:
        """1 for the first process, one more for each that replaces it; taken by `claim`.

        Seconds since 1970 where what was counted is lost, and one more for each after that.
        """
        return self._mine.number

    @property
    def directory(self) -> str:
        """Where the copies are, for messages."""
        return self._storage.where()

    def successor(self) -> Generation | None:
        """Return who has replaced this process, as the copies say now.

        Raises:
            OSError, CheckpointError: the file system gives none.
        """
        newest = self._newest()
        return newest if newest is not None and self._is_after(newest) else None

    def repair(self) -> None:
        """Write the copies again if one of them is lost, damaged or out of date; raises nothing."""
        if not self._record or time.monotonic() < self._repair_s:
            return
        self._repair_s = time.monotonic() + REPAIR_S
        try:
            if not any(map(self._is_to_repair, self._copies())) or not self._storage.names():
                return  # an empty directory is a disk that is away
            self._write(timeout_s=0.0)
        except (OSError, CheckpointError) as error:
            _logger.warning("%s cannot write its number again: %s", self.server, error)
        else:
            where = self._storage.where(self._names[0])
            _logger.warning("%s was lost or damaged; %s has written it again", where, self.server)

    def replaced_text(self, newer: Generation) -> str:
        """Say who is the server now."""
        return (
            f"{self.server} (start {self.number}, pid {os.getpid()}) was replaced by start "
            f"{newer.number} (host {newer.host}, pid {newer.pid})"
        )

    def _is_after(self, other: Generation) -> bool:
        mine = self._mine
        is_twin = other.number == mine.number and other.token != mine.token
        return other.number > mine.number or is_twin

    def _next_number(self) -> int:
        """Return the number of this start; copies that cannot be read now may have any."""

        def read() -> int:
            with typed_errors(self._storage, self._names[0], "read"):
                newest = self._newest()
                return newest.number + 1 if newest else self._first_number()

        try:
            return patiently(read)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. It says which start of {self.server} this is; a server does not start "
                "without it"
            ) from error

    def _first_number(self) -> int:
        """Return the number of a start that finds none: 1, or the time, above all counted ones.

        A damaged copy and checkpoints are of earlier starts, which somebody may know: live workers,
        or a predecessor that is frozen.
        """
        storage = self._storage
        found = [read_small(storage, name) for name in self._names]
        is_damaged = any(data is not None and _read(data) is None for data in found)
        if not is_damaged and not steps_on_disk(storage):
            return 1
        number = int(time.time())
        if is_damaged:
            where = storage.where(self._names[0])
            _logger.warning("%s is damaged: %s is start %d now", where, self.server, number)
        return number

    def _newest(self) -> Generation | None:
        return _newest(self._copies(), self._mine.cluster_id)

    def _copies(self) -> list[Generation | None]:
        return [_read(read_small(self._storage, name)) for name in self._names]

    def _write(self, *, timeout_s: float = math.inf) -> None:
        """Write both copies, while no other process of this server may."""
        storage, turn = self._storage, self._turn
        try:
            turn.take(timeout_s=timeout_s)
            with typed_errors(storage, self._names[0], "write"):
                newest = self._newest()
                if newest is not None and self._is_after(newest):
                    raise CheckpointError(
                        f"{self.replaced_text(newest)} while it started; stop one of them"
                    )
                self._record = _encoded(self._mine)
                with turn.held():
                    for each in reversed(self._names):
                        storage.put(each, self._record, overwrite=True)
        finally:
            turn.release()

    def _is_to_repair(self, copy: Generation | None) -> bool:
        """Whether a copy says nothing, or less than this process; another cluster's is let be."""
        mine = self._mine
        if copy is None:
            return True
        return copy.cluster_id == mine.cluster_id and copy.number < mine.number


def endpoint_of(storage: Storage, cluster_id: str, rank: int) -> Endpoint | None:
    """Return where the newest process of a server listens; None: none of this cluster has said.

    Args:
        storage: the checkpoint root.
        cluster_id: the cluster that the process must belong to.
        rank: rank of the server.

    Raises:
        OSError, CheckpointError: the file system is away.
    """
    copies = [_read(read_small(storage, name)) for name in _names_of(rank)]
    newest = _newest(copies, cluster_id)
    return newest.endpoint if newest is not None else None


def _names_of(rank: int) -> tuple[str, str]:
    return f"ps-{rank}.epoch", f".ps-{rank}.epoch.copy"


def _newest(copies: Iterable[Generation | None], cluster_id: str) -> Generation | None:
    ours = (copy for copy in copies if copy is not None and copy.cluster_id == cluster_id)
    return max(ours, key=lambda copy: copy.number, default=None)


def _encoded(generation: Generation) -> bytes:
    line = msgspec.json.encode(generation)
    return line + b"\n" + digest(line).encode()


def _read(data: bytes | None) -> Generation | None:
    """Return what a copy says; None if it is lost or damaged."""
    line, _, found = (data or b"").partition(b"\n")
    if found != digest(line).encode():
        return None
    try:
        return codec.json(line, Generation)
    except UNREADABLE:
        return None
