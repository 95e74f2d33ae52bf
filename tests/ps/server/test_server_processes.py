"""Servers and workers as processes that are killed, frozen and stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from ps.cli.serve import main
from ps.client.client import PSClient
from ps.errors import RequestTimeout, ServerGone
from ps.manifest.manifest import Hyper
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.errors import AuthError
from tests.support.ps_cluster import ADD, WAIT_S, filled, make_manifest, run_all
from tests.support.ps_processes import CREDENTIALS, SECRET, ServerProcess, server_processes
from tests.support.waiting import wait_until

pytestmark = pytest.mark.process

HYPER = Hyper(0.1)


def client_of(servers: list[ServerProcess], rank: int = 0, **settings) -> PSClient:
    arguments = {"num_workers": 1, "timeout_s": 20.0, "reconnect_s": 1.0, **settings}
    endpoints = [server.endpoint for server in servers]
    return PSClient(endpoints, CREDENTIALS, Identity(Role.WORKER, rank), **arguments)


@pytest.mark.fault("F08")
@pytest.mark.fault("F12")
def test_killing_a_server_stops_training_with_its_name(tmp_path: Path):
    manifest = make_manifest(rule=ADD)
    with (
        server_processes(tmp_path, 2, num_workers=1) as servers,
        client_of(servers) as client,
    ):
        client.seed(manifest, filled(manifest))

        def train() -> None:
            while True:
                client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)

        def kill() -> None:
            servers[1].send(signal.SIGKILL)

        started_s = time.monotonic()
        trained, _ = run_all(train, kill)
        assert isinstance(trained, ServerGone)
        endpoint = servers[1].endpoint
        assert f"ps:1 at {endpoint} could not be reached for 1 s" in str(trained)
        assert time.monotonic() - started_s < 30.0


@pytest.mark.fault("F08")
def test_killing_a_server_ends_a_waiting_sync_push(tmp_path: Path):
    manifest = make_manifest(rule=ADD, consistency="sync")
    with (
        server_processes(tmp_path, 1, num_workers=2) as servers,
        client_of(servers, num_workers=2) as client,
        client_of(servers, num_workers=2) as other,
    ):
        client.seed(manifest, filled(manifest))

        def kill() -> None:
            wait_until(lambda: other.stats()[0].missing == (1,), "the push to wait")
            servers[0].send(signal.SIGKILL)

        pushed, _ = run_all(partial(client.push, filled(manifest, 1.0), hyper=HYPER, rows=1), kill)
        assert isinstance(pushed, ServerGone)
        assert "ps:0 at 127.0.0.1" in str(pushed)


@pytest.mark.fault("F11")
def test_a_frozen_server_is_found_by_the_deadline(tmp_path: Path):
    manifest = make_manifest(rule=ADD)
    with (
        server_processes(tmp_path, 1, num_workers=2) as servers,
        client_of(servers, num_workers=2) as patient,
        client_of(servers, 1, num_workers=2, timeout_s=1.5) as client,
    ):
        patient.seed(manifest, filled(manifest))
        client.attach(timeout_s=WAIT_S)
        servers[0].send(signal.SIGSTOP)
        process = psutil.Process(servers[0].process.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the server to stop")
        with pytest.raises(RequestTimeout, match=r"ps:0 at 127\.0\.0\.1"):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        servers[0].send(signal.SIGCONT)


@pytest.mark.fault("F15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_in_order(tmp_path: Path, number: signal.Signals):
    by_command = number == signal.SIGINT  # it has threads of libraries, which do not block signals
    manifest = make_manifest(consistency="sync")
    with (
        server_processes(tmp_path, 1, num_workers=2, by_command=by_command) as (server,),
        client_of([server], num_workers=2) as client,
    ):
        client.seed(manifest, filled(manifest))
        server.send(number)
        status, errors = server.wait()
        assert (status, errors) == (0, "")


LATE = """
import signal, threading
from ps.cli import serve

with serve._signals_caught() as caught:
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # no other thread can take it
    assert signal.sigpending() == {signal.SIGINT}
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # as a library's thread has it
assert not caught
"""


@pytest.mark.fault("F15")
def test_a_signal_that_no_thread_has_taken_yet_does_not_end_the_process_at_its_end():
    ended = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


STOPS_S = (0.02, 0.1, 0.19, 0.3, 0.6, 1.1)
"""How long a server is suspended: shorter and longer than the time between two looks."""


@pytest.mark.parametrize("name", ["saved", "link/../saved"])
def test_a_relative_directory_is_that_of_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """The servers have another working directory, which a save would leave its files in."""
    manifest = make_manifest(rule=ADD)
    work, below = tmp_path / "work", tmp_path / "disk" / "below"
    work.mkdir()
    below.mkdir(parents=True)
    (work / "link").symlink_to(below)
    monkeypatch.chdir(work)
    with (
        server_processes(tmp_path, 1, num_workers=1) as servers,
        client_of(servers) as client,
    ):
        client.seed(manifest, filled(manifest, 3.0))
        client.save(name, 1)
    assert (work / name / "step-1").is_dir()
    with (
        server_processes(tmp_path, 1, num_workers=1) as servers,
        client_of(servers) as client,
    ):
        assert client.restore(name) == 1


@pytest.mark.fault("F11")
def test_a_suspended_server_goes_on_with_its_parameters(tmp_path: Path):
    """After any suspension; a signal that came meanwhile ends it in order."""
    manifest = make_manifest(rule=ADD)
    with (
        server_processes(tmp_path, 1, num_workers=1) as (server,),
        client_of([server]) as client,
    ):
        client.seed(manifest, filled(manifest))
        process = psutil.Process(server.process.pid)
        for number, stop_s in enumerate(STOPS_S * 2, start=1):
            server.send(signal.SIGSTOP)
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the server to stop")
            threading.Event().wait(stop_s)
            server.send(signal.SIGCONT)
            pushed = client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
            assert (pushed.clock, server.process.poll()) == (number, None)
        server.send(signal.SIGSTOP)
        server.send(signal.SIGTERM)
        server.send(signal.SIGCONT)
        assert server.wait() == (0, "")


def test_a_stop_request_ends_the_process(tmp_path: Path):
    with server_processes(tmp_path, 1, num_workers=1) as servers:
        endpoint = servers[0].endpoint
        with PSClient(
            [endpoint], CREDENTIALS, Identity(Role.DRIVER, 0), num_workers=1, timeout_s=10
        ) as driver:
            driver.stop_servers("done")
        assert servers[0].wait() == (0, "")


WORKER = """
import sys
import numpy as np
from ps.client.client import PSClient
from ps.manifest.manifest import Hyper
from rpc.endpoint import Endpoint
from rpc.auth.handshake import Credentials, Identity, Role

host, port, generation = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
credentials = Credentials("processes", sys.stdin.readline().strip().encode())
identity = Identity(Role.WORKER, 0, generation)
client = PSClient([Endpoint(host, port)], credentials, identity, num_workers=1)
client.attach()
ones = {"trainable": np.ones(200_000, np.float32)}
for number in range(1, 100_000):
    client.push(ones, hyper=Hyper(0.1), rows=1)
    print(number, flush=True)
"""


@pytest.mark.fault("F01")
def test_a_killed_worker_loses_and_doubles_no_acknowledged_push(tmp_path: Path):
    """Killed at arbitrary points: each bucket has the acknowledged pushes, or one more."""
    manifest = make_manifest(200_000, rule=ADD, bucket_bytes=8192)
    with (
        server_processes(tmp_path, 1, num_workers=1) as servers,
        client_of(servers, rank=0) as watcher,
    ):
        watcher.seed(manifest, filled(manifest))
        before = filled(manifest)
        for attempt in range(4):
            acknowledged = _run_worker_and_kill(servers[0], attempt, after=5 + attempt)
            # What the dead worker had sent is still applied; the watcher's connection is the other.
            wait_until(lambda: watcher.stats()[0].connections == 1, "the dead worker's end")
            after = filled(manifest)
            watcher.pull(after)
            applied = after["trainable"] - before["trainable"]
            assert applied.min() >= acknowledged
            assert applied.max() <= acknowledged + 1
            before = after


def _run_worker_and_kill(server: ServerProcess, generation: int, after: int) -> int:
    endpoint = server.endpoint
    arguments = [endpoint.host, str(endpoint.port), str(generation)]
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(SECRET.decode() + "\n")
        worker.stdin.flush()
        for _ in range(after):
            assert worker.stdout.readline(), "the worker ended by itself"
        worker.kill()
        left = [line for line in worker.stdout.read().split("\n") if line]
    return after + len(left)


@pytest.mark.attack("A02")
@pytest.mark.attack("A27")
@pytest.mark.parametrize(
    "credentials",
    [Credentials("processes", b"x" * 32), Credentials("another", SECRET)],
    ids=["secret", "cluster"],
)
def test_a_wrong_secret_or_cluster_is_refused_at_once(tmp_path: Path, credentials: Credentials):
    with server_processes(tmp_path, 1, num_workers=1) as servers:
        endpoints = [servers[0].endpoint]
        identity = Identity(Role.WORKER, 0)
        with (
            PSClient(endpoints, credentials, identity, num_workers=1) as client,
            pytest.raises(AuthError, match=credentials.cluster_id[:4]),
        ):
            client.describe()


@pytest.mark.attack("A16")
def test_a_secret_file_that_others_may_read_is_refused(tmp_path: Path):
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(AssertionError, match="mode 0644: others may read the secret; chmod 0600"):
        ServerProcess(tmp_path, "--num-workers", "1")


def test_a_short_secret_is_refused(tmp_path: Path):
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(AssertionError, match="has 5 bytes, it needs 16"):
        ServerProcess(tmp_path, "--num-workers", "1")


def test_a_rank_outside_the_servers_is_refused(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"rank must be an int in 0\.\.1"):
        ServerProcess(tmp_path, "--num-workers", "1", "--rank", "2", "--num-servers", "2")


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    shown = capsys.readouterr().out
    for option in ("--secret-file", "--cluster-id", "--num-workers", "--on-lost", "--port"):
        assert option in shown
