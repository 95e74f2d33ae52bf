"""Fetching: asks several peers at once for bytes that they offer, until all of them have answered.

Covers: the connections to the peers, repeated requests for bytes that are not ready, deadlines.
Does not: decide what to fetch (group), answer peers (offers).
Threads: the one that makes the collective calls.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rpc.auth.handshake import Credentials, Identity
from rpc.client.connection import Connection, PendingCall, connect, wait_any
from rpc.endpoint import Endpoint
from rpc.errors import DeadlineExceeded, RemoteError, RpcError, TransportError
from tfos.collectives import messages
from tfos.collectives.messages import NOT_YET, ArrayFetch
from tfos.collectives.offers import gone_text, timeout_text
from tfos.errors import CollectiveError, CollectiveTimeout, RankLost, RankMismatch

CONNECT_S = 30.0
_LAST_CONNECT_S = 0.1
"""Seconds to connect to a listening peer even after the deadline: the error then names the
cause."""


@dataclass(frozen=True, slots=True)
class RankPeer:
    """Another process of the run, and its address."""

    identity: Identity
    """The peer's rank, and the least generation that may answer."""
    endpoint: Endpoint


@dataclass(slots=True)
class Wanted:
    """Bytes to fetch from one peer."""

    rank: int
    fetch: ArrayFetch
    into: memoryview | None = None
    """Buffer that the reply fills; None: `data` is the reply."""
    data: memoryview = field(default_factory=lambda: memoryview(b""))
    pending: PendingCall | None = None


class PeerLinks:
    """The connections of one rank to all others, made at the first collective call.

    Args:
        identity: identity of this process.
        credentials: the run's secret.
        peers: the other ranks' processes, by rank.
    """

    def __init__(
        self, identity: Identity, credentials: Credentials, peers: Mapping[int, RankPeer]
    ) -> None:
        self._identity = identity
        self._credentials = credentials
        self._peers = peers
        self._connections: dict[int, Connection] = {}
        self._replaced: dict[int, Connection] = {}
        """Old connections, closed when the peer has answered on the new one: a peer takes a rank
        without a connection for one that has ended."""

    def open(self, deadline_s: float) -> None:
        """Connect to every peer that is not connected yet, or whose connection is nearly used up.

        A connection that cannot be replaced now stays: it is good for many more calls, and a peer
        that has ended may not be needed. The next call tries again.

        Args:
            deadline_s: monotonic time of the deadline.

        Raises:
            RankLost: a peer that is not connected yet cannot be reached.
        """
        for rank, peer in self._peers.items():
            old = self._connections.get(rank)
            if old is not None and (not old.is_nearly_used or old.peer_closed()):
                continue
            left_s = deadline_s - time.monotonic()
            if old is not None:
                left_s /= 2  # the call does not need it
            try:
                self._connections[rank] = connect(
                    peer.endpoint,
                    self._identity,
                    self._credentials,
                    expect=peer.identity,
                    timeout_s=max(_LAST_CONNECT_S, min(CONNECT_S, left_s)),
                )
            except RpcError as error:
                if old is not None:
                    continue
                raise RankLost(f"rank {rank} cannot be reached: {error}{_hint(error)}") from error
            if old is not None:
                self._forget_replaced(rank)
                self._replaced[rank] = old

    def close(self) -> None:
        """Close all connections: peers that wait for this rank get an error."""
        for connection in (*self._connections.values(), *self._replaced.values()):
            connection.close()

    def begin(self, wanted: Sequence[Wanted]) -> None:
        """Send the requests, at most one per peer; `finish` waits for their replies."""
        for each in wanted:
            into = None if each.into is None else [each.into]
            connection, meta = self._connections[each.rank], messages.encode(each.fetch)
            try:
                each.pending = connection.begin(meta, into=into)
            except RpcError as error:
                raise _broken(each, error) from None

    def finish(self, wanted: Sequence[Wanted], deadline_s: float, timeout_s: float) -> None:
        """Wait until every peer has answered with its bytes.

        Args:
            wanted: requests that `begin` sent.
            deadline_s: monotonic time of the deadline.
            timeout_s: the timeout behind the deadline, for the error.

        Raises:
            RankLost, RankMismatch, CollectiveTimeout: the first that a peer or the clock reports.
            CollectiveError: a peer's answer is unusable.
        """
        waiting = list(wanted)
        while waiting:
            pending = [each.pending for each in waiting if each.pending is not None]
            wait_any(pending, max(0.0, deadline_s - time.monotonic()))
            still = [each for each in waiting if not self._is_answered(each)]
            if still and time.monotonic() >= deadline_s:
                late = [each.rank for each in still]
                text = timeout_text(self._identity.rank, still[0].fetch.call, late, timeout_s)
                raise CollectiveTimeout(text, late)
            waiting = still

    def _is_answered(self, each: Wanted) -> bool:
        """Take a finished reply; ask again if the peer was not ready."""
        pending = each.pending
        if pending is None or not pending.settled:
            return pending is None
        try:
            each.data = pending.result(0.0).payload
        except RemoteError as refusal:
            if refusal.code != NOT_YET:
                raise _raised(refusal) from None
            self.begin([each])
            return False
        except DeadlineExceeded as error:
            text = f"rank {each.rank} in {each.fetch.call}: {error}"
            raise CollectiveTimeout(text, [each.rank]) from None
        except RpcError as error:
            raise _broken(each, error) from None
        each.pending = None
        self._forget_replaced(each.rank)
        return True

    def _forget_replaced(self, rank: int) -> None:
        if replaced := self._replaced.pop(rank, None):
            replaced.close()


def _hint(error: RpcError) -> str:
    if isinstance(error, DeadlineExceeded):
        return ""
    return ". If it has returned already: every rank must make the same collective calls"


def _broken(each: Wanted, error: RpcError) -> CollectiveError:
    """Return the error of a failed call: only a closed connection means that the rank ended."""
    if not isinstance(error, TransportError):
        return CollectiveError(
            f"the answer of rank {each.rank} in {each.fetch.call} is unusable: {error}"
        )
    return RankLost(f"{gone_text([each.rank], each.fetch.call)} ({error})")


def _raised(refusal: RemoteError) -> CollectiveError:
    for kind in (RankLost, RankMismatch):
        if refusal.code == kind.code:
            return kind(refusal.message)
    return CollectiveError(refusal.message)
