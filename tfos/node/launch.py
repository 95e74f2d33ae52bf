"""Launch of a supervisor that outlives the node task, and the wait with it.

Covers: the detached process, its bootstrap document, its status pipe.
Does not: find out where it runs (tfos.node.task) or what it does then
(tfos.node.supervisor).
Runs in: the node task, inside a PySpark worker.

Why detached: PySpark stops idle Python workers after a minute, kills a cancelled task's worker and
SIGHUPs its daemon's process group at the end. A child in its own session, adopted by init because
the process between has ended, outlives all three.
"""

from __future__ import annotations

import os
import select
import time
from typing import IO

import msgspec

from tfos.node import bootstrap
from tfos.node.spec import LaunchStatus, State, SupervisorSpec

START_TIMEOUT_S = 60.0
"""Seconds from the start of the process to its first status: imports, TLS and registration."""
_MAX_LAST_OUTPUT = 16 * 1024

_encoder = msgspec.msgpack.Encoder()
_status_decoder = msgspec.json.Decoder(LaunchStatus)


class SupervisorHandle:
    """The node task's view of a supervisor it started: a pipe that ends when the process does.

    Args:
        status: read end of the pipe.
        errors: read end of its standard error.
    """

    def __init__(self, status: IO[bytes], errors: IO[bytes]) -> None:
        self._status = status
        self._errors = errors
        self._pending = b""

    def wait(self, states: frozenset[State], timeout_s: float | None = None) -> LaunchStatus | None:
        """Wait until the supervisor reports one of these states.

        Args:
            states: ends the wait; others are skipped.
            timeout_s: None waits as long as the supervisor lives; it bounds its own life by the
                driver's lease and the executor's JVM.

        Returns:
            The status, or None when the supervisor has ended without reporting one.

        Raises:
            TimeoutError: nothing of interest within `timeout_s`.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while b"\n" in self._pending:
                line, _, self._pending = self._pending.partition(b"\n")
                status = _status_decoder.decode(line)
                if status.state in states:
                    return status
            data = self._read(deadline_s)
            if not data:
                return None
            self._pending += data

    def last_output(self) -> str:
        """Return what the process wrote to stderr before its own log was open."""
        os.set_blocking(self._errors.fileno(), False)
        words = self._errors.read(_MAX_LAST_OUTPUT) or b""
        return words.decode(errors="replace").strip()

    def close(self) -> None:
        """Stop listening; the supervisor goes on."""
        self._status.close()
        self._errors.close()

    def _read(self, deadline_s: float | None) -> bytes:
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if deadline_s is not None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
                raise TimeoutError
        return os.read(self._status.fileno(), 4096)


def launch(spec: SupervisorSpec) -> SupervisorHandle:
    """Start a detached supervisor.

    Args:
        spec: `status_fd` is replaced; `jvm_pidfd` and `value_fd` are inherited as they are.
    """
    status_read, status_write = os.pipe()
    errors_read, errors_write = os.pipe()
    sys_path = bootstrap.without_spark_jar(spec.sys_path)
    spec = msgspec.structs.replace(spec, status_fd=status_write, sys_path=sys_path)
    document = bootstrap.document_fd(
        "tfos.node.supervisor.supervisor",
        _encoder.encode(spec),
        sys_path=sys_path,
        detach=True,
    )
    given = [fd for fd in (spec.jvm_pidfd, spec.value_fd) if fd >= 0]
    try:
        bootstrap.start_detached(
            document,
            f"tfos supervisor of {spec.bundle.name}",
            inherited=[status_write, *given],
            errors=errors_write,
        )
    except BaseException:
        os.close(status_read)
        os.close(errors_read)
        raise
    finally:
        os.close(status_write)
        os.close(errors_write)
    return SupervisorHandle(os.fdopen(status_read, "rb"), os.fdopen(errors_read, "rb"))
