"""Parameter servers as processes that are forked from one that has loaded the kernels.

Covers: starting that process once per test run, and a handle of each server like Popen's.
Does not: the program that forks them (tests.support.programs.server_zygote).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.support.programs.server_zygote"
MAX_REQUEST_BYTES = 1 << 16
NUMBER = struct.Struct("i")


@functools.cache
def _zygote() -> socket.socket:
    """Start the process that servers are forked from; it ends with this one."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(other.fileno())],
            pass_fds=[other.fileno()],
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a process with threads must not fork
        )

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


class ForkedServer:
    """One server process: the part of subprocess.Popen that tests use."""

    def __init__(self, arguments: list[str]) -> None:
        stdout, into_stdout = os.pipe()
        self._result, into_result = os.pipe()
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by communicate
        asked = _zygote()
        given = [into_stdout, self._stderr.fileno(), into_result]
        socket.send_fds(asked, [json.dumps(arguments).encode()], given)
        os.close(into_stdout)
        os.close(into_result)
        (self.pid,) = NUMBER.unpack(asked.recv(NUMBER.size))
        self.stdout = os.fdopen(stdout)
        self.returncode: int | None = None

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """Return the exit status, or None while it runs."""
        if self.returncode is None and select.select([self._result], [], [], timeout_s)[0]:
            (self.returncode,) = NUMBER.unpack(os.read(self._result, NUMBER.size))
            os.close(self._result)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; returns what is left of standard output, and standard error."""
        if self.poll(timeout) is None:
            raise TimeoutError(f"server process {self.pid} did not end within {timeout:g} s")
        if self.stdout.closed:
            return "", ""
        self._stderr.seek(0)
        with self.stdout, self._stderr:
            return self.stdout.read(), self._stderr.read()
