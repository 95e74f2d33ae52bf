"""Two-round push: a sync push whose mean is clipped by norm over several servers.

Covers: the worker's half of ps.server.reduction: collect every server's squares, send their sum
to all.
Does not: send or retry (ps.client.server_group, ps.client.channel).
Threads: as ps.client.server_group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np

from ps.client.retry import named
from ps.client.server_group import Buffers, ChangingRequest, ServerGroup
from ps.errors import from_remote
from ps.manifest.manifest import Manifest
from ps.optim.clipping import Norms, servers_take_norms
from ps.protocol import messages
from ps.protocol.messages import Ack, Number
from rpc.wire.frame import decode_error

Array = np.ndarray[Any, Any]


class ClippedPush:
    """Pushes to all servers of a cluster.

    Args:
        servers: the servers.
        manifest: what they hold.
    """

    def __init__(self, servers: ServerGroup, manifest: Manifest) -> None:
        self._servers = servers
        self._hash = manifest.hash()
        self._parts = [Norms(manifest).zeros() for _ in servers.links]
        self._num_applied = [0] * len(servers.links)

    @classmethod
    def if_needed(
        cls, servers: ServerGroup, manifest: Manifest, *, num_workers: int
    ) -> Self | None:
        """Return one where a push takes two rounds: no server has the whole mean, nor a worker.

        Args:
            servers: all of them.
            manifest: has the rules.
            num_workers: number of workers in the cluster.
        """
        in_parts = len(servers.links) > 1 and servers_take_norms(manifest, num_workers=num_workers)
        return cls(servers, manifest) if in_parts else None

    def num_applied(self) -> Sequence[int]:
        """How many gradients of this worker each server has applied, as last reported."""
        return self._num_applied

    def change(
        self,
        request: ChangingRequest,
        *,
        payloads: Sequence[Buffers],
        intos: Sequence[Sequence[memoryview]],
        behind: Sequence[Sequence[memoryview]] = (),
    ) -> list[Ack]:
        """Push as ServerGroup.change does; the client's timeout holds for each round.

        Args:
            request: the push; its number and clocks are filled in per server.
            payloads: per server the gradient's views.
            intos: per server the views that receive fresh values.
            behind: per server the views that receive rows; those come with the first round, in
                which they are updated.

        Raises:
            PSError: as ServerGroup.change; what a server refuses, once all others are settled.
        """
        no_rows: Sequence[Sequence[memoryview]] = [()] * len(self._parts)
        acks = self._servers.change(
            lambda number: msgspec.structs.replace(request(number), pull=True),
            payloads=payloads,
            intos=[
                [part.data.cast("B"), *rows]
                for part, rows in zip(self._parts, behind or no_rows, strict=True)
            ],
        )
        squares = self._sum(acks)
        if squares is not None:
            pairs = zip(self._num_applied, acks, strict=True)
            self._num_applied = [count + ack.applied for count, ack in pairs]
        brought: Buffers = () if squares is None else (squares,)

        def settle(number: Number) -> messages.Settle:
            # The clock that it has just answered with: a server that was restored may be behind.
            return messages.Settle(self._hash, number, number.acked_clock, bool(intos))

        def only_pull(number: Number) -> messages.Settle:
            return messages.Settle(self._hash, number, 0, bool(intos))

        self._servers.change(
            # Where the push was late, the clock of the answer is one that others settle.
            [only_pull if ack.is_late else settle for ack in acks],
            payloads=[() if ack.is_late else brought for ack in acks],
            intos=intos,
        )
        for link, ack in zip(self._servers.links, acks, strict=True):
            if ack.refusal:
                raise named(from_remote(decode_error(ack.refusal)), link)
        return acks

    def _sum(self, acks: Sequence[Ack]) -> Array | None:
        """Return the squares of the whole gradient; None: it is dropped, everywhere.

        A server without squares refused its part, or got nothing but null pushes. One where the
        push was late has lost its part, which counts as zero: the others apply theirs.
        """
        known = [part for part, ack in zip(self._parts, acks, strict=True) if ack.has_squares]
        if not known or not all(ack.has_squares or ack.is_late for ack in acks):
            return None
        squares = known[0].copy()
        for part in known[1:]:
            squares += part
        return squares
