"""Parameter servers as processes of their own, started by their command line."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rpc.auth.handshake import Credentials
from rpc.endpoint import Endpoint

SECRET = b"0123456789abcdef0123456789abcdef"
CLUSTER_ID = "processes"
CREDENTIALS = Credentials(CLUSTER_ID, SECRET)
START_S = 60.0
"""Compiling all kernels with a cold cache on a busy machine included."""


class ServerProcess:
    """One `python -m ps.server`; without `wait` it may not listen yet."""

    def __init__(self, directory: Path, *arguments: str, wait: bool = True) -> None:
        secret = directory / "secret"
        if not secret.exists():
            secret.touch(mode=0o600)
            secret.write_bytes(SECRET)
        command = [sys.executable, "-m", "ps.server", "--secret-file", str(secret)]
        command += ["--cluster-id", CLUSTER_ID, *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if wait:
            assert self.announced

    @functools.cached_property
    def announced(self) -> dict[str, Any]:
        """What it says once it listens."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate(timeout=START_S)
            raise AssertionError(f"no endpoint: {errors}")
        announced: dict[str, Any] = json.loads(line)
        return announced

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.announced["host"], self.announced["port"])

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = 15.0) -> tuple[int, str]:
        """Wait for its end; returns the exit status and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.communicate(timeout=15.0)


@contextlib.contextmanager
def server_processes(
    directory: Path, count: int, *, num_workers: int, arguments: tuple[str, ...] = ()
) -> Iterator[list[ServerProcess]]:
    """Start `count` servers of one cluster; whatever is left of them is killed at the end."""
    started: list[ServerProcess] = []
    try:
        for rank in range(count):
            place = ("--rank", str(rank), "--num-servers", str(count))
            size = ("--num-workers", str(num_workers))
            started.append(ServerProcess(directory, *place, *size, *arguments, wait=False))
        for server in started:
            assert server.announced
        yield started
    finally:
        for server in started:
            server.close()
