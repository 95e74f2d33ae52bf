"""Servers that are killed or frozen, and replaced by hand from the last checkpoint."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from ps.checkpoint.choice import latest, steps_on_disk
from ps.checkpoint.storage import storage_at
from ps.client.client import PSClient
from ps.errors import PSError, ServerGone
from ps.manifest.manifest import Hyper, Manifest
from ps.protocol import messages
from rpc.auth.handshake import Identity, Role
from tests.support.channel_proxy import FaultProxy
from tests.support.ps_cluster import ADD, filled, make_manifest, run_all, succeeded
from tests.support.ps_processes import CREDENTIALS, ServerProcess, server_processes
from tests.support.snapshot_skew import torn_by
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

HYPER = Hyper(0.1)
NUM_WORKERS = 2


def client_of(endpoints, rank: int = 0, **settings) -> PSClient:
    options = {"num_workers": NUM_WORKERS, "timeout_s": 40.0, "reconnect_s": 30.0, **settings}
    return PSClient(endpoints, CREDENTIALS, Identity(Role.WORKER, rank), **options)


def start_again(
    directory: Path, dead: ServerProcess, rank: int, count: int, *arguments: str
) -> ServerProcess:
    """Start a server in the place of one that was killed, as a user would by hand."""
    dead.close()
    place = ("--rank", str(rank), "--num-servers", str(count), "--port", str(dead.endpoint.port))
    workers = ("--num-workers", str(NUM_WORKERS))
    return ServerProcess(directory, *place, *workers, *arguments, wait=False)


class Training:
    """Two workers that push ones until told to stop, and count what was acknowledged."""

    def __init__(self, manifest: Manifest, endpoints) -> None:
        self.manifest = manifest
        self.clients = [client_of(endpoints, rank) for rank in range(NUM_WORKERS)]
        self.clients[0].seed(manifest, filled(manifest))
        self.clients[1].attach()
        self.acknowledged = [0] * NUM_WORKERS
        self._stop = threading.Event()

    def work(self, rank: int) -> None:
        try:
            while not self._stop.is_set():
                self.clients[rank].push(filled(self.manifest, 1.0), hyper=HYPER, rows=1)
                self.acknowledged[rank] += 1
        finally:
            self.clients[rank].leave()

    def run(self, meanwhile: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                meanwhile()
            finally:
                self._stop.set()

        works = [partial(self.work, rank) for rank in range(NUM_WORKERS)]
        succeeded(run_all(guarded, *works, timeout_s=90.0))

    def further(self, pushes: int) -> None:
        """Wait until every worker has pushed so often again."""
        goals = [count + pushes for count in self.acknowledged]
        wait_until(
            lambda: all(a >= b for a, b in zip(self.acknowledged, goals, strict=True)),
            f"{pushes} more pushes",
            timeout_s=60.0,  # a server starts meanwhile
        )

    def close(self) -> None:
        for client in self.clients:
            client.close()


@pytest.mark.fault("F08")
@pytest.mark.fault("F30")
@pytest.mark.parametrize("consistency", [pytest.param("async", marks=pytest.mark.long), "sync"])
def test_a_killed_server_goes_on_from_the_last_commit_and_tells_the_loss(
    tmp_path: Path, consistency: str
):
    manifest = make_manifest(
        20_000, rule=ADD, consistency=consistency, reduction="sum", bucket_bytes=4096
    )
    root = tmp_path / "saves"
    with server_processes(tmp_path, 2, num_workers=NUM_WORKERS) as servers:
        training = Training(manifest, [server.endpoint for server in servers])
        restarted: list[ServerProcess] = []

        def kill_and_replace() -> None:
            training.further(5)
            with client_of([server.endpoint for server in servers]) as saver:
                saver.attach()
                saver.save(root, 900)
            training.further(5)
            servers[1].send(signal.SIGKILL)
            restarted.append(start_again(tmp_path, servers[1], 1, 2, "--restore", str(root)))
            assert restarted[0].announced
            training.further(5)

        try:
            training.run(kill_and_replace)
            stats = training.clients[0].stats()
            values = filled(manifest)
            training.clients[0].pull(values)
            cut = training.clients[0]._dense.pieces[0]
            on_first = sum(piece.stop - piece.start for piece in cut)
            total = sum(training.acknowledged)
            assert set(values["trainable"][:on_first]) == {np.float32(total)}
            lost = stats[1].lost_updates
            assert lost >= 10
            restored = values["trainable"][on_first:]
            torn = torn_by(root, 900, 1)
            assert restored.min() == total - lost
            assert restored.max() <= total - lost + torn
            assert consistency == "async" or not torn
            assert stats[1].restored_step == 900
            if consistency == "sync":
                assert stats[0].clock == stats[1].clock
            training.close()
            restarted[0].send(signal.SIGTERM)
            status, errors = restarted[0].wait()
            assert status == 0
            assert f"ps:1 resumes from step 900 of {root}" in errors
            found = re.search(r"ps:1: \d+ s, at least ([\d,]+) updates lost since step 900", errors)
            assert found, errors
            assert int(found[1].replace(",", "")) == lost
        finally:
            training.close()
            for server in restarted:
                server.close()


@pytest.mark.fault("F10")
@pytest.mark.fault("F12")
def test_all_servers_killed_during_a_save_go_on_from_the_commit_before(tmp_path: Path):
    manifest = make_manifest(400_000, rule=ADD, bucket_bytes=1024)
    root = tmp_path / "saves"
    with server_processes(tmp_path, 2, num_workers=1) as servers:
        with client_of(
            [server.endpoint for server in servers], num_workers=1, reconnect_s=0.5
        ) as client:
            client.seed(manifest, filled(manifest))
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
            client.save(root, 1)
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)

            ask = client._servers.ask

            def half_asked(request, answer, **options):
                if isinstance(request, messages.Save):  # or it could be done before the kill
                    servers[1].send(signal.SIGSTOP)
                return ask(request, answer, **options)

            client._servers.ask = half_asked  # type: ignore[method-assign]

            def kill() -> None:
                wait_until(lambda: bool(list(root.glob(".tmp-*/ps-*.data"))), "a half save")
                for server in servers:
                    server.send(signal.SIGKILL)

            saved, _ = run_all(partial(client.save, root, 2), kill)
            assert isinstance(saved, ServerGone), saved
        assert steps_on_disk(storage_at(root)) == [1] == [latest(root)]
        assert not list(root.glob(".tmp-*"))
        again = [
            start_again(tmp_path, server, rank, 2, "--restore", str(root), "--num-workers", "1")
            for rank, server in enumerate(servers)
        ]
        try:
            with client_of([server.endpoint for server in again], num_workers=1) as client:
                client.attach()
                values = filled(manifest)
                client.pull(values)
                assert set(values["trainable"]) == {np.float32(1.0)}
        finally:
            for server in again:
                server.close()


@pytest.mark.fault("F11")
def test_a_thawed_server_that_was_replaced_accepts_nothing_and_ends(tmp_path: Path):
    manifest = make_manifest(2000, rule=ADD)
    root = tmp_path / "saves"
    places = ("--save-dir", str(root))
    with server_processes(tmp_path, 1, num_workers=NUM_WORKERS, arguments=places) as (old,):
        proxy = FaultProxy(old.endpoint)
        moved = client_of([proxy.endpoint])
        left_behind = client_of([old.endpoint], 1, reconnect_s=1.0)
        new: ServerProcess | None = None
        try:
            ones = filled(manifest, 1.0)
            moved.seed(manifest, filled(manifest))
            left_behind.attach()
            for client in (moved, left_behind):
                client.push(ones, hyper=HYPER, rows=1)
            moved.save(root, 2)
            old.send(signal.SIGSTOP)
            process = psutil.Process(old.process.pid)
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the server to stop")
            new = ServerProcess(tmp_path, "--num-workers", str(NUM_WORKERS), "--restore", str(root))
            proxy.retarget(new.endpoint)
            moved.push(ones, hyper=HYPER, rows=1)
            old.send(signal.SIGCONT)
            with pytest.raises(PSError):  # the first one already
                left_behind.push(ones, hyper=HYPER, rows=1)
            status, errors = old.wait()
            assert status == 3
            assert re.search(r"ps:0 \(start 1, pid \d+\) was replaced by start 2", errors)
            moved.push(ones, hyper=HYPER, rows=1)
            values = filled(manifest)
            moved.pull(values)
            assert set(values["trainable"]) == {np.float32(4.0)}
            assert moved.stats()[0].lost_updates == 0
        finally:
            moved.close()
            left_behind.close()
            proxy.close()
            if new is not None:
                new.close()


@pytest.mark.fault("F52")
def test_a_second_server_that_cannot_start_does_not_replace_the_first(tmp_path: Path):
    root = tmp_path / "saves"
    places = ("--save-dir", str(root))
    with server_processes(tmp_path, 1, num_workers=1, arguments=places) as (first,):
        port = ("--port", str(first.endpoint.port))
        with pytest.raises(AssertionError, match=r"held by pid \d+"):
            ServerProcess(tmp_path, "--num-workers", "1", *port, *places)
        with pytest.raises(AssertionError, match="no complete checkpoint in"):
            ServerProcess(tmp_path, "--num-workers", "1", "--restore", str(root))
        with client_of([first.endpoint], num_workers=1) as client:
            assert client.describe()[0].phase == "EMPTY"
