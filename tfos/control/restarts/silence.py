"""Silence: when a node of which nothing is heard counts as lost.      Pure.

Covers: a connection that does not come back, heartbeats that stay away.
Does not: say what the loss means (control.restarts.node_end).
"""

from __future__ import annotations

from tfos.config import ClusterConfig
from tfos.control.members import Member


def silence_of(member: Member, config: ClusterConfig, now_s: float) -> str:
    """Return why a node counts as lost, for its failure; empty: it does not.

    Args:
        member: the node, which is live.
        config: has the limits.
        now_s: monotonic seconds.
    """
    silent_s = now_s - member.heard_s
    closed_s = now_s - member.stream_lost_s if member.stream_lost_s is not None else 0.0
    # A heartbeat since then shows a supervisor whose connection is about to return.
    if min(closed_s, silent_s) > config.reconnect_s:
        limit_s = f"limit {config.reconnect_s:g} s"
        return (
            f"connection closed {closed_s:.1f} s ago ({limit_s}): its supervisor ended, or it was "
            "cut off from the driver"
        )
    if silent_s > config.hang_s:
        limit_s = f"limit {config.hang_s:.0f} s"
        return f"no heartbeat for {silent_s:.1f} s ({limit_s}): frozen or cut off from the driver"
    return ""
