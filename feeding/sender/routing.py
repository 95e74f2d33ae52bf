"""Which worker gets the next chunk.

Covers: choose.      Does not: send, wait, know time or sockets (feeder).      Pure.

Per chunk, not per partition: with whole partitions a synchronous trainer would deadlock (worker 0
waits at the barrier for worker 1, worker 1 for rows, the only feeder for worker 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLACK_CHUNKS = 2
"""Differences of unread bytes below so many chunks do not count, and a worker on the feeder's own
host is preferred while it is at most so many chunks behind."""


@dataclass(frozen=True, slots=True)
class LaneView:
    """What is known of one worker."""

    unread_bytes: int | None
    """As last reported, plus what was sent since; None: not known, or too old."""
    sent_bytes: int
    """By this feeder in total; evens out workers that are equally empty."""
    room: bool = True
    busy: bool = False
    """A call is under way: nothing can be sent now."""
    responsive: bool = True
    """False when the call has been under way for long: do not wait for this one."""
    draining: bool = False
    local: bool = False


def choose(lanes: Sequence[LaneView], chunk_bytes: int, rotation: int = 0) -> int | None:
    """Return the index of the worker for the next chunk; None if the best one is busy: wait.

    Fewest unread bytes wins, in steps of the slack: below it, workers that read as fast as they are
    fed take turns, whichever of them was read a moment ago. Workers that drain get rows only when
    nobody else is left. `rotation` (the partition) breaks ties, so that many small feeders do not
    all begin with the first worker. A worker whose unread bytes are not known counts as one with
    the fewest that are known: so each gets its turn, and none is greeted before its turn.
    """
    wanted = [i for i, lane in enumerate(lanes) if not lane.draining] or list(range(len(lanes)))
    eligible = [i for i in wanted if lanes[i].room and lanes[i].responsive]
    if not eligible:
        return None

    slack_bytes = max(1, SLACK_CHUNKS * chunk_bytes)
    known = [lanes[i].unread_bytes for i in wanted]
    fewest = min((unread for unread in known if unread is not None), default=0)

    def rank(index: int) -> tuple[int, bool, int, int]:
        lane = lanes[index]
        unread = fewest if lane.unread_bytes is None else lane.unread_bytes
        steps = unread // slack_bytes - lane.local
        turn = (index - rotation) % len(lanes)
        return steps, not lane.local, lane.sent_bytes, turn

    best = min(eligible, key=rank)
    return None if lanes[best].busy else best
