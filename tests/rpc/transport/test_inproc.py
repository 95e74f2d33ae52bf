"""In-process connections end with their users."""

from __future__ import annotations

import gc
import os
import queue
import threading
from types import SimpleNamespace

import pytest

from rpc.errors import PeerGone
from rpc.transport.inproc import InprocAcceptor, dial_inproc, stream_pair
from tests.support.rpc import bed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket
WAIT_S = 10.0


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


def test_a_stream_counts_as_closed_once_it_takes_no_more_bytes():
    """A handler whose wait ends so must not get its reason through to the client."""
    left, right = stream_pair()
    entered, may_end = threading.Event(), threading.Event()
    own = left._sock

    def shutdown(how: int) -> None:
        entered.set()
        assert may_end.wait(WAIT_S)
        own.shutdown(how)

    left._sock = SimpleNamespace(shutdown=shutdown, close=own.close)  # type: ignore[assignment]
    ending = threading.Thread(target=left.shutdown, daemon=True)
    ending.start()
    assert entered.wait(WAIT_S)
    seen: queue.Queue[bool] = queue.Queue()
    threading.Thread(target=lambda: seen.put(left.peer_closed()), daemon=True).start()
    with pytest.raises(queue.Empty):
        seen.get(timeout=0.05)
    may_end.set()
    assert seen.get(timeout=WAIT_S)
    ending.join(WAIT_S)
    left.close()
    right.close()


def test_a_stream_that_another_thread_closes_can_be_asked_meanwhile():
    """As a save asks whether the client of an earlier one is gone."""
    left, right = stream_pair()
    own = left._sock
    closing = threading.Thread(target=left.close, daemon=True)

    def fileno() -> int:
        closing.start()
        closing.join(0.05)
        return own.fileno()

    left._sock = SimpleNamespace(  # type: ignore[assignment]
        fileno=fileno, shutdown=own.shutdown, close=own.close
    )
    assert not left.peer_closed()
    closing.join(WAIT_S)
    assert left.peer_closed()
    right.close()


def test_an_interrupt_while_one_dials_makes_no_later_client_wait(monkeypatch: pytest.MonkeyPatch):
    """As in a notebook: else each client would be accepted when the next one comes."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with bed("inproc") as made:
        with monkeypatch.context() as patched:
            patched.setattr(os, "eventfd_write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                made.connect()
        for _ in range(3):
            with made.connect() as connection:
                assert connection.call(b"echo", timeout_s=WAIT_S).meta == b"done"
