"""A request whose payload is still to be read: the part of rpc's Call that the data path uses.

Covers: the interface, which rpc.server.request.Call has, and so has any stand-in of a test; which
process of a worker makes it, and its name in the record.
Threads: one, that of the connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ps.exactly_once import RequestId
from ps.manifest.manifest import WorkerRank
from ps.protocol.messages import Number
from rpc.auth.handshake import Identity, Role
from rpc.client.connection import Buffer


class Incoming(Protocol):
    """The part of rpc's Call that the data path uses."""

    peer: Identity
    payload_bytes: int

    def read_into(self, view: memoryview) -> None:
        """Read exactly the view's bytes of the request's payload."""

    def discard_rest(self) -> None:
        """Read what is left of the payload and forget it."""

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send a part of the reply's payload."""

    def reply(self, meta: bytes, buffers: Sequence[Buffer] = ()) -> None:
        """Send the last part of the reply.

        Args:
            meta: the encoded reply.
            buffers: its payload.
        """

    def peer_gone(self) -> bool:
        """Whether nobody waits for the reply any more."""


class Attempt(NamedTuple):
    """One process of a worker."""

    worker: WorkerRank
    generation: int


def attempt_of(peer: Identity) -> Attempt | None:
    """Return which process of a worker asks; None: no worker."""
    if peer.role is not Role.WORKER:
        return None
    return Attempt(WorkerRank(peer.rank), peer.generation)


def request_id(peer: Identity, number: Number) -> RequestId:
    """Return the name of a changing request in the record.

    Args:
        peer: the worker.
        number: session and sequence number of the request.
    """
    return RequestId(WorkerRank(peer.rank), peer.generation, number.session, number.sequence)
