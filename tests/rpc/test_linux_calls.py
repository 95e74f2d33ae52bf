"""Linux' calls for files in memory and processes, by Python and where Python has none of them."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rpc import linux_calls
from rpc.transport.memfd import SharedMemory


@pytest.fixture(params=["of Python", "by number"], autouse=True)
def calls(request, monkeypatch) -> None:
    if request.param == "by number":  # as uv's and conda's Pythons
        for module, name in (
            (os, "memfd_create"),
            (os, "pidfd_open"),
            (signal, "pidfd_send_signal"),
        ):
            monkeypatch.delattr(module, name)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with started:
        yield started
        started.kill()


def is_close_on_exec(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)


def test_a_file_in_memory_is_new_named_and_not_inherited():
    descriptor = linux_calls.memfd_create("für tfos")
    try:
        os.write(descriptor, b"x" * 10)
        assert os.fstat(descriptor).st_size == 10
        assert "für tfos" in os.readlink(f"/proc/self/fd/{descriptor}")
        assert is_close_on_exec(descriptor)
        with pytest.raises(OSError, match="not permitted"):
            fcntl.fcntl(descriptor, 1033, 0x02)  # no seals were asked for
    finally:
        os.close(descriptor)


def test_shared_memory_is_sealed():
    segment, descriptor = SharedMemory.make("tfos", 4096)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptor, 0)
    theirs = SharedMemory.take(descriptor, 4096)
    segment.bytes[0] = 7
    assert theirs.bytes[0] == 7
    for each in (theirs, segment):
        each.close()
    os.close(descriptor)


def test_a_process_shows_its_end(process):
    pidfd = linux_calls.pidfd_open(process.pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert is_close_on_exec(pidfd)
    assert poll.poll(0) == []
    linux_calls.pidfd_send_signal(pidfd, signal.SIGTERM)
    assert poll.poll(10_000)
    result = os.waitid(linux_calls.P_PIDFD, pidfd, os.WEXITED)
    assert result is not None
    assert (result.si_pid, result.si_status) == (process.pid, signal.SIGTERM)
    with pytest.raises(ProcessLookupError):
        linux_calls.pidfd_send_signal(pidfd, signal.SIGTERM)
    with pytest.raises(ProcessLookupError):
        linux_calls.pidfd_open(process.pid)
    os.close(pidfd)


def test_other_errors_are_linuxs_own():
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        linux_calls.pidfd_send_signal(-1, signal.SIGTERM)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(OSError, match="Invalid argument") as caught:
        linux_calls.memfd_create("x" * 300)
    assert caught.value.errno == errno.EINVAL


def test_a_processor_without_a_known_number_is_named(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    if hasattr(os, "memfd_create"):
        os.close(linux_calls.memfd_create("x"))
        return
    with pytest.raises(OSError, match="no memfd_create \\(riscv64\\): use another one"):
        linux_calls.memfd_create("x")
