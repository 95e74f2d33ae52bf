"""Worker link: a feeder's connection to one worker, and the last status received from it.

Covers: connecting, one call at a time, losing the worker.
Does not: choose workers (routing), decide when to fail (feeder, inference), keep connections
between two partitions (connection_pool).
Runs in: a Spark task.
Threads: one; `greet` connects to several workers on short-lived threads of its own.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from feeding.columnar.chunk import Chunk, decode, payload_bytes
from feeding.config import FeedConfig
from feeding.errors import ChunkError, from_remote
from feeding.protocol import messages
from feeding.protocol.messages import FeedStatus, Hello, Put, Recall, Request
from feeding.protocol.row_ranges import AcceptedRows
from feeding.sender.connection_pool import POOL, IdleConnection, Purpose
from feeding.sender.routing import LinkView
from feeding.sender.unreachable import UNREACHABLE
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.client.connect import transport_text
from rpc.client.connection import Connection, PendingCall, connect, wait_any
from rpc.endpoint import Endpoint, boot_id
from rpc.errors import DeadlineExceeded, RemoteError, RpcError, Unreachable

_AT_ONCE = 16
"""Workers to which a feed task connects side by side; one whose host is gone holds up its place."""
PATIENCE_S = 1.0
"""A worker that has not answered for this long gets no more chunks until it does."""
FRESH_S = 0.25
"""The feeder renews an older status, by one small call, before it sends that worker a chunk. With a
longer time it would avoid workers that have been read meanwhile. The call also finds a kept
connection that has broken, before a chunk depends on it."""


class FeedTarget(msgspec.Struct, frozen=True):
    """A worker that accepts rows: its number, its name in errors, where it listens."""

    worker: int
    name: str
    endpoint: Endpoint
    attempt: int = 0
    """Which process of this worker it is."""

    @property
    def process(self) -> int:
        """Its key in FeedReport.accepted."""
        return process_key(self.worker, self.attempt)


def process_key(worker: int, attempt: int) -> int:
    """Return a number for one process of a worker; the worker's own for the first.

    Args:
        worker: its number.
        attempt: from 0.
    """
    return attempt << 32 | worker


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker whose connection ended while it was fed."""

    process: int
    name: str
    reason: str
    resent_rows: int
    """Rows in flight to it that went to another worker; it may have accepted them too."""


@dataclass(slots=True)
class WorkerLink:
    """One worker from the view of one feeder."""

    target: FeedTarget
    credentials: Credentials
    """Credentials of the cluster."""
    feed: str
    """Name of the feed that its connection is for."""
    connection: Connection | None = None
    pending: PendingCall | None = None
    chunk: Chunk | None = None
    """The chunk of the pending call."""
    asked_at_s: float = 0.0
    status: FeedStatus = field(default_factory=lambda: FeedStatus(0, 0, room=True, draining=False))
    replied_at_s: float = -math.inf
    """When the status was received, monotonic."""
    is_kept: bool = False
    """Whether the connection is from an earlier partition and has not answered this one yet."""
    stays_used: bool = False
    """Whether the connection is nearly used, and could not be replaced in this partition."""
    transport: str = ""
    """Transport to the worker, for people; empty without a connection."""
    sent_bytes: int = 0
    accepted: AcceptedRows = field(default_factory=AcceptedRows)
    ended: bool = False
    """Whether the worker has read the end of the epoch, and refuses its rows."""
    lost: LostWorker | None = None
    silent: bool = False
    """Whether it is lost only because it did not answer in time: it may live, and be busy."""
    num_silences: int = 0
    """Tries in which it was silent, so that its host accepts connections."""
    passed_over: bool = False
    """Whether it is lost only because its host recently accepted no connection."""
    is_needed: bool = False
    """Whether a connection is tried all the same."""

    @property
    def may_answer(self) -> bool:
        """Whether the worker is lost and may answer the next try."""
        return self.silent or self.passed_over

    @property
    def wants_none(self) -> bool:
        """Whether the worker drops or refuses rows."""
        return self.ended or self.status.draining

    @property
    def alive(self) -> bool:
        """Whether rows may be sent: the worker is connected, or no connection was tried yet."""
        return self.lost is None

    def is_fresh(self, since_s: float) -> bool:
        """Return whether the worker is connected with a newer status or a call in flight."""
        return self.connection is not None and (
            self.pending is not None or self.replied_at_s >= since_s
        )

    def is_usable(self, since_s: float) -> bool:
        """Return whether a chunk may be sent without a Hello first."""
        return self.is_fresh(since_s) and not self.wants_connection

    @property
    def wants_connection(self) -> bool:
        """Whether `open` has to connect."""
        return self.connection is None or self._is_broken or self._is_to_replace

    @property
    def _is_broken(self) -> bool:
        """Whether the connection of an earlier partition has ended since."""
        return self.is_kept and self.connection is not None and self.connection.peer_closed()

    @property
    def _is_to_replace(self) -> bool:
        is_used = self.connection is not None and self.connection.is_nearly_used
        return is_used and not self.stays_used

    @property
    def _purpose(self) -> Purpose:
        return Purpose(self.credentials, self.target.endpoint, self.feed)

    def take_kept(self) -> None:
        """Use a connection of an earlier partition, if there is one.

        Raises:
            FeedError: as `receive_reply`, for a call of that partition.
        """
        idle = POOL.take(self._purpose)
        if idle is None:
            return
        self.connection, self.is_kept = idle.connection, True
        self.status, self.replied_at_s = idle.status, idle.replied_at_s
        self.pending, self.asked_at_s = idle.pending, idle.asked_at_s
        if self.pending is not None and self.pending.done():
            self.receive_reply()
            # The reply may be as old as the call: no task of this process has polled since.
            self.replied_at_s, self.is_kept = idle.asked_at_s, self.connection is not None

    def keep(self) -> None:
        """Give the connection to the pool, unless a chunk is in flight on it."""
        if self.connection is None or self.connection.closed or self.chunk is not None:
            return
        idle = IdleConnection(
            self.connection, self.status, self.replied_at_s, self.pending, self.asked_at_s
        )
        self.connection = self.pending = None
        POOL.give(self._purpose, idle)

    def open(self, timeout_s: float) -> None:
        """Connect if not connected, or if the connection is nearly used.

        A failure makes the worker lost, as one a while ago does; but a used connection is good for
        many calls more, and stays for this partition if it cannot be replaced now.

        Args:
            timeout_s: for connecting, in seconds.
        """
        if not self.wants_connection:
            return
        if self._is_broken:
            self.close()
        if not self.is_needed and UNREACHABLE.has(self.target.endpoint):
            if self._keeps_used():
                return
            self.passed_over = True
            self.lose("its host recently accepted no connection")
            return
        # The worker tells connections apart by it: a session ends with the one that it came on.
        identity = Identity(Role.FEEDER, os.getpid(), secrets.randbits(62) + 1)
        try:
            made = connect(
                self.target.endpoint,
                identity,
                self.credentials,
                expect=Identity(Role.WORKER, self.target.worker),
                timeout_s=timeout_s,
                limits=messages.LIMITS,
            )
            self.close()
            self.connection = made
            self.transport = transport_text(self.connection.transport, self.target.endpoint)
            UNREACHABLE.forget(self.target.endpoint)
        except (RpcError, OSError) as error:
            if self._keeps_used():
                return
            # Where not even the kernel answers, the host is gone; but one that has accepted and was
            # silent may have no place left for further connections that it has not taken yet.
            is_gone = isinstance(error, Unreachable) and not self.num_silences
            if is_gone:
                UNREACHABLE.note(self.target.endpoint)
            silent = isinstance(error, DeadlineExceeded) and not is_gone
            self.lose(f"{type(error).__name__}: {error}", silent=silent)

    def _keeps_used(self) -> bool:
        """Go on with the connection, if there is one, though it could not be replaced."""
        self.stays_used = self.connection is not None
        return self.stays_used

    def ask(self, request: Request, timeout_s: float, chunk: Chunk | None = None) -> bool:
        """Send a request; False if that lost the worker.

        Args:
            request: to send.
            timeout_s: for sending.
            chunk: payload of a Put.
        """
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
        return True

    def put(self, chunk: Chunk, timeout_s: float, attempt: int = 0) -> bool:
        """Send a chunk; False if that lost the worker.

        Args:
            chunk: to send.
            timeout_s: for sending.
            attempt: with exactly_once, the number of this attempt; see Hello.
        """
        return self.ask(Put(chunk.meta, attempt), timeout_s, chunk)

    def receive_reply(self) -> Chunk | None:
        """Take the reply of the completed call; return its chunk if the worker did not accept it.

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
        """Return the rows of this partition that the worker accepted from earlier feeders.

        Args:
            hello: names feed, epoch and partition.
            timeout_s: per call.

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
                silent = isinstance(error, DeadlineExceeded)
                self.lose(f"{type(error).__name__}: {error}", silent=silent)
                return AcceptedRows()
            found = AcceptedRows([*found, *entries])
            if not entries:
                break
        return found

    def fetch(self, session: int, timeout_s: float) -> Chunk:
        """Fetch the results that the last status announced.

        Args:
            session: session of the results.
            timeout_s: for the call.

        Raises:
            FeedError: the worker refused, or sent other bytes than announced.
            RpcError: the worker is gone.
        """
        if self.connection is None:
            raise ChunkError(f"{self.target.name} is not connected")
        buffer = memoryview(bytearray(self.status.ready_bytes))
        try:
            reply = self.connection.call(
                messages.encode(messages.Fetch(self.feed, session)),
                into=[buffer],
                timeout_s=timeout_s,
            )
        except RemoteError as error:
            raise from_remote(error, self.target.name) from error
        results = messages.decode_results(reply.meta)
        if payload_bytes(results.chunk) != len(buffer):
            raise ChunkError(f"{self.target.name} announced {len(buffer)} bytes of results")
        self.status = results.status
        return decode(results.chunk, buffer)

    def lose(self, reason: str, chunk: Chunk | None = None, *, silent: bool = False) -> None:
        """Mark the worker as lost.

        A kept connection that broke before its first call of this partition does not mean that the
        worker is lost: the next Hello connects again.

        Args:
            reason: for errors.
            chunk: in flight, if any.
            silent: whether it only did not answer in time.
        """
        if self.is_kept and chunk is None:
            self.close()
            return
        resent_rows = 0 if chunk is None else chunk.num_rows
        self.lost = LostWorker(self.target.process, self.target.name, reason, resent_rows)
        self.silent = silent
        self.num_silences += silent
        self.close()

    def revive(self) -> None:
        """Let a worker that may answer be greeted again."""
        self.lost, self.silent, self.passed_over, self.is_needed = None, False, False, True

    def check_closed(self) -> None:
        """Mark the worker as lost if it has closed the connection.

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

    def view(self, since_s: float) -> LinkView:
        """Return the worker's state for routing; a status from before `since_s` does not count."""
        in_flight = 0 if self.chunk is None else self.chunk.num_bytes
        waited_s = time.monotonic() - self.asked_at_s
        is_fresh = self.is_fresh(since_s)
        return LinkView(
            unread_bytes=self.status.unread_bytes + in_flight if is_fresh else None,
            sent_bytes=self.sent_bytes,
            room=self.status.room or not is_fresh,
            busy=self.pending is not None,
            responsive=self.pending is None or waited_s < PATIENCE_S,
            draining=self.wants_none,
            local=self.target.endpoint.boot_id == boot_id(),
        )

    def describe(self) -> str:
        """Return the worker's state, for errors."""
        unread = f"{self.target.name} has {self.status.unread_bytes} bytes unread"
        if self.pending is None:
            return unread
        return f"{unread} (no answer for {time.monotonic() - self.asked_at_s:.1f} s)"


def hold_s(config: FeedConfig) -> float:
    """Return how long a worker may delay a reply: short, to detect a stuck trainer in time."""
    return min(5.0, config.feed_timeout_s / 4)


def wait_links(links: list[WorkerLink], timeout_s: float) -> list[WorkerLink]:
    """Wait until any pending call is done; return the links with completed calls.

    Args:
        links: to wait on.
        timeout_s: longest wait.
    """
    pending = {id(link.pending): link for link in links if link.pending is not None}
    calls = [link.pending for link in pending.values() if link.pending is not None]
    return [pending[id(call)] for call in wait_any(calls, max(0.0, timeout_s))]


def greet(links: list[WorkerLink], hello: Request, timeout_s: float) -> None:
    """Connect to workers and get their status; workers that do not answer are lost.

    Args:
        links: to the workers.
        hello: the first request.
        timeout_s: for connecting, `_AT_ONCE` workers at a time, then for all answers together.

    Raises:
        FeedError: a worker refused: its trainer failed, or the cluster is stopping.
    """
    waiting = links
    while waiting:
        _ask_all(waiting, hello, timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while any(link.pending for link in waiting):
            done = wait_links(waiting, deadline_s - time.monotonic())
            for link in done:
                link.receive_reply()
            if not done:
                break
        for link in waiting:
            if link.pending is not None:
                link.is_kept = False
                link.lose(f"no answer within {timeout_s:g} s of connecting", silent=True)
        # Their kept connection had broken; a new one that breaks makes the worker lost.
        waiting = [link for link in waiting if link.alive and link.connection is None]


def _ask_all(links: list[WorkerLink], hello: Request, timeout_s: float) -> None:
    """Connect to workers where needed, and send each the first request.

    Args:
        links: to the workers.
        hello: the first request.
        timeout_s: per worker.
    """

    def ask(link: WorkerLink) -> None:
        link.open(timeout_s)
        link.ask(hello, timeout_s)

    new: list[WorkerLink] = []
    connected: list[WorkerLink] = []
    for link in links:
        (new if link.wants_connection else connected).append(link)
    if len(new) < 2:
        for link in links:
            ask(link)
        return
    for link in connected:
        ask(link)
    with ThreadPoolExecutor(min(len(new), _AT_ONCE), "tfos-connect") as threads:
        for asked in [threads.submit(ask, link) for link in new]:
            asked.result()
