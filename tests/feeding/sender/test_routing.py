"""Which worker gets the next chunk: a table of situations."""

import pytest

from feeding.sender.routing import LaneView, choose


def lane(unread, sent=0, **flags):
    return LaneView(unread_bytes=unread, sent_bytes=sent, **flags)


CHUNK = 100
TABLE = {
    "the one worker": ([lane(0)], 0),
    "fewest unread bytes": ([lane(500), lane(200), lane(300)], 1),
    "equally empty: the one that got less": ([lane(0, 900), lane(0, 100)], 1),
    "own host within two chunks": ([lane(100), lane(300, local=True)], 1),
    "own host too far behind": ([lane(99), lane(400, local=True)], 0),
    "both on this host: unread bytes again": ([lane(450, local=True), lane(40, local=True)], 1),
    "a small difference does not count, turns do": ([lane(150, 100), lane(40, 200)], 0),
    "wait for the emptiest while it is busy": ([lane(500), lane(0, busy=True)], None),
    "do not wait for one that does not answer": (
        [lane(500), lane(0, busy=True, responsive=False)],
        0,
    ),
    "a full worker is passed over": ([lane(0, room=False), lane(900)], 1),
    "all full: wait": ([lane(9, room=False), lane(9, room=False)], None),
    "one that drains is the last choice": ([lane(0, draining=True), lane(900)], 1),
    "not even when the other is full": ([lane(0, draining=True), lane(9, room=False)], None),
    "one that is not known counts as the emptiest": ([lane(900, 1), lane(400, 1), lane(None)], 2),
    "and is left in peace while it is no one's turn": ([lane(900), lane(0), lane(None, 1)], 1),
    "its own host's is preferred to it": ([lane(None), lane(300, local=True)], 1),
    "nothing is known of any": ([lane(None), lane(None)], 0),
    "one that drains says nothing of the others": (
        [lane(0, draining=True), lane(900, 1), lane(None)],
        2,
    ),
    "all drain": ([lane(0, 5, draining=True), lane(0, 3, draining=True)], 1),
    "nobody": ([], None),
}


@pytest.mark.parametrize(("lanes", "expected"), TABLE.values(), ids=TABLE.keys())
def test_choice(lanes, expected):
    assert choose(lanes, CHUNK) == expected


def test_partitions_begin_with_different_workers():
    assert [choose([lane(0)] * 3, CHUNK, rotation=p) for p in range(4)] == [0, 1, 2, 0]
