"""A worker process killed in synchronous training: the others hear of it, or go on without it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ps.client.client import PSClient
from ps.errors import WorkerLost
from ps.manifest.manifest import Hyper
from rpc.auth.handshake import Identity, Role
from rpc.endpoint import Endpoint
from tests.support.ps_cluster import ADD, filled, make_manifest, run_all, succeeded
from tests.support.ps_processes import CREDENTIALS, SECRET, server_processes
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

HYPER = Hyper(0.1)
SIZE = 200_000
NUM_WORKERS = 3
LAST = NUM_WORKERS - 1
FIRST = 3
DIE_S = 10.0
"""2 s are promised; a machine under full load gets more."""
WORKER = """
import sys
import numpy as np
from ps.client.client import PSClient
from ps.manifest.manifest import Hyper
from rpc.endpoint import Endpoint
from rpc.auth.handshake import Credentials, Identity, Role

secret = sys.stdin.readline().strip().encode()
endpoints = [Endpoint("127.0.0.1", int(port)) for port in sys.argv[3:]]
rank, num_workers = int(sys.argv[1]), int(sys.argv[2])
identity = Identity(Role.WORKER, rank)
credentials = Credentials("processes", secret)
client = PSClient(endpoints, credentials, identity, num_workers=num_workers)
client.attach()
print("attached", flush=True)
ones = {"trainable": np.ones(%d, np.float32)}
while True:
    print(client.push(ones, hyper=Hyper(0.1), rows=1).clock, flush=True)
"""


@contextmanager
def pushing_worker(endpoints: list[Endpoint]) -> Iterator[subprocess.Popen[str]]:
    """A process of the last rank that pushes until it is killed."""
    places = [str(LAST), str(NUM_WORKERS), *(str(endpoint.port) for endpoint in endpoints)]
    with subprocess.Popen(
        [sys.executable, "-c", WORKER % SIZE, *places],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        try:
            process.stdin.write(SECRET.decode() + "\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()


def client_of(endpoints: list[Endpoint], rank: int, role: Role = Role.WORKER) -> PSClient:
    identity = Identity(role, rank)
    return PSClient(endpoints, CREDENTIALS, identity, num_workers=NUM_WORKERS, timeout_s=30.0)


class Survivor:
    """A worker that pushes until another is known to be lost, and three times more."""

    def __init__(self, client: PSClient, known: threading.Event, first: int | None) -> None:
        self.client = client
        self.known = known
        self.first = first
        """Pushes before it waits for the loss; None: it does not wait."""
        self.pushes = 0
        self.ended_s = 0.0
        self.error: WorkerLost | None = None

    def work(self) -> None:
        try:
            while not self.known.is_set():
                if self.pushes == self.first:
                    assert self.known.wait(30.0)
                else:
                    self.push()
            for _ in range(3):
                self.push()
            self.client.leave()  # the other one may have pushed more often
        except WorkerLost as error:
            self.error = error
        self.ended_s = time.monotonic()

    def push(self) -> None:
        self.client.push(filled(self.client.manifest, 1.0), hyper=HYPER, rows=1)
        self.pushes += 1


def kill_and_tell(victim: subprocess.Popen[str], driver: PSClient, *, is_staged: bool) -> float:
    """Kill it in or after its fourth push and tell the servers; returns when."""
    assert victim.stdout is not None
    for _ in range(FIRST):
        assert victim.stdout.readline()
    if is_staged:  # the others have stopped, so its fourth push waits for them
        wait_until(lambda: all(each.missing == (0, 1) for each in driver.stats()), "its push")
    victim.send_signal(signal.SIGKILL)
    victim.wait(10.0)
    killed_s = time.monotonic()
    driver.worker_lost(LAST, 0)
    return killed_s


@pytest.mark.fault("F02")
@pytest.mark.parametrize(
    ("on_lost", "is_staged"),
    [
        ("fail", False),
        pytest.param("continue", True, marks=pytest.mark.long),
        pytest.param("fail", True, marks=pytest.mark.long),
        pytest.param("continue", False, marks=pytest.mark.long),
    ],
)
def test_nobody_waits_for_a_killed_worker(tmp_path: Path, on_lost: str, *, is_staged: bool):
    """It dies while its push waits at the barrier, or anywhere in or between two pushes."""
    manifest = make_manifest(SIZE, rule=ADD, consistency="sync", reduction="sum")
    options = ("--on-lost", on_lost)
    with server_processes(tmp_path, 2, num_workers=NUM_WORKERS, arguments=options) as servers:
        endpoints = [server.endpoint for server in servers]
        with (
            client_of(endpoints, 0) as chief,
            client_of(endpoints, 1) as other,
            client_of(endpoints, 0, Role.DRIVER) as driver,
            pushing_worker(endpoints) as victim,
        ):
            chief.seed(manifest, filled(manifest))
            other.attach()
            assert victim.stdout is not None
            assert victim.stdout.readline() == "attached\n"
            known = threading.Event()
            first = FIRST if is_staged else None
            survivors = [Survivor(client, known, first) for client in (chief, other)]

            def kill() -> float:
                try:
                    return kill_and_tell(victim, driver, is_staged=is_staged)
                finally:
                    known.set()

            works = [survivor.work for survivor in survivors]
            *_, killed_s = succeeded(run_all(*works, kill, timeout_s=60.0))
            pulled = filled(manifest)
            chief.pull(pulled)
        counts = set(pulled["trainable"])
        if on_lost == "fail":
            assert all("worker 2 was lost" in str(survivor.error) for survivor in survivors)
            assert max(survivor.ended_s for survivor in survivors) - killed_s < DIE_S
            return
        assert all(survivor.error is None for survivor in survivors)
        of_victim = {
            int(count) - sum(survivor.pushes for survivor in survivors) for count in counts
        }
        # Its last push counts on both servers, on one, or on neither; a staged one was dropped.
        assert of_victim == {FIRST} if is_staged else min(of_victim) >= FIRST
        assert max(of_victim) - min(of_victim) <= 1
