"""Threads of a control server."""

from __future__ import annotations

import threading

import pytest

from tests.support.waiting import WAIT_S
from tfos.control.authority import ClusterAuthority
from tfos.tls_server import DaemonThreads, TlsServer


def refuse(_thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_a_call_that_comes_while_the_interpreter_exits_runs_in_place(
    monkeypatch: pytest.MonkeyPatch,
):
    threads = DaemonThreads(4)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran_on = threads.submit(threading.current_thread)
    assert ran_on.result(timeout=WAIT_S) is threading.current_thread()
    threads.shutdown()


def test_a_thread_that_runs_takes_the_calls_for_which_none_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
):
    threads = DaemonThreads(4)
    may_end = threading.Event()
    first = threads.submit(may_end.wait, WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        second = threads.submit(threading.current_thread)
        assert not second.done()
        may_end.set()
        assert second.result(timeout=WAIT_S) is not threading.current_thread()
    assert first.result(timeout=WAIT_S)
    threads.shutdown()


@pytest.mark.socket
def test_a_server_closes_while_the_interpreter_exits(monkeypatch: pytest.MonkeyPatch):
    """What is told of a cluster at exit comes behind it."""
    server = TlsServer({}, ClusterAuthority("c").driver(), num_peers=1, max_message_bytes=1024)
    server.start("127.0.0.1")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        server.close()
    server.close()
