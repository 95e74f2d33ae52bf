"""Several savers at one server: one save at a time, bounded waits, and always one that succeeds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ps.consistency import waits
from ps.consistency.waits import Waited
from ps.protocol import messages
from rpc.auth.handshake import Identity, Role
from rpc.client.connection import Connection, connect
from rpc.errors import DeadlineExceeded, RemoteError
from tests.support.ps_cluster import ADD, Cluster, cluster, filled, make_manifest
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

MANIFEST = make_manifest(rule=ADD)
BUSY = "ps:0 was still busy with another save after 0 s"


class Client:
    """One saver at ps:0, step by step."""

    def __init__(self, bed: Cluster, root: Path, role: Role) -> None:
        self.root = root
        self.connection: Connection = connect(
            bed.endpoints[0], Identity(role, 0, 0), bed.credentials
        )

    def take(self, save_id: str, **settings: float | bool) -> bool:
        """Whether the snapshot was taken."""
        return self._call(messages.TakeSnapshot(save_id, **settings))  # type: ignore[arg-type]

    def write(self, save_id: str, wait_s: float = 0.0) -> bool:
        """Whether the snapshot was written."""
        return self._call(messages.Save(str(self.root), save_id, wait_s))

    def _call(self, request: messages.Request) -> bool:
        try:
            self.connection.call(messages.encode(request), [], timeout_s=10.0)
        except RemoteError as error:
            if BUSY in str(error) or "has no snapshot here" in str(error):
                return False
            raise
        except DeadlineExceeded as error:
            raise AssertionError("the server waits for longer than it was asked to") from error
        return True


@pytest.fixture
def bed() -> Iterator[Cluster]:
    with cluster() as made:
        made.workers(MANIFEST, filled(MANIFEST))
        yield made


@pytest.fixture
def client(bed: Cluster, tmp_path: Path) -> Iterator[Callable[[Role], Client]]:
    made: list[Client] = []

    def make(role: Role) -> Client:
        made.append(Client(bed, tmp_path, role))
        return made[-1]

    yield make
    for each in made:
        each.connection.close()


def test_of_two_savers_one_waits_and_both_succeed(client):
    """Each of them took the other's snapshot away, again and again, and none was ever written."""
    chief, driver = client(Role.WORKER), client(Role.DRIVER)
    written = {"a": 0, "b": 0}
    for number in range(1, 9):
        takes = [(chief, f"job-a-{number}"), (driver, f"job-b-{number}")]
        for saver, save_id in takes if number % 2 else takes[::-1]:
            saver.take(save_id)
        for saver, save_id in takes:
            written[save_id[4]] += saver.write(save_id)
        if number == 4:
            assert written["a"] == 4
        if number > 4:  # the one that has to yield, now that the other one pauses
            written["b"] += driver.take(f"job-b-{number}0") and driver.write(f"job-b-{number}0")
    assert written["a"] == 8
    assert written["b"] >= 4


def test_a_snapshot_is_replaced_by_its_own_saver_and_by_whom_nobody_trains_for(client):
    chief, driver = client(Role.WORKER), client(Role.DRIVER)
    assert chief.take("job-a-1")
    assert chief.take("job-a-2")
    assert not chief.write("job-a-1")
    assert not driver.take("job-b-1")
    assert driver.take("job-b-1", as_it_is=True)
    assert driver.write("job-b-1")
    assert not chief.write("job-a-2")


def test_nobody_waits_for_a_saver_that_is_gone(client, monkeypatch):
    monkeypatch.setattr("ps.checkpoint.snapshot.UNWRITTEN_S", 3600.0)
    chief, driver = client(Role.WORKER), client(Role.DRIVER)
    assert chief.take("job-a-1")
    assert not driver.take("job-b-1")
    chief.connection.close()
    wait_until(lambda: driver.take("job-b-1"), "the end of the chief's connection", timeout_s=20.0)
    assert driver.write("job-b-1")


def test_a_saver_that_waits_follows_as_soon_as_the_other_has_written(client, monkeypatch):
    chief, driver = client(Role.WORKER), client(Role.DRIVER)
    assert chief.take("job-a-1")
    monkeypatch.setattr("ps.consistency.waits.CHECK_PEER_S", 3600.0)  # woken, it need not look
    begun = threading.Event()

    def noted(*arguments: Any) -> Waited:
        begun.set()  # under the lock that the other one needs
        return waits.wait_until(*arguments)

    monkeypatch.setattr("ps.server.save_restore.wait_until", noted)
    asked = messages.encode(messages.TakeSnapshot("job-b-1", wait_s=30.0))
    waiting = driver.connection.start(asked, [], timeout_s=30.0)
    assert begun.wait(20.0)
    assert chief.write("job-a-1", wait_s=30.0)
    assert messages.decode_reply(waiting.result(20.0).meta, messages.SnapshotMade).is_made
    assert driver.write("job-b-1")


def test_a_save_waits_for_a_disk_that_hangs_no_longer_than_its_time(client, bed: Cluster):
    chief, driver = client(Role.WORKER), client(Role.DRIVER)
    assert chief.take("job-a-1")
    with bed.servers[0]._service._saving._turn(0.0, lambda: False):
        assert not chief.write("job-a-1")
        assert not driver.take("job-b-1")
    assert chief.write("job-a-1")
    assert chief.write("job-a-1", wait_s=1.0), "asked again, it is answered as before"
