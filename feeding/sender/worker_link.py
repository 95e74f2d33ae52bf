"""A feeder's connection to one worker, and what it last heard from there.

Covers: connecting, one call at a time, losing the worker.
Does not: choose workers (routing), decide when to give up (feeder, inference), hold connections
between two partitions (connection_pool).
Threads: one.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import msgspec

from feeding.columnar.chunk import Chunk, decode, payload_bytes
from feeding.config import FeedConfig
from feeding.errors import ChunkError, from_remote
from feeding.protocol import messages
from feeding.protocol.messages import FeedStatus, Hello, Put, Recall, Request
from feeding.protocol.row_ranges import AcceptedRows
from feeding.sender.connection_pool import POOL, IdleConnection, Purpose
from feeding.sender.routing import LaneView
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.client.connect import way_text
from rpc.client.connection import Connection, PendingCall, connect, wait_any
from rpc.endpoint import Endpoint, boot_id
from rpc.errors import RemoteError, RpcError

PATIENCE_S = 1.0
"""A worker that has not answered for this long gets no more chunks until it does."""
FRESH_S = 0.25
"""An older status is asked for again before the next chunk is sent to that worker: one small call.
A longer time would avoid a worker that was read meanwhile. The call also finds a kept connection
that has broken, while nothing depends on it."""


class FeedTarget(msgspec.Struct, frozen=True):
    """A worker that takes rows."""

    worker: int
    name: str
    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that went away while it was fed."""

    worker: int
    name: str
    reason: str
    accepted_rows: int
    """Rows it had accepted from this feeder; the trainer may or may not have seen them."""
    resent_rows: int
    """Rows under way to it, sent to another worker; it may have accepted them before it went."""


@dataclass(slots=True)
class WorkerLink:
    """One worker as one feeder sees it."""

    target: FeedTarget
    connection: Connection | None = None
    pending: PendingCall | None = None
    chunk: Chunk | None = None
    """What the pending call carries."""
    asked_at_s: float = 0.0
    status: FeedStatus = field(default_factory=lambda: FeedStatus(0, 0, room=True, draining=False))
    replied_at_s: float = -math.inf
    """When the status was received, monotonic."""
    is_kept: bool = False
    """The connection is from an earlier partition and has not answered a call of this one yet."""
    way: str = ""
    """How the worker was reached, for people; empty if no connection was made."""
    sent_bytes: int = 0
    sent_chunks: int = 0
    accepted: AcceptedRows = field(default_factory=AcceptedRows)
    ended: bool = False
    """It has read the end of the epoch and can take none of its rows."""
    lost: LostWorker | None = None

    @property
    def accepted_rows(self) -> int:
        """Rows of this partition that it accepted."""
        return self.accepted.num_rows

    @property
    def wants_none(self) -> bool:
        """Whether rows are better sent to others."""
        return self.ended or self.status.draining

    @property
    def alive(self) -> bool:
        """Whether rows may be sent there: it is connected, or connecting was not tried yet."""
        return self.lost is None

    def is_fresh(self, since_s: float) -> bool:
        """Whether the worker is connected, and its status is newer or a call is under way."""
        return self.connection is not None and (
            self.pending is not None or self.replied_at_s >= since_s
        )

    def is_usable(self, since_s: float) -> bool:
        """Whether a chunk may be sent without a greeting first."""
        if not self.is_fresh(since_s):
            return False
        return not self.is_kept or (
            self.connection is not None and not self.connection.peer_closed()
        )

    def take_kept(self, purpose: Purpose) -> None:
        """Use a connection of an earlier partition, if there is one.

        Raises:
            FeedError: as `receive_reply`, for a call of that partition.
        """
        idle = POOL.take(purpose)
        if idle is None:
            return
        self.connection, self.is_kept = idle.connection, True
        self.status, self.replied_at_s = idle.status, idle.replied_at_s
        self.pending, self.asked_at_s = idle.pending, idle.asked_at_s
        if self.pending is not None and self.pending.done():
            self.receive_reply()
            # The reply may be as old as the call: no task of this process has looked since.
            self.replied_at_s, self.is_kept = idle.asked_at_s, self.connection is not None

    def keep(self, purpose: Purpose) -> None:
        """Leave the connection to the next partition, unless a chunk is under way on it."""
        if self.connection is None or self.connection.closed or self.chunk is not None:
            return
        idle = IdleConnection(
            self.connection, self.status, self.replied_at_s, self.pending, self.asked_at_s
        )
        self.connection = self.pending = None
        POOL.give(purpose, idle)

    def open(self, identity: Identity, credentials: Credentials, timeout_s: float) -> None:
        """Connect if it is not connected; a failure makes the worker lost."""
        if self.is_kept and self.connection is not None and self.connection.peer_closed():
            self.close()
        if self.connection is not None:
            return
        try:
            self.connection = connect(
                self.target.endpoint,
                identity,
                credentials,
                expect=Role.WORKER,
                timeout_s=timeout_s,
            )
            self.way = way_text(self.connection.transport, self.target.endpoint)
        except (RpcError, OSError) as error:
            self.lose(f"{type(error).__name__}: {error}")

    def ask(self, request: Request, timeout_s: float, chunk: Chunk | None = None) -> bool:
        """Send a request, with the chunk of a Put; False if the worker is lost by it."""
        if self.connection is None:
            return False
        payload = [] if chunk is None else chunk.encode()
        try:
            self.asked_at_s = time.monotonic()
            self.chunk = chunk
            self.pending = self.connection.start(
                messages.encode(request), payload, timeout_s=timeout_s
            )
        except RpcError as error:
            self.chunk = None
            self.lose(f"{type(error).__name__}: {error}", chunk)
            return False
        if chunk is not None:
            self.sent_bytes += chunk.num_bytes
            self.sent_chunks += 1
        return True

    def put(self, chunk: Chunk, timeout_s: float, attempt: int = 0) -> bool:
        """Send a chunk; False if the worker is lost by it."""
        return self.ask(Put(chunk.meta, attempt), timeout_s, chunk)

    def receive_reply(self) -> Chunk | None:
        """Take the reply of the pending call, which is done; return its chunk if it went nowhere.

        Raises:
            FeedError: the worker refused.
        """
        if self.pending is None:
            return None
        pending, chunk = self.pending, self.chunk
        self.pending = self.chunk = None
        try:
            self.status = messages.decode_status(pending.result(0.0).meta)
        except RemoteError as error:
            raise from_remote(error, self.target.name) from error
        except (RpcError, ChunkError) as error:
            self.lose(f"{type(error).__name__}: {error}", chunk)
            return chunk
        self.replied_at_s, self.is_kept = time.monotonic(), False
        self.ended = self.ended or self.status.ended
        if chunk is not None:
            self.accepted.add(chunk.meta.first_row, chunk.num_rows, self.status.position)
        return None

    def recall(self, hello: Hello, timeout_s: float) -> AcceptedRows:
        """Ask what the worker accepted of this partition from earlier feeders.

        Raises:
            FeedError: the worker refused.
        """
        found = AcceptedRows()
        while self.connection is not None and len(found) < self.status.accepted:
            request = Recall(hello.feed, hello.epoch, hello.partition, len(found))
            try:
                reply = self.connection.call(messages.encode(request), timeout_s=timeout_s)
                entries = messages.decode_recalled(reply.meta).entries
            except RemoteError as error:
                raise from_remote(error, self.target.name) from error
            except (RpcError, ChunkError) as error:
                self.lose(f"{type(error).__name__}: {error}")
                return AcceptedRows()
            found = AcceptedRows([*found, *entries])
            if not entries:
                break
        return found

    def fetch(self, feed: str, session: int, timeout_s: float) -> Chunk:
        """Fetch the results that the last status announced.

        Raises:
            FeedError: the worker refused, or sent something else.
            RpcError: the worker is gone.
        """
        if self.connection is None:
            raise ChunkError(f"{self.target.name} is not connected")
        buffer = memoryview(bytearray(self.status.ready_bytes))
        try:
            reply = self.connection.call(
                messages.encode(messages.Fetch(feed, session)), into=[buffer], timeout_s=timeout_s
            )
        except RemoteError as error:
            raise from_remote(error, self.target.name) from error
        results = messages.decode_results(reply.meta)
        if payload_bytes(results.chunk) != len(buffer):
            raise ChunkError(f"{self.target.name} announced {len(buffer)} bytes of results")
        self.status = results.status
        return decode(results.chunk, buffer)

    def lose(self, reason: str, chunk: Chunk | None = None) -> None:
        """The worker is gone; `chunk` was under way.

        A kept connection that broke before it carried anything of this partition says nothing of
        the worker: the next greeting connects anew.
        """
        if self.is_kept and chunk is None:
            self.close()
            return
        resent_rows = 0 if chunk is None else chunk.num_rows
        self.lost = LostWorker(
            self.target.worker, self.target.name, reason, self.accepted_rows, resent_rows
        )
        self.close()

    def look(self) -> None:
        """Notice that a worker has hung up to whom nothing more is sent.

        Raises:
            FeedError: as `receive_reply`.
        """
        if self.pending is not None and self.pending.done():
            self.receive_reply()
        if self.connection is not None and self.connection.peer_closed():
            self.lose("it closed the connection")

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self.connection is not None:
            self.connection.close()
        self.connection = self.pending = None
        self.is_kept = False

    def view(self, since_s: float) -> LaneView:
        """Return what routing needs to know; a status from before `since_s` does not count."""
        in_flight = 0 if self.chunk is None else self.chunk.num_bytes
        waited_s = time.monotonic() - self.asked_at_s
        is_fresh = self.is_fresh(since_s)
        return LaneView(
            unread_bytes=self.status.unread_bytes + in_flight if is_fresh else None,
            sent_bytes=self.sent_bytes,
            room=self.status.room or not is_fresh,
            busy=self.pending is not None,
            responsive=self.pending is None or waited_s < PATIENCE_S,
            draining=self.wants_none,
            local=self.target.endpoint.boot_id == boot_id(),
        )

    def describe(self) -> str:
        """Say how the worker stands, for messages."""
        unread = f"{self.target.name} has {self.status.unread_bytes} bytes unread"
        if self.pending is None:
            return unread
        return f"{unread} (no answer for {time.monotonic() - self.asked_at_s:.1f} s)"


def hold_s(config: FeedConfig) -> float:
    """Return how long a worker may keep a reply: often enough to notice a stuck trainer in time."""
    return min(5.0, config.feed_timeout_s / 4)


def wait_lanes(lanes: list[WorkerLink], timeout_s: float) -> list[WorkerLink]:
    """Wait until any pending call is done; return the lanes whose calls are."""
    pending = {id(lane.pending): lane for lane in lanes if lane.pending is not None}
    calls = [lane.pending for lane in pending.values() if lane.pending is not None]
    return [pending[id(call)] for call in wait_any(calls, max(0.0, timeout_s))]


def greet(
    lanes: list[WorkerLink],
    identity: Identity,
    credentials: Credentials,
    hello: Request,
    timeout_s: float,
) -> None:
    """Connect to workers and hear how they stand; those that do not answer are lost.

    Raises:
        FeedError: a worker refused: its trainer failed, or the cluster is stopping.
    """
    asked = lanes
    while asked:
        for lane in asked:
            lane.open(identity, credentials, timeout_s)
            lane.ask(hello, timeout_s)
        deadline = time.monotonic() + timeout_s
        while any(lane.pending for lane in asked):
            done = wait_lanes(asked, deadline - time.monotonic())
            for lane in done:
                lane.receive_reply()
            if not done:
                break
        for lane in asked:
            if lane.pending is not None:
                lane.is_kept = False
                lane.lose(f"no answer within {timeout_s:g} s of connecting")
        # Their kept connection had broken; a new one that breaks makes the worker lost.
        asked = [lane for lane in asked if lane.alive and lane.connection is None]
