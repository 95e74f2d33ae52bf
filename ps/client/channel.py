"""Channel: a client's connection to one server, which reconnects, and the calls that it carries.

Covers: connecting, reconnecting with back-off, the numbers of requests per server, counting.
Does not: send (ps.client.retry), know what the requests mean (ps.client).
Threads: one at a time; ps.client holds its lock around every exchange.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Sequence

import msgspec

from ps.client.channel_stats import LinkCounters, LinkStats
from ps.errors import PSError, PSSettingsError, client_closed
from ps.protocol import messages
from ps.protocol.messages import MAX_META_BYTES, MAX_OPEN_BYTES, MAX_WAIT_S, Ack
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.client.connection import Buffer, Connection, Reply, connect
from rpc.endpoint import Endpoint
from rpc.errors import (
    AuthError,
    ConnectionClosed,
    IntegrityError,
    PeerGone,
    RpcError,
    TransportError,
)
from rpc.limits import Limits

_logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.02
ANSWER_SHARE = 0.1
"""Part of the remaining time that is left for a server's typed answer to arrive after its wait has
ended; see `server_wait_s`."""
SHORTEST_ANSWER_S, LONGEST_ANSWER_S = 0.5, 1.0
LONGEST_PAUSE_S = 1.0

_LIMITS = Limits(max_meta_bytes=MAX_META_BYTES, max_reply_bytes=MAX_OPEN_BYTES)
_chance = random.SystemRandom()
"""Not the module's, which has the user's seed, often that of all workers, and is the user's to draw
from. Processes that were forked draw different numbers."""


def check_is_number(timeout_s: float) -> None:
    """Refuse NaN: no comparison with it ever says that the time is over.

    Raises:
        PSSettingsError: it is NaN.
    """
    if math.isnan(timeout_s):
        raise PSSettingsError("timeout_s must be a number of seconds, got nan")


def server_wait_s(left_s: float) -> float:
    """Return how long a server may let us wait; a busy machine needs time for the answer, too.

    At most MAX_WAIT_S, whatever is left: a server refuses more.
    """
    answer_s = min(LONGEST_ANSWER_S, max(SHORTEST_ANSWER_S, ANSWER_SHARE * left_s))
    return min(MAX_WAIT_S, left_s - min(answer_s, left_s / 2))


class OutgoingCall(msgspec.Struct):
    """One request to one server, ready to be sent more than once."""

    link: Channel
    request: messages.Request
    payload: Sequence[Buffer] = ()
    into: Sequence[memoryview] | None = None
    waits: bool = False
    """Whether the request has a `wait_s`, set to what is left each time it is sent."""
    reply: Reply | None = None
    error: Exception | None = None
    is_open: bool = True
    """Whether it has neither a reply nor a final error."""
    left_s: float = 0.0
    """Time that was left when it was last sent."""
    begun_s: float = 0.0
    """When the exchange began (monotonic)."""
    last_disconnect: RpcError | None = None
    restoring: PSError | None = None
    """What the server said when it could not answer yet, as it read its checkpoint."""
    restoring_s: float = 0.0
    """When it said so last (monotonic)."""

    def meta(self, left_s: float) -> bytes:
        """Return the encoded request, sent with `left_s` seconds to the deadline."""
        self.left_s = left_s
        if not self.waits:
            return messages.encode(self.request)
        return messages.encode(msgspec.structs.replace(self.request, wait_s=server_wait_s(left_s)))

    def succeed(self, reply: Reply) -> None:
        """End with a reply."""
        self.reply, self.is_open = reply, False
        self.link.answered(type(self.request), self.begun_s, is_refused=False)

    @property
    def counts(self) -> bool:
        """Whether the server has taken it for present at a clock: applied, or refused in its place.

        A refusal for any other reason, as by a server that stops, is no such answer.
        """
        told = self.error.details if isinstance(self.error, PSError) else {}
        return self.reply is not None or messages.WORKER_CLOCK in told

    def reopen(self) -> None:
        """Go back to the queue: the server that has answered is lost, and what it knew with it."""
        self.reply, self.error, self.is_open = None, None, True
        self.link.was_disconnected()

    def refuse(self, error: PSError) -> None:
        """End with the server's refusal, and note the clock that it reports."""
        told = int(error.details.get(messages.WORKER_CLOCK, 0))
        self.link.acked_clock = max(self.link.acked_clock, told)
        self.fail(error)
        self.link.answered(type(self.request), self.begun_s, is_refused=True)

    def fail(self, error: Exception) -> None:
        """End with an error that no second attempt can change."""
        self.error, self.is_open = error, False

    def postpone(self, error: PSError) -> None:
        """Go back to the queue: the server reads its checkpoint, and answers after that."""
        self.restoring, self.restoring_s = error, time.monotonic()

    def disconnected(self, error: RpcError) -> None:
        """Go back to the queue: the connection ended before the reply."""
        self.last_disconnect = error
        self.link.was_disconnected()


class Channel:
    """The connection to one server, made when it is needed and made again when it was cut.

    Args:
        server: rank of the server.
        endpoint: where it listens.
        credentials: the cluster's secret.
        identity: who this process is.
    """

    def __init__(
        self, server: int, endpoint: Endpoint, credentials: Credentials, identity: Identity
    ) -> None:
        self.server = server
        self._connected_to = endpoint
        self.move(endpoint)
        self.sequence = 0
        """Number of the last changing request sent to this server."""
        self.acknowledged = 0
        """Number of the last one that it has answered with success."""
        self.acked_clock = 0
        """The worker's newest clock in its answers; see Number and Ack.worker_clock."""
        self.acked_updates = 0
        """How many of its answers were to requests that change parameters."""
        self._credentials = credentials
        self._identity = identity
        self.last_failure: RpcError | None = None
        """Why the last attempt to connect has failed, if it has."""
        self.connection: Connection | None = None
        """The last one made; it may have been closed since."""
        self.greet: Callable[[Connection, float], None] | None = None
        """Called with each new connection and the seconds that it may take, before any request."""
        self._unreachable_since_s: float | None = None
        self._pause_s = 0.0
        self._next_attempt_s = 0.0
        self._counters = LinkCounters(server)
        self._retired = False
        self.generation = 0
        """The newest start of this server that has answered; older ones were replaced."""

    def move(self, endpoint: Endpoint) -> None:
        """Connect to another place from now on; see has_moved."""
        self.endpoint = endpoint
        self.name = f"ps:{self.server} at {endpoint}"

    @property
    def num_connections(self) -> int:
        """Made so far; one more may mean another process, which a restore has set back."""
        return self._counters.num_connections

    @property
    def has_moved(self) -> bool:
        """Whether the connection leads to where the server was; it may stand still there.

        `move` leaves its closing to the thread that calls: it alone can send the call again.
        """
        return self.connection is not None and self._connected_to != self.endpoint

    def is_due(self) -> bool:
        """Whether the next `open_connection` would connect."""
        is_open = self.connection is not None and not self.connection.closed
        return (self.has_moved or not is_open) and time.monotonic() >= self._next_attempt_s

    def open_connection(self, left_s: float) -> Connection | None:
        """Return a usable connection, or None when the next attempt has to wait.

        Raises:
            AuthError: the server has another secret; final.
            PSSettingsError: another server answers there.
            ClosedError: after retire().
        """
        self._refuse_retired()
        if self.has_moved:
            self.close()
        if self.connection is not None and not self.connection.closed:
            return self.connection
        now_s = time.monotonic()
        if now_s < self._next_attempt_s:
            return None
        endpoint = self.endpoint  # another thread may move it meanwhile
        try:
            connection = connect(
                endpoint,
                self._identity,
                self._credentials,
                expect=Role.SERVER,
                timeout_s=min(CONNECT_TIMEOUT_S, max(0.01, left_s)),
                limits=_LIMITS,
            )
        except (TransportError, AuthError) as error:
            # After a first success the secret is known to be right: a server that dies while it
            # shakes hands looks like a refusal.
            if isinstance(error, AuthError) and not self.num_connections:
                raise
            self._note_failure(now_s, error)
            return None
        if connection.peer.rank != self.server:
            connection.close()
            raise PSSettingsError(
                f"{self.name} is ps:{connection.peer.rank}; give the endpoints in order of ranks"
            )
        if connection.peer.generation < self.generation:
            connection.close()
            replaced = PeerGone(
                f"it answers as start {connection.peer.generation}, but start "
                f"{self.generation} has replaced it"
            )
            _logger.warning("%s: %s", self.name, replaced)
            self._note_failure(now_s, replaced)
            return None
        self.generation = connection.peer.generation
        self._counters.connected(connection)
        self.connection, self._connected_to = connection, endpoint
        if self._retired:  # meanwhile, by another thread, which saw the connection before this one
            connection.close()
        self._refuse_retired()
        self._unreachable_since_s, self.last_failure = None, None
        is_greeted = self._greets(connection, max(0.01, left_s - (time.monotonic() - now_s)))
        return connection if is_greeted else None

    def _greets(self, connection: Connection, timeout_s: float) -> bool:
        """Send what comes before any request; return whether the connection lasted."""
        try:
            if self.greet is not None:
                self.greet(connection, timeout_s)
        except (TransportError, IntegrityError, ConnectionClosed) as error:
            self._refuse_retired()
            self.last_failure = error  # a cut request: the server could be reached
            self.was_disconnected()
            return False
        return True

    def was_disconnected(self) -> None:
        """Count a request that has to be sent again, and wait before it is."""
        self._counters.retries += 1
        self.pause_after_disconnect()

    def pause_after_disconnect(self) -> None:
        """Wait a little longer each time before the connection is made again.

        By chance up to half as long: the clients of a server that comes back come one by one.
        """
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
        self._next_attempt_s = time.monotonic() + self._pause_s * _chance.uniform(0.5, 1.0)

    def answered(
        self, request: type[messages.Request], begun_s: float, *, is_refused: bool
    ) -> None:
        """Count an answer to a call that began at `begun_s`; pauses start again after the next cut.

        Args:
            request: type of the request.
            begun_s: monotonic seconds at which its first attempt began.
            is_refused: whether the answer is an error.
        """
        self._pause_s = 0.0
        self._next_attempt_s = 0.0
        self._counters.refused += is_refused
        self._counters.latencies[request].add(time.monotonic() - begun_s)

    def acked(self, ack: Ack, *, is_update: bool) -> None:
        """Note what the answer to the last changing request says.

        Args:
            ack: the answer.
            is_update: whether the request changes parameters.
        """
        self.acked_clock = max(self.acked_clock, ack.worker_clock)
        if ack.refusal:
            self._counters.refused += 1
        else:
            self.acknowledged = self.sequence
            self.acked_updates += is_update

    def stats(self) -> LinkStats:
        """Return what was counted so far."""
        return self._counters.snapshot()

    def unreachable_s(self) -> float:
        """How long every attempt to connect has failed."""
        since_s = self._unreachable_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def wait_s(self) -> float:
        """How long until the next attempt."""
        return max(0.0, self._next_attempt_s - time.monotonic())

    def probe_restarts(self, timeout_s: float) -> None:
        """Connect again if the server has closed the connection; does nothing between attempts."""
        if self.connection is not None and (self.has_moved or self.connection.peer_closed()):
            self.connection.close()
        if self.is_due():
            self.open_connection(timeout_s)

    def retire(self) -> None:
        """Close the connection and make no other; a call under way on another thread ends."""
        self._retired = True
        self.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            self.connection.close()

    def _refuse_retired(self) -> None:
        if self._retired:
            raise client_closed()

    def _note_failure(self, now_s: float, error: RpcError) -> None:
        _logger.debug("%s: %s", self.name, error)
        self.last_failure = error
        if self._unreachable_since_s is None:
            self._unreachable_since_s = now_s
        self.pause_after_disconnect()
