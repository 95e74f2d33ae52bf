"""Ranks of one run as threads of the test's process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rpc.auth.handshake import Credentials, Identity, Role
from rpc.server.listener import Listener
from tests.support.ps_cluster import WAIT_S, run_all
from tests.support.rpc import over_tls
from tfos.collectives.group import RankGroup, RankPeer
from tfos.collectives.offers import Offers

CREDENTIALS = Credentials("collectives", b"k" * 32)


class Ranks:
    """Ranks of one run as threads, each with a listener of its own.

    Args:
        size: number of ranks.
        directory: of the Unix sockets; None: the ranks reach each other by TLS.
    """

    def __init__(self, size: int, directory: str | None) -> None:
        credentials = CREDENTIALS if directory is not None else over_tls(CREDENTIALS)
        self.offers = [Offers(rank) for rank in range(size)]
        identities = [Identity(Role.WORKER, rank) for rank in range(size)]
        self.listeners = [
            Listener(
                offer.handle,
                credentials,
                who,
                on_connect=offer.connected,
                on_disconnect=offer.disconnected,
            )
            for offer, who in zip(self.offers, identities, strict=True)
        ]
        for each in self.listeners:
            if directory is not None:
                each.bind_unix(directory)
            else:
                each.bind_tcp("127.0.0.1")
            each.start()
        peers = {
            who.rank: RankPeer(who, listener.endpoint)
            for who, listener in zip(identities, self.listeners, strict=True)
        }
        self.groups = [
            RankGroup(who, credentials, offer, {r: p for r, p in peers.items() if r != who.rank})
            for who, offer in zip(identities, self.offers, strict=True)
        ]

    def run(self, function: Callable[[RankGroup], Any]) -> list[Any]:
        """Call it on every rank at once; returns results or errors in rank order."""
        works = [partial(function, group) for group in self.groups]
        return run_all(*works, timeout_s=WAIT_S * len(works))

    def leave(self, rank: int) -> None:
        """End one rank as a process does."""
        self.groups[rank].close()
        self.listeners[rank].close()

    def close(self) -> None:
        for rank in range(len(self.groups)):
            self.leave(rank)
