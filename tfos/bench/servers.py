"""Parameter servers for a benchmark: processes of their own, or those that the user has started.

Covers: starting `python -m ps.server` as its documentation says, clients of both kinds.
Does not: measure.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ps.client.client import PSClient
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint
from tfos.bench.harness import Bench
from tfos.bench.reference.child_line import child_line
from tfos.control.authority import ClusterAuthority

Protection = Literal["header", "payload", "tls"]
"""Protection of what travels over TCP: the two settings of `integrity`, or `security="tls"`."""
ANSWER_TIMEOUT_S = 120.0
"""Seconds until a server listens; its imports take seconds."""
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class BenchServers:
    """Servers of one cluster that run on this host."""

    endpoints: tuple[Endpoint, ...]
    credentials: Credentials
    pids: tuple[int, ...]
    num_workers: int

    def client(self, rank: int = 0, role: Role = Role.WORKER) -> PSClient:
        """Return a new client: a worker of this rank, or the driver."""
        identity = Identity(role, rank)
        return PSClient(self.endpoints, self.credentials, identity, num_workers=self.num_workers)


@contextlib.contextmanager
def server_group(
    *,
    num_servers: int = 1,
    num_workers: int = 1,
    unix: bool = False,
    protection: Protection = "header",
    arguments: Sequence[str] = (),
) -> Iterator[BenchServers]:
    """Start servers on loopback and yield where they are; they end with the block.

    Args:
        num_servers: processes to start.
        num_workers: number of workers of the cluster.
        unix: offer the Unix socket too, as the nodes of a cluster do, so that client and server
            share memory where they can; else TCP alone.
        protection: protection of what travels over TCP.
        arguments: further ones of every server's command line.
    """
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory:
        credentials = Credentials.generate()
        secret = Path(directory) / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(credentials.secret.hex().encode())
        credentials = Credentials(credentials.cluster_id, secret.read_bytes())
        command = [sys.executable, "-m", "ps.server", "--secret-file", str(secret)]
        command += ["--num-workers", str(num_workers), "--cluster-id", credentials.cluster_id]
        command += ["--unix"] if unix else []
        command += arguments
        if protection == "tls":
            credentials = _over_tls(credentials, Path(directory), command)
        else:
            credentials = replace(credentials, integrity=protection)
            command += ["--integrity", protection]
        with contextlib.ExitStack() as running:
            places = [
                running.enter_context(
                    _process([*command, "--rank", str(rank), "--num-servers", str(num_servers)])
                )
                for rank in range(num_servers)
            ]
            endpoints = tuple(_announced(process) for process in places)
            pids = tuple(process.pid for process in places)
            yield BenchServers(endpoints, credentials, pids, num_workers)


@contextlib.contextmanager
def served(*, unix: bool = False, protection: Protection = "header") -> Iterator[PSClient]:
    """Start a server as `server_group` does and yield its only worker; both end with the block.

    Args:
        unix: connect by the Unix socket.
        protection: the connection's protection.
    """
    with server_group(unix=unix, protection=protection) as group, group.client() as client:
        yield client


@contextlib.contextmanager
def served_for(bench: Bench) -> Iterator[PSClient]:
    """Yield a worker of the servers that the user gave, or of one that is started here."""
    given = bench.given_servers
    if given is None:
        with served() as client:
            yield client
        return
    group = BenchServers(given.endpoints, given.credentials, pids=(), num_workers=1)
    with group.client() as client:
        yield client


def _over_tls(credentials: Credentials, directory: Path, command: list[str]) -> Credentials:
    """Make keys for both sides and tell the server's command line of its own."""
    authority = ClusterAuthority(credentials.cluster_id)
    keys = authority.data_node("server")
    for name in ("cert", "key", "ca"):
        file = directory / f"{name}.pem"
        file.touch(mode=0o600)
        file.write_bytes(getattr(keys, f"{name}_pem"))
        command += [f"--tls-{name}", str(file)]
    return replace(credentials, tls=authority.data_client("worker", "driver"))


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=STOP_TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()


def _announced(process: subprocess.Popen[str]) -> Endpoint:
    line = child_line(process, "a server to listen", ANSWER_TIMEOUT_S)
    at = json.loads(line)
    return Endpoint(at["host"], at["port"], at["unix_path"], at["boot_id"])
