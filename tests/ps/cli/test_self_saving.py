"""Hand-started servers save themselves, also when one moves to another port."""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path

import pytest

from ps.checkpoint.choice import latest, read_manifest
from ps.cli import serve
from ps.client.client import PSClient
from ps.manifest.manifest import Hyper
from rpc.auth.handshake import Identity, Role
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest
from tests.support.ps_processes import CREDENTIALS, ServerProcess, server_processes
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

MANIFEST = make_manifest(5000, rule=ADD, consistency="sync", bucket_bytes=1024)


def client_of(endpoints) -> PSClient:
    worker = Identity(Role.WORKER, 0)
    return PSClient(endpoints, CREDENTIALS, worker, num_workers=1, timeout_s=40.0)


def push(client: PSClient, times: int) -> None:
    for _ in range(times):
        client.push(filled(MANIFEST, 1.0), hyper=Hyper(1.0), rows=1)


@pytest.mark.process
@pytest.mark.fault("F08")
def test_a_group_of_servers_saves_itself_and_finds_one_that_was_started_again(tmp_path: Path):
    root = tmp_path / "saves"
    flags = ("--save-dir", str(root), "--save-every", "0.3", "--save-keep", "2")
    with server_processes(tmp_path, 2, num_workers=1, arguments=flags) as servers:
        with client_of([server.endpoint for server in servers]) as client:
            client.seed(MANIFEST, filled(MANIFEST))
            push(client, 3)
            wait_until(lambda: (latest(root) or 0) >= 3, "a save of all servers", 40.0)
        servers[1].send(signal.SIGKILL)
        place = ("--rank", "1", "--num-servers", "2", "--num-workers", "1")
        moved = ServerProcess(tmp_path, *place, *flags, "--restore", str(root))
        try:
            with client_of([servers[0].endpoint, moved.endpoint]) as client:
                client.attach()
                push(client, 2)
                wait_until(lambda: (latest(root) or 0) >= 5, "a save with the new server", 40.0)
                push(client, 1)
            servers[0].send(signal.SIGTERM)
            status, errors = servers[0].wait()
            assert status == 0, errors
        finally:
            moved.close()
    assert latest(root) == 6, "the last save is made at the end"
    assert read_manifest(root).job == CREDENTIALS.cluster_id
    with cluster("inproc", num_servers=1) as bed:
        restored = bed.client()
        assert restored.restore(root) == 6
        assert set(bed.pulled(restored)["trainable"].tolist()) == {6.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--save-every", "5"), "--save-every 5 needs --save-dir DIR"),
        (("--save-every", "0", "--save-dir", "DIR"), r"takes seconds above 0, got 0\.0"),
        (("--save-every", "nan", "--save-dir", "DIR"), "takes seconds above 0, got nan"),
        (("--save-every", "5", "--save-dir", "DIR"), "of another run, newest step 7; pass --rest"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, monkeypatch, capsys, flags, message):
    root = tmp_path / "saves"
    with cluster("inproc") as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        client.save(root, 7)
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(b"s" * 32)
    common = ["--num-workers", "1", "--secret-file", str(secret), "--cluster-id", "c"]
    monkeypatch.setattr(serve, "_signals_caught", lambda: contextlib.nullcontext([]))
    given = [str(root) if flag == "DIR" else flag for flag in flags]
    assert serve.main([*common, *given]) == 2
    captured = capsys.readouterr().err
    assert re.search(message, captured), captured
