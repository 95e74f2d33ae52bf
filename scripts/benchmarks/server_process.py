"""A parameter server in its own process, started by hand as its documentation says."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ps.client import PSClient
from rpc.address import Endpoint
from rpc.handshake import Credentials, Identity, Role

STOP_TIMEOUT_S = 10.0


@contextlib.contextmanager
def served(*, unix: bool = False) -> Iterator[PSClient]:
    """Start `python -m ps.server` on loopback and yield a client; both end with the block.

    Args:
        unix: offer the Unix socket too, as on the nodes of a cluster; else TCP alone.
    """
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory:
        credentials = Credentials.generate()
        secret = Path(directory) / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(credentials.secret.hex().encode())
        credentials = Credentials(credentials.cluster_id, secret.read_bytes())
        flags = ["--num-workers", "1", "--cluster-id", credentials.cluster_id]
        flags += ["--unix"] if unix else []
        server = subprocess.Popen(
            [sys.executable, "-m", "ps.server", "--secret-file", str(secret), *flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            told = json.loads(server.stdout.readline() if server.stdout else "")
            endpoint = Endpoint(told["host"], told["port"], told["unix_path"], told["boot_id"])
            client = PSClient([endpoint], credentials, Identity(Role.WORKER, 0), num_workers=1)
            with contextlib.closing(client):
                yield client
        finally:
            server.terminate()
            server.wait(timeout=STOP_TIMEOUT_S)
            if server.stdout is not None:
                server.stdout.close()
