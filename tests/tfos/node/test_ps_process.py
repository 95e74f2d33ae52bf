"""A PS process between its supervisor and its clients: what it does with orders."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ps.checkpoint.format import step_name
from ps.client.client import PSClient
from ps.errors import CheckpointError, ServerError, StaleGeneration, WorkerLost
from ps.manifest.manifest import Hyper
from ps.protocol.permissions import ServerPhase
from ps.server import lifecycle
from ps.server.handlers import Service
from ps.server.reduction import Reduction
from ps.server.server import PSServer, ServerSettings
from rpc.auth.handshake import Identity, Role
from rpc.endpoint import Endpoint
from rpc.server.listener import Listener
from tests.support.nodes import node_settings
from tests.support.ps_cluster import ADD, WAIT_S, filled, make_manifest
from tests.support.waiting import wait_until
from tfos.config import Checkpoints, Restarts
from tfos.control import messages
from tfos.node.child_link import ChildLink, FromChild, HasBegun, ToServer
from tfos.node.ps_process import ServerProcess
from tfos.node.spec import NO_KEYS, ChildSpec, Executor, NodeBundle, NodeSettings
from tfos.topology import PlannedNode

pytestmark = pytest.mark.socket

MANIFEST = make_manifest(rule=ADD)
HYPER = Hyper(1.0)


class Child:
    """A server's process on a thread, under the link of its supervisor."""

    def __init__(self, settings: NodeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bundle = NodeBundle(
            node=PlannedNode("ps", 0, 0),
            control_keys=NO_KEYS,
            rpc_secret=b"S" * 32,
            settings=settings,
        )
        self._clients: list[PSClient] = []
        monkeypatch.setattr("tfos.node.child_link.os._exit", lambda code: None)

    def start(self, sockets: Path, restart: int = 0, *, has_begun: bool = True) -> None:
        self.process = self.make(sockets, restart=restart)
        self.main = threading.Thread(target=self.process.run, daemon=True)
        self.main.start()
        if restart:
            self.link.send(HasBegun(has_begun))
        self.endpoint = self.told(messages.Listening).endpoint

    def make(self, sockets: Path, attempt: int = 0, restart: int = 0) -> ServerProcess:
        ours, theirs = socket.socketpair()
        self.link: ChildLink[FromChild] = ChildLink(ours, FromChild)
        child: ChildLink[ToServer] = ChildLink(theirs, ToServer)
        self._socket = theirs
        spec = ChildSpec(
            attempt=attempt,
            bundle=self._bundle,
            executor=Executor("1", "127.0.0.1", 0, 1, "/", "", str(sockets), ""),
            link_fd=-1,
            socket_dir=str(sockets),
            log_dir="",
            restart=restart,
        )
        return ServerProcess(spec, child)

    @contextlib.contextmanager
    def serving(self) -> Iterator[PSClient]:
        """A client of the process before this one, while that serves."""
        settings = ServerSettings(rank=0, num_servers=1, num_workers=1)
        with PSServer(settings, self._bundle.data_credentials) as server:
            server.bind_tcp("127.0.0.1")
            server.start()
            with self.client(server.endpoint) as client:
                client.seed(MANIFEST, filled(MANIFEST))
                yield client

    def client(self, endpoint: Endpoint, rank: int = 0) -> PSClient:
        settings, credentials = self._bundle.settings, self._bundle.data_credentials
        made = PSClient(
            [endpoint],
            credentials,
            Identity(Role.WORKER, rank, 0),
            num_workers=settings.num_workers,
            timeout_s=WAIT_S,
        )
        self._clients.append(made)
        return made

    def told(self, kind: type[Any]) -> Any:
        deadline_s = time.monotonic() + WAIT_S
        while not isinstance(told := self.link.receive(WAIT_S), kind):
            assert told is not None
            assert time.monotonic() < deadline_s, f"no {kind}"  # its progress goes on without
        return told

    def close(self) -> None:
        self.link.send(messages.Stop("end"))
        self.main.join(WAIT_S)
        assert not self.main.is_alive()
        self.end()

    def end(self) -> None:
        for client in self._clients:
            client.close()
        self.link.close()
        names = {"tfos-orders", "ps-restore"}
        wait_until(lambda: not names & {each.name for each in threading.enumerate()}, "the end")
        self._socket.close()


class Restarted(Child):
    """A second child of a server's supervisor, whose restore stands until `goes_on`."""

    def __init__(self, root: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = node_settings(
            checkpoints=Checkpoints(directory=str(root)), restarts=Restarts(workers=1)
        )
        super().__init__(settings, monkeypatch)
        self._save(root)
        self.goes_on, self._stands = threading.Event(), threading.Event()
        passes = Service._new_dense

        def held(service: Service, manifest: Any) -> Any:
            self._stands.set()
            assert self.goes_on.wait(WAIT_S)
            return passes(service, manifest)

        monkeypatch.setattr(Service, "_new_dense", held)
        monkeypatch.setattr(lifecycle, "RESTORE_LOOK_S", 0.1)
        self.start(sockets, restart=1)
        assert self._stands.wait(WAIT_S)

    def _save(self, root: Path) -> None:
        with self.serving() as client:
            client.save(root, 1)

    def close(self) -> None:
        self.goes_on.set()
        super().close()


@pytest.fixture
def restarted(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Restarted]:
    made = Restarted(tmp_path / "saves", tmp_path_factory.mktemp("s"), monkeypatch)
    yield made
    made.close()


@pytest.mark.fault("F06")
def test_a_server_that_restores_knows_the_fences_before_it_serves(restarted: Restarted):
    stale = restarted.client(restarted.endpoint)
    stale._adopt(MANIFEST)
    pushed: list[Exception | None] = []

    def push() -> None:
        try:
            stale.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
        except StaleGeneration as error:
            pushed.append(error)
        else:
            pushed.append(None)

    pushing = threading.Thread(target=push, daemon=True)
    pushing.start()
    restarted.link.send(messages.FenceWorker(0, 0, "frozen"))
    life = restarted.process._server._service.life
    wait_until(lambda: life._lost == {0: 0}, "the order was read")
    restarted.goes_on.set()
    pushing.join(WAIT_S)
    assert isinstance(pushed[0], StaleGeneration)


@pytest.mark.fault("F08")
def test_a_server_that_restores_stops_at_once(restarted: Restarted):
    restarted.link.send(messages.Stop("the cluster ends"))
    restarted.main.join(WAIT_S)
    assert not restarted.main.is_alive(), "though the restore still stands"


@pytest.mark.fault("F08")
def test_a_server_that_is_started_again_without_checkpoints_says_what_is_lost(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    """Spark repeats the task of a lost executor, whatever the cluster can use."""
    child = Child(node_settings(), monkeypatch)
    process = child.make(tmp_path_factory.mktemp("s"), attempt=1)
    child.link.send(HasBegun(True))
    try:
        with pytest.raises(CheckpointError) as caught:
            process.run()
    finally:
        child.end()
    assert str(caught.value) == (
        "ps:0 was started again (attempt 1): the parameters of its last attempt are lost, and "
        "the cluster has no checkpoints to go on from. Set ClusterConfig(checkpoints=...), from "
        "which a server goes on, and start the cluster again"
    )


@pytest.mark.fault("F08")
def test_a_server_that_is_started_again_before_the_cluster_has_begun_is_seeded(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    child = Child(node_settings(checkpoints=Checkpoints(directory=str(tmp_path))), monkeypatch)
    child.start(tmp_path_factory.mktemp("s"), restart=1, has_begun=False)
    try:
        child.client(child.endpoint).seed(MANIFEST, filled(MANIFEST))
        assert child.process._server.phase is ServerPhase.SERVING
    finally:
        child.close()


def test_a_stop_while_a_server_begins_to_listen_is_no_failure(tmp_path, monkeypatch):
    child = Child(node_settings(), monkeypatch)
    process, begins = child.make(tmp_path), Listener.start

    def stopped(listener: Listener) -> None:
        child.link.send(messages.Stop("another node failed"))
        wait_until(lambda: process._server.wait_stopped(0.0), "the stop")
        begins(listener)

    monkeypatch.setattr(Listener, "start", stopped)
    process.run()
    child.told(messages.Done)
    child.end()


@pytest.mark.fault("F08")
def test_a_server_that_waits_for_word_whether_the_cluster_has_begun_stops_at_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    child = Child(node_settings(), monkeypatch)
    process = child.make(tmp_path_factory.mktemp("s"), attempt=1)
    child.link.send(messages.Stop("the cluster ends"))
    process.run()
    assert child.told(messages.Done) == messages.Done()
    child.end()


@pytest.mark.fault("F41")
def test_the_driver_hears_of_a_server_that_goes_on_from_an_older_step(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    child = Child(node_settings(checkpoints=Checkpoints(directory=str(tmp_path))), monkeypatch)
    with child.serving() as client:
        client.save(tmp_path, 1)
        client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
        client.save(tmp_path, 2)
    path = tmp_path / step_name(2) / "ps-0.data"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    child.start(tmp_path_factory.mktemp("s"), restart=1)
    try:
        text = child.told(messages.UpdatesLost).text
    finally:
        child.close()
    assert text.startswith("ps:0: it goes on from step 1, as its part of step 2 is damaged")


@pytest.mark.fault("F08")
def test_the_driver_hears_of_updates_that_are_lost_right_before_the_end(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """As of a server that was killed while the training's last save was written."""
    child = Child(node_settings(checkpoints=Checkpoints(directory=str(tmp_path))), monkeypatch)
    with child.serving() as client:
        client.save(tmp_path, 1)
        client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
        child.start(tmp_path_factory.mktemp("s"), restart=1)
        try:
            wait_until(lambda: child.process._server.phase is ServerPhase.SERVING, "the restore")
            client.server_moved(0, child.endpoint)
            client.finish()
            child.link.send(messages.Stop("the training is over"))
            text = child.told(messages.UpdatesLost).text
        finally:
            child.close()
    assert text.endswith("at least 1 update lost since step 1")
    # Where all workers are replaced as well, nobody tells the number.
    assert re.search(r"ps:0 resumes from step 1 of .*, as it was \d+ s ago", caplog.text)


@pytest.mark.fault("F02")
@pytest.mark.parametrize(
    ("settings", "is_outlived"),
    [
        ({}, True),
        ({"tolerate_lost_workers": False, "restarts": Restarts(workers=1)}, True),
        ({"tolerate_lost_workers": False}, False),
    ],
    ids=["default", "restarts", "neither"],
)
def test_a_barrier_goes_on_without_a_lost_worker_where_the_cluster_does(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    *,
    is_outlived: bool,
):
    child = Child(node_settings(num_workers=2, **settings), monkeypatch)
    child.start(tmp_path_factory.mktemp("s"))
    try:
        manifest = make_manifest(rule=ADD, consistency="sync", reduction="sum")
        clients = [child.client(child.endpoint, rank) for rank in range(2)]
        clients[0].seed(manifest, filled(manifest))
        clients[1].attach()
        child.link.send(messages.FenceWorker(1, 0, "killed"))
        told = ""
        try:
            clients[0].push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        except WorkerLost as error:
            told = str(error)
        remedy = "in a cluster (num_ps >= 1) with ClusterConfig(tolerate_lost_workers=True)"
        assert told == "" if is_outlived else remedy in told
    finally:
        child.close()


@pytest.mark.fault("F02")
def test_workers_are_told_why_a_barrier_failed_that_a_lost_worker_was_the_last_to_hold_up(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    child = Child(node_settings(num_workers=2), monkeypatch)
    codes: list[int] = []
    monkeypatch.setattr("tfos.node.child_link.os._exit", codes.append)

    def broken(*_: Any) -> None:
        raise ValueError("broken kernel")

    monkeypatch.setattr(Reduction, "reduce", broken)
    child.start(tmp_path_factory.mktemp("s"))
    told: list[str] = []
    try:
        manifest = make_manifest(rule=ADD, consistency="sync", reduction="sum")
        clients = [child.client(child.endpoint, rank) for rank in range(2)]
        clients[0].seed(manifest, filled(manifest))
        clients[1].attach()

        def push() -> None:
            try:
                clients[0].push(filled(manifest, 1.0), hyper=HYPER, rows=1)
            except ServerError as error:
                told.append(str(error))

        pushing = threading.Thread(target=push, daemon=True)
        pushing.start()
        wait_until(lambda: child.process._server.stats().waiting, "the push waits")
        child.link.send(messages.FenceWorker(1, 0, "killed"))
        pushing.join(WAIT_S)
        child.link.send(messages.Stop("end"))
        child.main.join(WAIT_S)
        assert not child.main.is_alive(), "the order behind it is carried out"
        assert codes == []
    finally:
        child.close()
    [text] = told
    assert "reducing clock 1 failed: ValueError: broken kernel" in text
