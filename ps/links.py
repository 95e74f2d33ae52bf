"""The client's connections to the servers, made again when they are cut, and what they carry.

Covers: connecting, reconnecting with back-off, the numbers of requests per server.
Does not: send (ps.exchange), know what the requests mean (ps.client).
Threads: one at a time; ps.client holds its lock around every exchange.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ps.errors import SettingsError
from ps.rendezvous import MAX_OPEN_BYTES
from rpc.address import Endpoint
from rpc.connection import Buffer, Connection, Reply, connect
from rpc.errors import AuthError, RpcError, TransportError
from rpc.frame import Limits
from rpc.handshake import Credentials, Identity, Role

_logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0

_LIMITS = Limits(max_reply_bytes=MAX_OPEN_BYTES)


@dataclass(slots=True)
class Outgoing:
    """One request to one server, ready to be sent more than once."""

    link: Link
    meta: Callable[[float], bytes]
    """Encodes the meta for the seconds that the server may let us wait."""
    payload: Sequence[Buffer] = ()
    into: Sequence[memoryview] | None = None
    reply: Reply | None = None
    error: Exception | None = None
    is_open: bool = True
    """Whether it has neither a reply nor a final error."""
    left_s: float = 0.0
    """Time that was left when it was last sent."""
    last_cut: RpcError | None = field(default=None, repr=False)

    def succeed(self, reply: Reply) -> None:
        """End with a reply."""
        self.reply, self.is_open = reply, False
        self.link.succeeded()

    def fail(self, error: Exception) -> None:
        """End with an error that no second attempt can change."""
        self.error, self.is_open = error, False


class Link:
    """The connection to one server, made when it is needed and made again when it was cut."""

    def __init__(
        self, server: int, endpoint: Endpoint, credentials: Credentials, identity: Identity
    ) -> None:
        self.server = server
        self.name = f"ps:{server} at {endpoint}"
        self.sequence = 0
        """Number of the last changing request sent to this server."""
        self.acknowledged = 0
        """Number of the last one that it has answered with success."""
        self.told_clock = 0
        """The newest clock that it has answered a changing request with."""
        self._endpoint = endpoint
        self._credentials = credentials
        self._identity = identity
        self.connection: Connection | None = None
        """The last one made; it may have been closed since."""
        self._unreachable_since_s: float | None = None
        self._pause_s = 0.0
        self._next_attempt_s = 0.0
        self._was_connected = False
        self._incarnation = 0
        """The newest start of this server that has answered; older ones were replaced."""

    def next_sequence(self) -> int:
        """Number a new changing request."""
        self.sequence += 1
        return self.sequence

    def open_connection(self, left_s: float) -> Connection | None:
        """Return a usable connection, or None when the next attempt has to wait.

        Raises:
            AuthError: the server has another secret; final.
            SettingsError: another server answers there.
        """
        if self.connection is not None and not self.connection.closed:
            return self.connection
        now_s = time.monotonic()
        if now_s < self._next_attempt_s:
            return None
        try:
            connection = connect(
                self._endpoint,
                self._identity,
                self._credentials,
                expect=Role.SERVER,
                timeout_s=min(CONNECT_TIMEOUT_S, max(0.01, left_s)),
                limits=_LIMITS,
            )
        except (TransportError, AuthError) as error:
            # After a first success the secret is known to be right: a server that dies while it
            # shakes hands looks like a refusal.
            if isinstance(error, AuthError) and not self._was_connected:
                raise
            self._note_failure(now_s)
            _logger.debug("%s: %s", self.name, error)
            return None
        if connection.peer.rank != self.server:
            connection.close()
            raise SettingsError(
                f"{self.name} is ps:{connection.peer.rank}; give the endpoints in order of ranks"
            )
        if connection.peer.incarnation < self._incarnation:
            connection.close()
            _logger.warning(
                "%s answers as start %d, but start %d has replaced it",
                self.name, connection.peer.incarnation, self._incarnation,
            )  # fmt: skip
            self._note_failure(now_s)
            return None
        self._incarnation = connection.peer.incarnation
        self.connection = connection
        self._was_connected = True
        self._unreachable_since_s = None
        return connection

    def pause_after_cut(self) -> None:
        """Wait a little longer each time before the connection is made again."""
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
        self._next_attempt_s = time.monotonic() + self._pause_s

    def succeeded(self) -> None:
        """A reply has come: the next cut is a new story."""
        self._pause_s = 0.0
        self._next_attempt_s = 0.0

    def unreachable_s(self) -> float:
        """How long every attempt to connect has failed."""
        since_s = self._unreachable_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def wait_s(self) -> float:
        """How long until the next attempt."""
        return max(0.0, self._next_attempt_s - time.monotonic())

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            self.connection.close()

    def _note_failure(self, now_s: float) -> None:
        if self._unreachable_since_s is None:
            self._unreachable_since_s = now_s
        self.pause_after_cut()
