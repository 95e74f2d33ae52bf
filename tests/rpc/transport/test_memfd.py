"""What must be true of another process's memory before this one maps it."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator

import pytest

from rpc.errors import ProtocolError
from rpc.limits import Limits
from rpc.transport import memfd
from rpc.transport.memfd import SharedMemory, cannot_share

SIZE = 8192
pytestmark = pytest.mark.skipif(bool(cannot_share()), reason=cannot_share())


@pytest.fixture
def made() -> Iterator[tuple[SharedMemory, int]]:
    ours, descriptor = SharedMemory.make("test", SIZE)
    yield ours, descriptor
    ours.close()
    os.close(descriptor)


def test_one_writes_and_the_other_reads(made):
    ours, descriptor = made
    theirs = SharedMemory.take(descriptor, SIZE)
    ours.bytes[7] = 42
    assert theirs.bytes[7] == 42
    assert theirs.bytes.readonly
    theirs.close()
    theirs.close()


@pytest.mark.attack("A33")
def test_nobody_else_reads_or_finds_it(made):
    _, descriptor = made
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    assert os.fstat(descriptor).st_nlink == 0


@pytest.mark.parametrize(
    "attempt",
    [
        lambda descriptor: mmap.mmap(descriptor, SIZE),
        lambda descriptor: os.write(descriptor, b"x"),
        lambda descriptor: os.ftruncate(descriptor, 0),
        lambda descriptor: os.ftruncate(descriptor, 2 * SIZE),
        lambda descriptor: os.posix_fallocate(descriptor, 0, 2 * SIZE),
        lambda descriptor: fcntl.fcntl(descriptor, 1033, 0x08),
        lambda descriptor: mmap.mmap(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR), SIZE),
    ],
    ids=["map", "write", "cut", "grow", "allocate", "seal", "reopen"],
)
def test_the_other_side_can_change_nothing(made, attempt):
    with pytest.raises(PermissionError):
        attempt(made[1])


def memory(seals: int, size: int = SIZE) -> int:
    descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, 1033, seals)
    return descriptor


def pipe_end() -> int:
    ours, theirs = os.pipe()
    os.close(ours)
    return theirs


def plain_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


@pytest.mark.parametrize(
    "give",
    [
        lambda: memory(memfd._SEALS, SIZE - 1),
        lambda: memory(memfd._SEALS, 0),
        lambda: memory(memfd._SEALS, 2 * SIZE),
        lambda: memory(0),
        *(lambda seal=1 << bit: memory(memfd._SEALS & ~seal & ~1) for bit in (1, 2, 4)),
        pipe_end,
        plain_file,
        lambda: os.open("/dev/zero", os.O_RDWR),
        lambda: os.open("/", os.O_RDONLY),
    ],
)
def test_memory_that_its_maker_could_take_away_is_refused(give: Callable[[], int]):
    descriptor = give()
    try:
        with pytest.raises(ProtocolError):
            SharedMemory.take(descriptor, SIZE)
    finally:
        os.close(descriptor)


def test_other_processors_are_told_why_not(monkeypatch):
    monkeypatch.setattr("rpc.transport.memfd.platform.machine", lambda: "aarch64")
    assert "aarch64 may reorder" in cannot_share()


@pytest.mark.parametrize("ring_bytes", [1, 4095, (1 << 30) + 1])
def test_a_ring_that_no_peer_accepts_is_refused(ring_bytes: int):
    with pytest.raises(ValueError, match=rf"0 or 4096\.\.1073741824, got {ring_bytes}"):
        Limits(shared_ring_bytes=ring_bytes)
