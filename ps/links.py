"""The client's connections to all servers, and one exchange with all of them that survives cuts.

Covers: connecting, reconnecting with back-off, sending again with the same numbers, deadlines.
Does not: know what the requests mean (ps.client).
Threads: one at a time; ps.client holds its lock around every exchange.

A cut connection is no error yet: the request is sent again, with the same sequence number, until
the deadline. A server that cannot be reached for `reconnect_s` is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ps.errors import PeerGone, PSError, RequestTimeout, SettingsError, from_remote
from ps.rendezvous import MAX_OPEN_BYTES
from rpc.address import Endpoint
from rpc.connection import Buffer, Connection, OutCall, Reply, call_all, connect
from rpc.errors import (
    AuthError,
    DeadlineExceeded,
    IntegrityError,
    RemoteError,
    RpcError,
    TransportError,
)
from rpc.frame import Limits
from rpc.handshake import Credentials, Identity, Role

_logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
ANSWER_SHARE = 0.1
"""Part of the remaining time, at most a second, that is left for a server's typed answer to arrive
after its wait has ended."""

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


def exchange(calls: Sequence[Outgoing], *, timeout_s: float, reconnect_s: float) -> list[Reply]:
    """Send all requests at once and return all replies, in order.

    Every server gets its chance to answer even when another one refuses, so that all of them agree
    on what was pushed.

    Raises:
        PSError: the first server's refusal, as the server raised it.
        PeerGone: a server could not be reached for `reconnect_s`.
        RequestTimeout: no answer within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    if len(calls) == 1:
        _try_one(calls[0], timeout_s)
        if calls[0].reply is not None:
            return [calls[0].reply]
    while waiting := [call for call in calls if call.is_open]:
        if time.monotonic() >= deadline_s:
            raise _timeout(waiting, timeout_s)
        _attempt(waiting, deadline_s)
        for call in waiting:
            if call.is_open and call.link.unreachable_s() > reconnect_s:
                raise _gone(call, reconnect_s)
    for call in calls:
        if call.error is not None:
            raise call.error
    return [call.reply for call in calls if call.reply is not None]


def _try_one(call: Outgoing, timeout_s: float) -> None:
    """The first attempt at a single server that is connected: the usual case, without lists."""
    connection = call.link.connection
    if connection is None or connection.closed:
        return
    try:
        reply = connection.call(
            call.meta(_server_wait_s(timeout_s)),
            call.payload,
            into=call.into,
            timeout_s=timeout_s,
        )
    except RpcError as error:
        _settle(call, error, timeout_s)
    else:
        call.succeed(reply)


def _server_wait_s(left_s: float) -> float:
    return left_s - min(1.0, ANSWER_SHARE * left_s)


def _attempt(calls: Sequence[Outgoing], deadline_s: float) -> None:
    """Try every call once on the connections that are there or can be made now."""
    ready: list[tuple[Outgoing, Connection]] = []
    for call in calls:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return  # connecting to the servers before took all the time
        try:
            connection = call.link.open_connection(left_s)
        except (AuthError, SettingsError) as error:
            call.fail(error)
            continue
        if connection is not None:
            ready.append((call, connection))
    left_s = max(0.0, deadline_s - time.monotonic())
    if not ready:
        pause_s = min((call.link.wait_s() for call in calls), default=0.0)
        time.sleep(min(pause_s, left_s))
        return
    wait_s = _server_wait_s(left_s)
    outs = [
        OutCall(connection, call.meta(wait_s), call.payload, call.into)
        for call, connection in ready
    ]
    outcomes = call_all(outs, timeout_s=left_s)
    for (call, _), outcome in zip(ready, outcomes, strict=True):
        _settle(call, outcome, left_s)


def _settle(call: Outgoing, outcome: Reply | RpcError, left_s: float) -> None:
    if isinstance(outcome, Reply):
        call.succeed(outcome)
    elif isinstance(outcome, RemoteError):
        call.fail(_named(from_remote(outcome), call.link))
        call.link.succeeded()
    elif isinstance(outcome, DeadlineExceeded):
        text = (
            f"{call.link.name} gave no answer within {left_s:.1f} s ({outcome}); it is frozen or "
            "overloaded: look at its log, or raise timeout_s"
        )
        call.fail(RequestTimeout(text, {"server": str(call.link.server)}))
    elif isinstance(outcome, (TransportError, IntegrityError)):
        call.last_cut = outcome
        call.link.pause_after_cut()
    else:
        call.fail(outcome)


def _named(error: PSError, link: Link) -> PSError:
    error.details.setdefault("server", str(link.server))
    return error


def _timeout(calls: Sequence[Outgoing], timeout_s: float) -> RequestTimeout:
    names = ", ".join(call.link.name for call in calls)
    cut = next((call.last_cut for call in calls if call.last_cut is not None), None)
    why = f"; last failure: {cut}" if cut is not None else ""
    return RequestTimeout(f"no answer from {names} within {timeout_s:g} s{why}")


def _gone(call: Outgoing, reconnect_s: float) -> PeerGone:
    why = f"; the connection ended by: {call.last_cut}" if call.last_cut is not None else ""
    return PeerGone(
        f"{call.link.name} could not be reached for {reconnect_s:g} s{why}; is the process alive?",
        {"server": str(call.link.server)},
    )
