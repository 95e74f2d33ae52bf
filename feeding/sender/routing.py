"""Routing: which worker gets the next chunk.

Covers: choose.
Does not: send, wait, use time or sockets (feeder).
Threads: any; pure.

Chunks are routed, not partitions: with whole partitions a synchronous trainer would deadlock
(worker 0 waits at the barrier for worker 1, worker 1 for rows, the only feeder for worker 0).
Source: join the shortest queue, with slack against oscillation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLACK_CHUNKS = 2
"""Differences of unread bytes below this many chunks do not count. A worker on the feeder's own
host is preferred while it has at most this many more chunks to read."""


@dataclass(frozen=True, slots=True)
class LinkView:
    """What routing knows of one worker."""

    unread_bytes: int | None
    """Bytes as last reported, plus the bytes sent since; None: unknown, or too old."""
    sent_bytes: int
    """Total bytes from this feeder; breaks ties between workers with equally few unread bytes."""
    room: bool = True
    busy: bool = False
    """A call is in flight, so nothing can be sent now."""
    responsive: bool = True
    """False if the call is in flight for long: do not wait for this worker."""
    draining: bool = False
    local: bool = False


def choose(links: Sequence[LinkView], chunk_bytes: int, rotation: int = 0) -> int | None:
    """Choose the worker for the next chunk: the one with the fewest unread bytes.

    Args:
        links: one per worker.
        chunk_bytes: size of the chunk.
        rotation: breaks ties; the partition, so that many small feeders do not all begin with the
            first worker.

    Returns:
        The index of the worker; None to wait, because the best one is busy or none has room.
    """
    # Workers that drain drop rows, so they get some only if all of them drain.
    wanted = [i for i, link in enumerate(links) if not link.draining] or list(range(len(links)))
    eligible = [i for i in wanted if links[i].room and links[i].responsive]
    if not eligible:
        return None

    slack_bytes = max(1, SLACK_CHUNKS * chunk_bytes)
    known = [links[i] for i in wanted if links[i].unread_bytes is not None]
    fewest = min((link.unread_bytes or 0 for link in known), default=0)
    # An unknown worker counts as the emptiest: each gets its turn, none is greeted before its turn.
    # Of other hosts one must be known that can have the chunk: beside this host's, the emptiest
    # known has no turn, and one that is full or hangs would keep all unknown ones aside.
    has_remote = any(
        not links[i].local
        for i in eligible
        if (unread := links[i].unread_bytes) is not None and unread <= fewest + slack_bytes
    )

    def rank(index: int) -> tuple[int, bool, int, int]:
        link = links[index]
        unread = link.unread_bytes
        if unread is None:
            unread = fewest if link.local or has_remote else 0
        # In steps of the slack: workers that read as fast as they are fed take turns.
        steps = unread // slack_bytes - link.local
        turn = (index - rotation) % len(links)
        return steps, not link.local, link.sent_bytes, turn

    best = min(eligible, key=rank)
    return None if links[best].busy else best
