"""Which worker gets the next chunk: a table of situations."""

import pytest

from feeding.sender.routing import LinkView, choose


def link(unread, sent=0, **flags):
    return LinkView(unread_bytes=unread, sent_bytes=sent, **flags)


CHUNK = 100
TABLE = {
    "the one worker": ([link(0)], 0),
    "fewest unread bytes": ([link(500), link(200), link(300)], 1),
    "equally empty: the one that got less": ([link(0, 900), link(0, 100)], 1),
    "own host within two chunks": ([link(100), link(300, local=True)], 1),
    "own host too far behind": ([link(99), link(400, local=True)], 0),
    "both on this host: unread bytes again": ([link(450, local=True), link(40, local=True)], 1),
    "a small difference does not count, turns do": ([link(150, 100), link(40, 200)], 0),
    "wait for the emptiest while it is busy": ([link(500), link(0, busy=True)], None),
    "do not wait for one that does not answer": (
        [link(500), link(0, busy=True, responsive=False)],
        0,
    ),
    "a full worker is passed over": ([link(0, room=False), link(900)], 1),
    "all full: wait": ([link(9, room=False), link(9, room=False)], None),
    "one that drains is the last choice": ([link(0, draining=True), link(900)], 1),
    "not even when the other is full": ([link(0, draining=True), link(9, room=False)], None),
    "one that is not known counts as the emptiest": ([link(900, 1), link(400, 1), link(None)], 2),
    "and is left in peace while it is no one's turn": ([link(900), link(0), link(None, 1)], 1),
    "its own host's is preferred to it": ([link(None), link(300, local=True)], 1),
    "until that has more than two chunks more": ([link(None), link(400, local=True)], 0),
    "nothing is known of this host's either": ([link(None), link(None, local=True)], 1),
    "one at a time: others are left in peace while one elsewhere is known": (
        [link(500, local=True), link(500), link(None, 1)],
        0,
    ),
    "one elsewhere that has much to read says nothing of those that are not known": (
        [link(900, local=True), link(6400), link(None)],
        2,
    ),
    "nor one that is full": (
        [link(900, local=True), link(900, room=False, busy=True), link(None)],
        2,
    ),
    "nor one that does not answer": (
        [link(900, local=True), link(900, busy=True, responsive=False), link(None)],
        2,
    ),
    "nothing is known of any": ([link(None), link(None)], 0),
    "one that drains says nothing of the others": (
        [link(0, draining=True), link(900, 1), link(None)],
        2,
    ),
    "all drain": ([link(0, 5, draining=True), link(0, 3, draining=True)], 1),
    "nobody": ([], None),
}


@pytest.mark.parametrize(("links", "expected"), TABLE.values(), ids=TABLE.keys())
def test_choice(links, expected):
    assert choose(links, CHUNK) == expected


def test_partitions_begin_with_different_workers():
    assert [choose([link(0)] * 3, CHUNK, rotation=p) for p in range(4)] == [0, 1, 2, 0]
