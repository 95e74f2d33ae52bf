"""A parameter server in its own process, started by hand as its documentation says."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ps.client import PSClient
from rpc.address import Endpoint
from rpc.handshake import Credentials, Identity, Role

STOP_TIMEOUT_S = 10.0


@contextlib.contextmanager
def server(
    *, num_workers: int = 1, unix: bool = False, integrity: Literal["header", "payload"] = "header"
) -> Iterator[tuple[Endpoint, Credentials]]:
    """Start `python -m ps.server` on loopback and yield where it is; it ends with the block.

    Args:
        num_workers: of the cluster.
        unix: offer the Unix socket too, as the nodes of a cluster do, so that client and server
            share memory where they can; else TCP alone.
        integrity: what is authenticated on TCP.
    """
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory:
        credentials = Credentials.generate()
        secret = Path(directory) / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(credentials.secret.hex().encode())
        credentials = Credentials(credentials.cluster_id, secret.read_bytes(), integrity)
        flags = ["--num-workers", str(num_workers), "--cluster-id", credentials.cluster_id]
        flags += ["--integrity", integrity, *(["--unix"] if unix else [])]
        process = subprocess.Popen(
            [sys.executable, "-m", "ps.server", "--secret-file", str(secret), *flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            told = json.loads(process.stdout.readline() if process.stdout else "")
            yield (
                Endpoint(told["host"], told["port"], told["unix_path"], told["boot_id"]),
                credentials,
            )
        finally:
            process.terminate()
            process.wait(timeout=STOP_TIMEOUT_S)
            if process.stdout is not None:
                process.stdout.close()


@contextlib.contextmanager
def served(
    *, unix: bool = False, integrity: Literal["header", "payload"] = "header"
) -> Iterator[PSClient]:
    """Start a server as `server` does and yield a client; both end with the block."""
    with server(unix=unix, integrity=integrity) as (endpoint, credentials):
        client = PSClient([endpoint], credentials, Identity(Role.WORKER, 0), num_workers=1)
        with contextlib.closing(client):
            yield client
