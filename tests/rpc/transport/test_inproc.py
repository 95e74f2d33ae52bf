"""In-process connections end with their users."""

from __future__ import annotations

import gc

import pytest

from rpc.errors import PeerGone
from rpc.transport.inproc import InprocAcceptor, dial_inproc, stream_pair
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket


def test_an_end_that_nobody_has_any_more_is_closed_without_a_word():
    """A warning of an unclosed socket would be an error here."""
    left, right = stream_pair()
    left.sendmsg([memoryview(b"x")])
    del left
    gc.collect()
    into = memoryview(bytearray(1))
    wait_until(lambda: right.recv_into(into) == 1, "the byte is there")
    with pytest.raises(PeerGone):
        wait_until(lambda: right.recv_into(into) == 0, "the end")
    right.close()


def test_a_listener_that_is_closed_again_leaves_the_name_to_the_next_one():
    first = InprocAcceptor("taken over")
    first.close()
    second = InprocAcceptor("taken over")
    first.close()
    dial_inproc("taken over").close()
    second.close()
    with pytest.raises(PeerGone, match="no listener"):
        dial_inproc("taken over")
