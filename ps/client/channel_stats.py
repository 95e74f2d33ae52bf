"""Counters of a client's channels: a mutable set inside, immutable snapshots outside.

Covers: the snapshot's fields and how to read them.
Does not: decide anything by them, count what servers do (ps.stats.server_stats).
Threads: the thread that has the client's lock writes; a reader in another one may miss the last few
counts.
"""

from __future__ import annotations

import collections

import msgspec

from ps.protocol import messages
from rpc.client.connection import Connection
from rpc.field_texts import with_field_texts
from rpc.histogram import Latency, LatencyHistogram

_PATHS = {"shm": "shared memory", "unix": "unix socket", "tcp+tls": "tls", "inproc": "in process"}


@with_field_texts
class LinkStats(msgspec.Struct, frozen=True):
    """One server as one client sees it, since the client was made."""

    server: int
    path: str = ""
    """How its last connection goes: `shared memory`, `unix socket`, `tcp`, `tcp+payload` (every
    byte authenticated), `tls` or `in process`; empty before the first one."""
    requests: int = 0
    """Requests that were answered."""
    refused: int = 0
    """How many of those were answered by an error; the exception that was raised says which."""
    retries: int = 0
    """Requests sent again after a cut connection; growing steadily: a bad network."""
    reconnects: int = 0
    """Connections after the first one."""
    bytes_out: int = 0
    """Bytes sent, with frames' headers and what was sent again; without handshakes."""
    bytes_in: int = 0
    latencies: dict[str, Latency] = {}
    """Latency by kind of request (`push`, `pull`, `lookup`, …): from the call to its answer,
    with all waiting for other workers and all that was sent again."""

    def added(self, other: LinkStats) -> LinkStats:
        """Return the sums with another connection to this server.

        Of a kind of request that both carry, this one's latencies count.
        """
        return LinkStats(
            server=self.server,
            path=self.path or other.path,
            requests=self.requests + other.requests,
            refused=self.refused + other.refused,
            retries=self.retries + other.retries,
            reconnects=self.reconnects + other.reconnects,
            bytes_out=self.bytes_out + other.bytes_out,
            bytes_in=self.bytes_in + other.bytes_in,
            latencies={**other.latencies, **self.latencies},
        )


class LinkCounters:
    """The counters behind one link's snapshot."""

    def __init__(self, server: int) -> None:
        self.retries = 0
        self._server = server
        self.refused = 0
        self.num_connections = 0
        self._bytes: tuple[int, int, Connection | None] = (0, 0, None)
        """Sent and received by the connections before the last one; the last one."""
        self.latencies = collections.defaultdict[type[messages.Request], LatencyHistogram](
            LatencyHistogram
        )

    def connected(self, connection: Connection) -> None:
        """A connection was made, instead of the last one."""
        self.num_connections += 1
        self._bytes = (*self._totals(), connection)

    def snapshot(self) -> LinkStats:
        """Return what was counted so far."""
        latencies = {
            _name(request): histogram.snapshot()
            for request, histogram in list(self.latencies.items())
        }
        bytes_out, bytes_in = self._totals()
        connection = self._bytes[2]
        transport = connection.transport if connection is not None else ""
        return LinkStats(
            server=self._server,
            path=_PATHS.get(transport, transport),
            requests=sum(each.count for each in latencies.values()),
            refused=self.refused,
            retries=self.retries,
            reconnects=max(0, self.num_connections - 1),
            bytes_out=bytes_out,
            bytes_in=bytes_in,
            latencies=latencies,
        )

    def _totals(self) -> tuple[int, int]:
        bytes_out, bytes_in, connection = self._bytes
        if connection is None:
            return bytes_out, bytes_in
        last = connection.stats()
        return bytes_out + last.bytes_sent, bytes_in + last.bytes_received


def _name(request: type[messages.Request]) -> str:
    return str(request.__struct_config__.tag)
