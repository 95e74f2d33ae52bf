"""A server looks for its successor beside its requests: they wait for a look, and not for ever."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO

import pytest

from ps import successor_watch
from ps.checkpoint.fencing import GenerationFence
from ps.checkpoint.storage import LocalStorage, storage_at
from ps.client.client import PSClient
from ps.errors import PSError
from ps.manifest.manifest import Hyper
from ps.server.server import PSServer, ServerSettings
from ps.successor_watch import SuccessorWatch
from rpc.auth.handshake import Credentials, Identity, Role
from tests.support.ps_cluster import ADD, filled, make_manifest
from tests.support.waiting import wait_until


class FlakyStorage(LocalStorage):
    """A directory whose reads hang from `hang` until `come_back`, or fail while `error` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.answers = threading.Event()
        self.answers.set()
        self.error: OSError | None = None
        self.reading = threading.Event()
        """Set by each read that begins."""

    def hang(self) -> None:
        """Return once a read hangs."""
        self.answers.clear()
        self.reading.clear()
        assert self.reading.wait(60.0)

    def open(self, name: str) -> BinaryIO:
        self.reading.set()
        assert self.answers.wait(60.0)
        if self.error is not None:
            raise self.error
        return super().open(name)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FlakyStorage]:
    made = FlakyStorage(tmp_path)
    yield made
    made.answers.set()


@pytest.fixture
def watch(storage: FlakyStorage) -> Iterator[SuccessorWatch]:
    fence = GenerationFence(storage, "c", 0)
    fence.claim()
    with contextlib.closing(SuccessorWatch(fence)) as made:
        made.start()
        yield made
        storage.answers.set()


def replace(storage: FlakyStorage) -> None:
    """Let another process take the server's place, from a host where the directory answers."""
    GenerationFence(storage_at(storage.where()), "c", 0).claim()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """By the watch; the fence may have been about to write its number again, and tells that."""
    by_watch = (each for each in caplog.records if each.name == successor_watch.__name__)
    return [each.getMessage() for each in by_watch]


@pytest.mark.fault("F11")
def test_a_replaced_server_is_found_at_its_next_look(storage, watch, monkeypatch):
    monkeypatch.setattr(successor_watch, "LOOK_S", 0.0)
    assert watch.successor() is None
    replace(storage)
    for _ in range(2):
        assert watch.successor().number == 2


@pytest.mark.fault("F11")
def test_a_server_of_another_rank_or_cluster_replaces_nobody(storage, watch, monkeypatch):
    monkeypatch.setattr(successor_watch, "LOOK_S", 0.0)
    GenerationFence(storage, "c", 1).claim()
    GenerationFence(storage, "other", 0).claim()
    assert watch.successor() is None


@pytest.mark.fault("F11")
def test_all_requests_of_a_thawed_server_wait_for_its_look(storage, watch, monkeypatch):
    monkeypatch.setattr(successor_watch, "LOOK_S", 0.0)
    storage.hang()
    replace(storage)
    with ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(watch.successor) for _ in range(2)]
        assert not wait(requests, timeout=0.1).done
        storage.answers.set()
        assert [each.result(10.0).number for each in requests] == [2, 2]


@pytest.mark.fault("F40")
def test_a_look_that_hangs_is_waited_for_once_and_told_once(storage, watch, monkeypatch, caplog):
    monkeypatch.setattr(successor_watch, "HANG_S", 1e9)
    monkeypatch.setattr(successor_watch, "LOOK_S", 0.0)
    assert watch.successor() is None
    storage.hang()
    monkeypatch.setattr(successor_watch, "HANG_S", 0.3)
    assert watch.successor() is None
    monkeypatch.setattr(successor_watch, "HANG_S", 1e9)
    assert watch.successor() is None
    (message,) = told(caplog)
    assert message == (
        f"{storage.where()} has not answered for 0.3 s: ps:0 continues to serve, and cannot see "
        f"whether another process has replaced it. End this one (pid {os.getpid()}) before you "
        "start another one instead"
    )
    replace(storage)
    storage.answers.set()
    wait_until(lambda: watch.successor() is not None)
    assert told(caplog)[1:] == [f"{storage.where()} answers again"]


@pytest.mark.fault("F40")
def test_a_directory_that_fails_holds_up_nothing_and_is_told_with_its_error(
    storage, watch, monkeypatch, caplog
):
    monkeypatch.setattr(successor_watch, "LOOK_S", 0.0)
    monkeypatch.setattr(successor_watch, "HANG_S", 1e9)
    storage.error = OSError(errno.ESTALE, "Stale file handle")
    assert watch.successor() is None
    assert watch.successor() is None
    (message,) = told(caplog)
    assert "cannot be read ([Errno 116] Stale file handle): ps:0 continues to serve" in message
    storage.error = None
    wait_until(lambda: len(told(caplog)) == 2)
    assert told(caplog)[1] == f"{storage.where()} answers again"


@pytest.mark.fault("F11")
def test_a_suspended_request_has_not_waited(storage, monkeypatch):
    """A server that was frozen while it waited for a look does not answer without one."""
    unlooked = SuccessorWatch(GenerationFence(storage, "c", 0))
    now_s, waits = 0.0, 0

    def wait_frozen(_seconds: float) -> bool:
        nonlocal now_s, waits
        now_s, waits = now_s + 1000.0, waits + 1
        return False

    monkeypatch.setattr("ps.successor_watch.time.monotonic", lambda: now_s)
    monkeypatch.setattr(unlooked._changed, "wait", wait_frozen)
    assert unlooked.successor() is None
    assert waits > 10


@pytest.mark.fault("F11")
def test_a_watch_that_is_closed_tells_what_it_knew_and_waits_for_nothing(storage, monkeypatch):
    monkeypatch.setattr(successor_watch, "HANG_S", 1e9)
    fence = GenerationFence(storage, "c", 0)
    unstarted = SuccessorWatch(fence)
    unstarted.close()
    assert unstarted.successor() is None


@pytest.mark.socket
@pytest.mark.fault("F11", "F40")
def test_a_file_system_that_hangs_stops_no_training(
    storage: FlakyStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(successor_watch, "HANG_S", 0.3)
    manifest = make_manifest(rule=ADD)
    credentials = Credentials("c", b"s" * 32)
    settings = ServerSettings(rank=0, num_servers=1, num_workers=1)
    fence = GenerationFence(storage, "c", 0)
    with PSServer(settings, credentials, guard=fence) as server:
        server.bind_inproc("hanging")
        server.start()
        with PSClient(
            [server.endpoint], credentials, Identity(Role.WORKER, 0), num_workers=1, reconnect_s=0.1
        ) as client:
            client.seed(manifest, filled(manifest))
            storage.hang()

            def push() -> None:
                client.push(filled(manifest, 1.0), hyper=Hyper(1.0), rows=1)

            def is_told() -> bool:
                push()
                return "has not answered for 0.3 s" in caplog.text

            wait_until(is_told)
            push()
            replace(storage)
            storage.answers.set()
            with pytest.raises(PSError, match=r"replaced by start 2|could not be reached"):
                wait_until(lambda: not is_told())
