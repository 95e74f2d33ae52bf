"""Calls with a deadline, and content that can be written twice."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from feeding.errors import FileChanged, MissingPackage, PathError
from feeding.filesystem.bounded_calls import BoundedCalls, CallTimeout
from feeding.filesystem.registry import filesystem_for
from feeding.filesystem.temp_files import PIECE_BYTES, collected, pieces_of, staging_name


def test_a_call_returns_or_raises_what_it_does():
    calls = BoundedCalls()
    assert calls.run(lambda: 3, 10) == 3
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0, 10)


def test_a_call_that_blocks_is_given_up_and_its_thread_is_not_in_the_way():
    calls, gate = BoundedCalls(2), threading.Event()
    with pytest.raises(CallTimeout, match="no answer within"):
        calls.run(lambda: gate.wait(30), 0.01)
    assert calls.run(lambda: "still works", 10) == "still works"
    with pytest.raises(CallTimeout, match="no answer within"):
        calls.run(lambda: gate.wait(30), 0.01)
    with pytest.raises(CallTimeout, match="2 earlier calls are still not answered"):
        calls.run(lambda: 3, 0.01)
    gate.set()
    assert calls.run(lambda: 3, 10) == 3


def test_a_thread_that_cannot_start_takes_no_slot(monkeypatch):
    def start(_thread):
        raise RuntimeError("can't start new thread")

    calls = BoundedCalls(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            calls.run(lambda: 3, 0.01)
    assert calls.run(lambda: 3, 10) == 3


@pytest.mark.parametrize("sent", [b"", b"234", b"0123456789"])
def test_a_server_that_sends_other_bytes_than_those_asked_for_is_refused(monkeypatch, sent):
    memory = pytest.importorskip("fsspec.implementations.memory")
    path = "memory://ranges/file"
    files = filesystem_for(path)
    files.write(path, b"0123456789")
    with files.open(path) as file:
        assert file.read_range(2, 4) == b"2345"
        monkeypatch.setattr(memory.MemoryFileSystem, "cat_file", lambda *_, **__: sent)
        with pytest.raises(FileChanged, match=f"{len(sent)} bytes came at 2 instead of 4"):
            file.read_range(2, 4)
    files.delete("memory://ranges", recursive=True)


def test_an_error_of_a_packages_own_kind_is_an_oserror_with_the_path(monkeypatch):
    class HttpError(Exception):
        """As gcsfs calls it."""

    def fail(*_, **__):
        raise HttpError("500")

    def pieces():
        raise HttpError("of the content")

    memory = pytest.importorskip("fsspec.implementations.memory")
    path = "memory://errors/file"
    files = filesystem_for(path)
    files.write(path, b"0123456789")
    with pytest.raises(HttpError, match="of the content"):
        files.write(path, pieces)
    with files.open(path) as file:
        monkeypatch.setattr(memory.MemoryFileSystem, "cat_file", fail)
        with pytest.raises(OSError, match=r"cannot read: 500: 'memory://errors/file'"):
            file.read_range(2, 4)
    with monkeypatch.context() as patch:
        patch.setattr(memory.MemoryFileSystem, "info", fail)
        with pytest.raises(OSError, match=r"cannot look at: 500: 'memory://errors/file'"):
            files.status(path)
    files.delete("memory://errors", recursive=True)


def test_a_call_may_be_waited_for_again():
    gate = threading.Event()
    pending = BoundedCalls().start(lambda: gate.wait(30), 10)
    with pytest.raises(CallTimeout):
        pending.result(0.01)
    gate.set()
    assert pending.result(10) is True


def test_what_a_failed_call_worked_with_is_dropped_by_its_own_thread():
    class Native:
        """Stands for a writer whose destructor blocks."""

    dropped = threading.Event()
    dropped_by: list[int] = []

    def drop() -> None:
        dropped_by.append(threading.get_ident())
        dropped.set()

    def work() -> None:
        native = Native()
        weakref.finalize(native, drop)
        try:
            raise KeyError("first")
        except KeyError:
            raise OSError("broken pipeline")  # noqa: B904 - the context is what may hold it too

    pending = BoundedCalls().start(work, 10)
    with pytest.raises(OSError, match="broken pipeline") as failed:
        pending.result(10)
    assert failed.value.__context__ is None
    assert dropped.wait(10)
    assert threading.get_ident() not in dropped_by


def test_a_panic_of_native_code_is_an_exception():
    class PanicException(BaseException):
        """As pyo3 calls it."""

    def work() -> None:
        raise PanicException("past the end")

    with pytest.raises(RuntimeError, match="PanicException: past the end"):
        BoundedCalls().run(work, 10)


@pytest.mark.parametrize("content", [b"", b"abc", bytearray(b"abc"), memoryview(b"abc")])
def test_pieces_of_bytes(content):
    pieces = pieces_of(content)
    assert b"".join(pieces()) == b"".join(pieces()) == bytes(content)


def test_large_content_is_cut():
    data = np.zeros(PIECE_BYTES // 8 + 1, np.float64)
    assert [len(piece) for piece in pieces_of(data.data)()] == [PIECE_BYTES, 8]


def test_a_write_that_was_given_up_may_read_on_but_not_begin_after_the_file_is_closed():
    kept = []

    def publish(pieces):
        first, second, third = pieces(), pieces(), pieces()
        kept.extend([first, b"".join(second), third, next(first)])

    with collected(publish) as file:
        file.write(b"a" * (PIECE_BYTES + 1))
    begun, whole, late, piece = kept
    assert whole == piece + b"".join(begun) == b"a" * (PIECE_BYTES + 1)
    with pytest.raises(ValueError, match="closed file"):
        next(late)


@pytest.mark.parametrize("num_bytes", [1, 1 << 20])
def test_a_full_directory_of_temporary_files_is_named(monkeypatch, num_bytes):
    """By the file itself: a Spark task that writes holds it open outside of a `with` block."""
    full = Path("/dev/full").open("r+b", buffering=0)  # noqa: SIM115 - collected closes it
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
    held = collected(lambda _: None)
    file = held.__enter__()

    def write() -> None:
        file.write(b"x" * num_bytes)
        file.flush()

    with pytest.raises(OSError, match="set TMPDIR elsewhere") as raised:
        write()
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == tempfile.gettempdir()
    with contextlib.suppress(OSError):  # the rest is flushed again
        held.__exit__(None, None, None)
    assert full.closed


def test_a_full_place_elsewhere_is_not_taken_for_the_temporary_files():
    full = OSError(errno.ENOSPC, "no space is left")
    with pytest.raises(OSError, match="no space") as raised, collected(lambda _: None):
        raise full
    assert raised.value is full


def test_hidden_names_fit_into_a_directory():
    for name in ["x", "x" * 255, "\u00e9" * 127, os.fsdecode(b"\xff" * 200)]:
        staged = staging_name(name)
        assert staged.startswith(".")
        assert len(os.fsencode(staged)) <= 255
        assert staged != staging_name(name)


def test_an_unknown_scheme_is_named():
    with pytest.raises(PathError, match="no file system is known for nosuch://x/y"):
        filesystem_for("nosuch://x/y")


@pytest.mark.parametrize(("path", "package"), [("hdfs://nn:1/x", "hdfs-native"), ("s3://b/x", "s")])
def test_a_missing_package_is_named(monkeypatch, path, package):
    for module in ("hdfs_native", "s3fs"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackage, match=package):
        filesystem_for(path).status(path)
