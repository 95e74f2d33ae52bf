"""Fencing of PS processes: the newest generation of a rank serves, older ones exit.

A server that was replaced while it was frozen does not know it when it is thawed. So each start
takes the next number in a small file beside the checkpoints; who finds a higher one there ends.

Covers: taking a number, noticing a higher one.
Does not: end the process (ps.cli.serve, tfos.node.ps_process), choose between clients
(ps.client.channel).
Runs in: PS processes.      Threads: any.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time

import msgspec

from ps import codec
from ps.checkpoint.lease import Lease
from ps.checkpoint.storage import Storage, read_small, typed_errors
from ps.codec import UNREADABLE
from ps.errors import CheckpointError, ServerPhaseError
from rpc.endpoint import Endpoint

LOOK_S = 1.0
"""A server that has not looked for so long does so before it answers: it may have been frozen."""

_REFUSAL = "does not serve; stop one of them"


class Generation(msgspec.Struct, frozen=True):
    """The content of the file."""

    cluster_id: str
    number: int
    host: str
    pid: int
    endpoint: Endpoint | None = None
    """Where it listens."""


class GenerationFence:
    """One server's number among all processes that were this server.

    Args:
        storage: the checkpoint root, the same for all of them.
        cluster_id: another cluster's files there mean nothing to this server.
        rank: of the server.
    """

    def __init__(self, storage: Storage, cluster_id: str, rank: int) -> None:
        self._storage = storage
        self._name = _name_of(rank)
        self._server = f"ps:{rank}"
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._mine = Generation(cluster_id, 0, socket.gethostname(), os.getpid())
        newest = self.successor()
        number = newest.number + 1 if newest else 1
        self._mine = msgspec.structs.replace(self._mine, number=number)

    def claim(self, endpoint: Endpoint | None = None) -> None:
        """Take the number, once this process can serve; a process with a lower number ends.

        Args:
            endpoint: where it listens.

        Raises:
            CheckpointError: another process was faster, or the disk fails.
        """
        storage, name = self._storage, self._name
        owner = f"{self._server}, start {self.number}, {secrets.token_hex(4)}"
        claim = Lease(storage, owner, name=f"{name}.lease", refusal=_REFUSAL)
        try:
            claim.take()
            with typed_errors(storage, name, "write"):
                found = _read(read_small(storage, name))
                is_ours = found is not None and found.cluster_id == self._mine.cluster_id
                if is_ours and found and found.number >= self.number:
                    raise CheckpointError(
                        f"{self.replaced_text(found)} while it started; stop one of them"
                    )
                mine = msgspec.structs.replace(self._mine, endpoint=endpoint)
                with claim.held():
                    storage.put(name, msgspec.json.encode(mine), overwrite=True)
        finally:
            claim.release()

    @property
    def number(self) -> int:
        """1 for the first process, one more for each that replaces it; taken by `claim`."""
        return self._mine.number

    def successor(self) -> Generation | None:
        """Return who has replaced this process, as the file says now."""
        try:
            found = _read(read_small(self._storage, self._name))
        except (OSError, CheckpointError):
            return None  # a disk that is away is no successor
        is_other = found is not None and found.cluster_id == self._mine.cluster_id
        return found if is_other and found and found.number > self.number else None

    def check(self) -> None:
        """Look again if the last look is old.

        Raises:
            ServerPhaseError: this process was replaced and must not answer.
        """
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._looked_s < LOOK_S:
                return
            self._looked_s = now_s
        newer = self.successor()
        if newer is not None:
            with self._lock:
                self._looked_s = 0.0  # every later look has the same answer
            raise ServerPhaseError(self.replaced_text(newer))

    def replaced_text(self, newer: Generation) -> str:
        """Say who is the server now."""
        return (
            f"{self._server} (start {self.number}, pid {os.getpid()}) was replaced by start "
            f"{newer.number} (host {newer.host}, pid {newer.pid})"
        )


def endpoint_of(storage: Storage, cluster_id: str, rank: int) -> Endpoint | None:
    """Return where the newest process of a server listens; None: none of this cluster has said.

    Raises:
        OSError, CheckpointError: the file system is away.
    """
    found = _read(read_small(storage, _name_of(rank)))
    return found.endpoint if found is not None and found.cluster_id == cluster_id else None


def _name_of(rank: int) -> str:
    return f"ps-{rank}.epoch"


def _read(data: bytes | None) -> Generation | None:
    if not data:
        return None
    try:
        return codec.json(data, Generation)
    except UNREADABLE:
        return None
