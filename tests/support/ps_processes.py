"""Parameter servers as processes of their own: forked from a warm one, or by their command line."""

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
from tests.support.forked_servers import ForkedServer

SECRET = b"0123456789abcdef0123456789abcdef"
CLUSTER_ID = "processes"
CREDENTIALS = Credentials(CLUSTER_ID, SECRET)
START_S = 60.0
"""Compiling all kernels with a cold cache on a busy machine included."""


class ServerProcess:
    """One `python -m ps.server`; without `wait` it may not listen yet.

    It is forked from a process that has loaded the kernels. With `by_command` it starts as a user
    starts it, which takes two seconds of processor time.
    """

    process: subprocess.Popen[str] | ForkedServer

    def __init__(
        self, directory: Path, *arguments: str, wait: bool = True, by_command: bool = False
    ) -> None:
        secret = directory / "secret"
        if not secret.exists():
            secret.touch(mode=0o600)
            secret.write_bytes(SECRET)
        given = ["--secret-file", str(secret), "--cluster-id", CLUSTER_ID, *arguments]
        if by_command:
            command = [sys.executable, "-m", "ps.server", *given]
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        else:
            self.process = ForkedServer(given)
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
        assert self.process.returncode is not None
        return self.process.returncode, errors

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.communicate(timeout=15.0)


@contextlib.contextmanager
def server_processes(
    directory: Path,
    count: int,
    *,
    num_workers: int,
    arguments: tuple[str, ...] = (),
    by_command: bool = False,
) -> Iterator[list[ServerProcess]]:
    """Start `count` servers of one cluster; whatever is left of them is killed at the end."""
    started: list[ServerProcess] = []
    try:
        for rank in range(count):
            place = ("--rank", str(rank), "--num-servers", str(count))
            size = ("--num-workers", str(num_workers))
            started.append(
                ServerProcess(
                    directory, *place, *size, *arguments, wait=False, by_command=by_command
                )
            )
        for server in started:
            assert server.announced
        yield started
    finally:
        for server in started:
            server.close()
