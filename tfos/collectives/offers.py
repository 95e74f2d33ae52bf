"""Offers: what this process has for its peers in its current collective call.

Covers: the RPC handler that sends it, the wait until all peers have it, lost peers.
Does not: fetch from peers or reduce (group).
Threads: one per peer in `handle`, the calling thread in `post` and `wait_fetched`; `_changed`
guards everything, and every wait has a deadline.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from rpc.auth.handshake import Identity, Role
from rpc.errors import ProtocolError
from rpc.server.listener import Call
from tfos.collectives import layout, messages
from tfos.collectives.messages import LAYOUT, MAX_HOLD_S, NOT_YET, ArrayFetch, CollectiveCall
from tfos.errors import CollectiveError, CollectiveTimeout, RankLost, RankMismatch


class CallOffer:
    """What one rank has for the others in one call.

    Args:
        call: the call.
        fetchers: ranks that will fetch.
        layout_bytes: layout of the rank's arrays, if peers need it.
    """

    def __init__(
        self, call: CollectiveCall, fetchers: Iterable[int], layout_bytes: bytes = b""
    ) -> None:
        self.call = call
        self.fetchers = set(fetchers)
        self.layout_bytes = layout_bytes
        self.views: list[Sequence[memoryview]] = [(), ()]
        """By part: consecutive views."""
        self.ready: list[int] = [0, 0]
        """By part: number of bytes, from the first, that may be fetched."""
        self.mismatch: RankMismatch | None = None

    def has(self, fetch: ArrayFetch) -> bool:
        """Say whether the bytes are ready."""
        return fetch.part == LAYOUT or fetch.stop <= self.ready[fetch.part]

    def bytes_for(self, fetch: ArrayFetch) -> list[memoryview]:
        """Return the requested bytes."""
        if fetch.part == LAYOUT:
            return [memoryview(self.layout_bytes)]
        return layout.cut(self.views[fetch.part], fetch.start, fetch.stop)


class Offers:
    """This process's end of the collective calls.

    Pass `handle`, `connected` and `disconnected` to its Listener.

    Args:
        rank: rank of this process.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._changed = threading.Condition()
        self._current: CallOffer | None = None
        self._connections: Counter[Identity] = Counter()
        """Number of connections per peer; a peer that replaces its connection has two for a
        while."""
        self._gone: set[int] = set()
        self._ended = ""

    def handle(self, call: Call) -> None:
        """Answer a peer with the bytes, with NOT_YET, or with the mismatch."""
        try:
            if call.peer.role is not Role.WORKER:
                raise ProtocolError(f"{call.peer} is not a rank; only workers exchange arrays")
            fetch = messages.decode(call.meta)
            if call.payload_bytes:
                raise ProtocolError(f"a fetch has no payload, got {call.payload_bytes} bytes")
            offer = self._offer_for(fetch, call.peer.rank)
        except (RankLost, RankMismatch) as error:
            call.fail(error.code, str(error))
            return
        except ProtocolError as error:
            call.fail(CollectiveError.code, str(error))
            return
        if offer is None:
            call.fail(NOT_YET, f"rank {self._rank} is not there yet")
            return
        call.reply(b"", offer.bytes_for(fetch))
        if fetch.last:
            with self._changed:
                offer.fetchers.discard(call.peer.rank)
                self._changed.notify_all()

    def connected(self, peer: Identity) -> None:
        """Note a peer's connection."""
        if peer.role is Role.WORKER:
            with self._changed:
                self._connections[peer] += 1

    def disconnected(self, peer: Identity) -> None:
        """Note that a peer's connection has ended; after the last one it fetches no more."""
        if peer.role is Role.WORKER:
            with self._changed:
                self._connections[peer] -= 1
                if self._connections[peer] <= 0:
                    self._gone.add(peer.rank)
                    self._changed.notify_all()

    def post(self, offer: CallOffer) -> None:
        """From now on, answer peers from this offer instead of the previous one."""
        with self._changed:
            self._current = offer
            self._changed.notify_all()

    def grow(self, offer: CallOffer, part: int, ready_bytes: int) -> None:
        """Let peers fetch this many bytes of a part."""
        with self._changed:
            offer.ready[part] = ready_bytes
            self._changed.notify_all()

    def wait_fetched(self, offer: CallOffer, deadline_s: float, timeout_s: float) -> None:
        """Return when every peer has what it needs; the caller may then change its arrays.

        Args:
            offer: the current offer.
            deadline_s: monotonic time of the deadline.
            timeout_s: the timeout behind the deadline, for the error.

        Raises:
            RankLost, RankMismatch, CollectiveTimeout: the peers do not fetch.
        """
        with self._changed:
            while offer.fetchers:
                if offer.mismatch is not None:
                    raise offer.mismatch
                if lost := offer.fetchers & self._gone:
                    raise RankLost(gone_text(lost, offer.call))
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    text = timeout_text(self._rank, offer.call, offer.fetchers, timeout_s)
                    raise CollectiveTimeout(text, offer.fetchers)
                self._changed.wait(left_s)

    def end(self, reason: str) -> None:
        """Refuse all later requests: this rank makes no more calls."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()

    def _offer_for(self, fetch: ArrayFetch, peer: int) -> CallOffer | None:
        """Wait for the offer that has these bytes; None: it is not ready yet."""
        deadline_s = time.monotonic() + MAX_HOLD_S
        with self._changed:
            while True:
                if self._ended:
                    raise RankLost(
                        f"rank {self._rank} {self._ended}, but rank {peer} is in {fetch.call}"
                    )
                offer = self._current
                if offer is not None and offer.call.number >= fetch.call.number:
                    self._check(offer, fetch, peer)
                    if offer.has(fetch):
                        return offer
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)

    def _check(self, offer: CallOffer, fetch: ArrayFetch, peer: int) -> None:
        if offer.call == fetch.call:
            return
        calls = sorted([(peer, str(fetch.call)), (self._rank, str(offer.call))])
        mismatch = RankMismatch(
            f"{', '.join(f'rank {rank} calls {call}' for rank, call in calls)}. Every rank must "
            "make the same collective calls in the same order, with arrays of one shape and dtype"
        )
        offer.mismatch = offer.mismatch or mismatch
        self._changed.notify_all()
        raise mismatch


def timeout_text(rank: int, call: CollectiveCall, missing: Iterable[int], timeout_s: float) -> str:
    """Return the message of a wait that timed out."""
    names = ", ".join(f"rank {each}" for each in sorted(missing))
    return (
        f"rank {rank} has waited {timeout_s:g} s in {call} for {names}. Every rank must make the "
        "call, and none later than timeout_s"
    )


def gone_text(lost: Iterable[int], call: CollectiveCall) -> str:
    """Return the message of a call whose peers' connections have ended."""
    names = ", ".join(f"rank {each}" for each in sorted(lost))
    return (
        f"{names} ended in the middle of {call}, or the network between the hosts has failed; if "
        "there is an error of its own, that is the cause"
    )
