"""When a node of which nothing is heard counts as lost: a table of times since the last signs."""

from __future__ import annotations

import pytest

from tfos.config import ClusterConfig
from tfos.control.members import Member
from tfos.control.restarts.silence import silence_of
from tfos.topology import plan

NOW = 100.0
CLOSED = (
    "connection closed {} s ago (limit 3 s): its supervisor ended, or it was cut off from the "
    "driver"
)
CONFIG = ClusterConfig(hang_s=20.0, reconnect_s=3.0)


@pytest.mark.parametrize(
    ("closed_s", "silent_s", "reason"),
    [
        (None, 0.0, ""),
        (None, 19.9, ""),
        (None, 20.1, "no heartbeat for 20.1 s (limit 20 s): frozen or cut off from the driver"),
        (2.9, 2.9, ""),  # the connection may come back
        (3.1, 3.1, CLOSED.format("3.1")),
        (3.5, 1.5, ""),  # a heartbeat came after the connection was closed
        (30.0, 30.0, CLOSED.format("30.0")),
    ],
)
def test_a_node_is_lost_by_silence(closed_s: float | None, silent_s: float, reason: str):
    member = Member(plan(2, 1).nodes[0], heard_s=NOW - silent_s)
    member.stream_lost_s = None if closed_s is None else NOW - closed_s
    assert silence_of(member, CONFIG, NOW) == reason
