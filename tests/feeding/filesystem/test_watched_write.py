"""Writes to a store: as long as they make progress, and what is left of one that is given up."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from feeding.errors import StorageUnavailable
from feeding.filesystem import fsspec_files
from feeding.filesystem.bounded_calls import BoundedCall, BoundedCalls, CallTimeout
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.fsspec_files import FsspecFileSystem
from feeding.filesystem.location import parse
from feeding.filesystem.temp_files import PIECE_BYTES
from feeding.filesystem.watched_write import WatchedWrite
from tests.support.waiting import WAIT_S, wait_until

ROOT = "memory://watched"


class OnePieceATime(BoundedCalls):
    """A call that is waited for writes one piece, and has not ended when the wait is over."""

    def __init__(self, num_pieces: int) -> None:
        super().__init__()
        self._num_pieces = self._left = num_pieces
        self.wanted, self.written = threading.Semaphore(0), threading.Semaphore(0)

    def pieces(self) -> Iterator[bytes]:
        for number in range(self._num_pieces):
            assert self.wanted.acquire(timeout=WAIT_S)
            yield b"%d" % number
            self.written.release()

    def start(self, work: Callable[[], Any], timeout_s: float) -> BoundedCall[Any]:
        call = super().start(work, timeout_s)
        whole = call.result

        def result(timeout_s: float) -> Any:
            if not self._left:
                return whole(WAIT_S)
            self._left -= 1
            self.wanted.release()
            assert self.written.acquire(timeout=WAIT_S)
            raise CallTimeout(f"no answer within {timeout_s:g} s")

        call.result = result  # type: ignore[method-assign]
        return call


@pytest.fixture
def memory():
    yield fsspec.filesystem("memory")
    fsspec.filesystem("memory").store.clear()


def test_a_write_has_its_patience_for_each_piece_not_for_all(memory):
    calls = OnePieceATime(5)
    with contextlib.suppress(CallTimeout):
        WatchedWrite(memory, "/watched/file", calls.pieces, contextlib.nullcontext()).done(
            calls, 150
        )
    assert memory.cat_file("/watched/file") == b"01234"


def test_a_large_piece_is_written_in_parts(memory, monkeypatch):
    sizes: list[int] = []
    write = WatchedWrite(
        memory, "/watched/file", lambda: [bytes(2 * PIECE_BYTES + 1)], contextlib.nullcontext()
    )
    file = memory.open("/watched/other", "wb")
    file.write = lambda data: sizes.append(len(data))
    monkeypatch.setattr(memory, "open", lambda *_: file)
    write.done(BoundedCalls(), WAIT_S)
    assert sizes == [PIECE_BYTES, PIECE_BYTES, 1]


class AtClose(io.BytesIO):
    """A file that a store has once it is closed, as object stores do."""

    def __init__(self, memory: MemoryFileSystem, path: str) -> None:
        super().__init__()
        self._at = (memory, path)

    def close(self) -> None:
        if not self.closed:
            memory, path = self._at
            memory.store[path] = MemoryFile(memory, path, self.getvalue())
        super().close()


def test_a_write_that_is_given_up_makes_no_more_content_and_leaves_no_file(memory, monkeypatch):
    monkeypatch.setattr(memory, "open", lambda path, _: AtClose(memory, path))
    gate, made = threading.Event(), []

    def pieces() -> Iterator[bytes]:
        for number in range(3):
            made.append(number)
            if number:
                assert gate.wait(WAIT_S)
            yield b"x"

    files = FsspecFileSystem(parse(ROOT), FileSystemConfig(patience_s=0.05))
    before = threading.active_count()
    with pytest.raises(StorageUnavailable, match=r"no answer within 0.05 s, behind [01] bytes"):
        files.write(f"{ROOT}/file", pieces)
    gate.set()
    wait_until(lambda: threading.active_count() <= before, "the end of the thread")
    assert 2 not in made
    assert list(memory.store) == []


@pytest.mark.parametrize("what", ["rename", "delete"])
def test_what_a_store_does_file_by_file_has_time_in_proportion(memory, what, monkeypatch):
    files = FsspecFileSystem(parse(ROOT), FileSystemConfig(patience_s=10))
    allowed: list[float] = []
    calls = fsspec_files._CALLS
    run = calls.run

    def noted(work: Callable[[], Any], timeout_s: float) -> Any:
        allowed.append(timeout_s)
        return run(work, timeout_s)

    monkeypatch.setattr(calls, "run", noted)
    monkeypatch.setattr("feeding.filesystem.fsspec_files._COPIED_BYTES", 100)
    monkeypatch.setattr("feeding.filesystem.fsspec_files._FILES_PER_PATIENCE", 2)
    for name in ("d/a", "d/b/c"):
        files.write(f"{ROOT}/{name}", bytes(50))
    allowed.clear()
    if what == "rename":
        files.rename(f"{ROOT}/d", f"{ROOT}/e")
    else:
        files.delete(f"{ROOT}/d", recursive=True)
    # 10 s and, for each 2 files, 10 s; to copy 100 bytes 10 s more.
    assert allowed[-1] == (30 if what == "rename" else 20)
    assert set(allowed[:-1]) == {10}
