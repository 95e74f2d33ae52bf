"""Kernels kept on a disk that several processes write at once, that is full, or that was damaged.

A new dispatcher of the same function stands for a new process: it knows nothing but the files.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba import types
from numba.core import caching

from feeding.formats import kernel_cache
from rpc.jit.cache_directory import CACHE_VARIABLE
from rpc.jit.kernel_cache import KernelCache

pytestmark = pytest.mark.slow

FLOAT32 = (types.Array(types.float32, 1, "C"),)
FLOAT64 = (types.Array(types.float64, 1, "C"),)


def double(values: np.ndarray) -> None:
    values[0] *= 2


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package beside which nothing can be kept; the directory is set."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__pycache__").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return package


@pytest.fixture
def directory(room: Path) -> Path:
    return KernelCache(room, ()).directory.path()


def start(room: Path, *signatures: Any) -> Any:
    """What a process does before it serves; returns its kernel."""
    dispatcher = numba.njit(nogil=True)(double)
    cache = KernelCache(room, ())
    for signature in signatures:
        assert cache.load(dispatcher, signature)
    return dispatcher


def check(kernel: Any, *dtypes: type) -> None:
    for dtype in dtypes:
        values: np.ndarray = np.ones(1, dtype)
        kernel(values)
        assert values[0] == 2


def compilations(dispatcher: Any) -> int:
    return sum(dispatcher.stats.cache_misses.values())


def test_what_is_in_the_cache_is_not_compiled_again(room: Path):
    assert compilations(start(room, FLOAT32, FLOAT64)) == 2
    again = start(room, FLOAT64, FLOAT32)
    check(again, np.float32, np.float64)
    assert compilations(again) == 0


@pytest.mark.parametrize("kind", ["sources", "zip of sources", "bytecode", "zip of bytecode"])
def test_kernels_of_other_code_are_others_whatever_the_package_is_in(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    digests = set()
    for code in (b"one", b"one", b"two"):
        room = tmp_path / "package"
        (room / "optim").mkdir(parents=True)
        suffix = ".pyc" if "bytecode" in kind else ".py"
        (room / "optim" / f"rules{suffix}").write_bytes(code)
        if "zip" in kind:
            shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path, "package")
            shutil.rmtree(room)
            room = tmp_path / "packed.zip" / "package"
        cache = KernelCache(room, ("optim/rules.py",))
        digests.add(cache.digest)
        is_beside = cache.directory.path().parent == room / "__pycache__"
        assert is_beside is ("zip" not in kind)
        shutil.rmtree(tmp_path / "package", ignore_errors=True)
    assert len(digests) == 2


def test_processes_that_save_at_once_do_not_take_each_others_kernels(
    room: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    files = caching.IndexDataCacheFile
    save_data, waiting = files._save_data, []
    with monkeypatch.context() as both:
        both.setattr(files, "_load_index", lambda _: {})  # before the other one has saved
        both.setattr(files, "_save_data", lambda *arguments: waiting.append(arguments))
        start(room, FLOAT32)
        start(room, FLOAT64)
    for arguments in reversed(waiting):
        save_data(*arguments)
    check(start(room, FLOAT32, FLOAT64), np.float32, np.float64)


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", [lambda _: b"", lambda data: data[: len(data) // 2]])
def test_a_damaged_file_is_replaced(
    room: Path,
    directory: Path,
    suffix: str,
    damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
):
    start(room, FLOAT32)
    (path,) = directory.glob(f"*{suffix}")
    path.write_bytes(damage(path.read_bytes()))
    check(start(room, FLOAT32), np.float32)
    assert f"{directory}" in caplog.text
    assert compilations(start(room, FLOAT32)) == 0


def test_a_full_disk_costs_the_cache_not_the_server(
    room: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(caching.IndexDataCacheFile, "_save_data", full)
        check(start(room, FLOAT32), np.float32)
    assert "No space left on device" in caplog.text
    check(start(room, FLOAT32), np.float32)
    assert compilations(start(room, FLOAT32)) == 0


class Canary:
    """Code that planted files would run: it makes a directory."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def plant(directory: Path) -> Path:
    """Write the canary into the cache's files; returns what it would make."""
    canary = Canary(directory.parent / "canary")
    for path in directory.iterdir():
        path.write_bytes(pickle.dumps(numba.__version__) + pickle.dumps(canary))
    return canary.made


@pytest.mark.attack("A16")
@pytest.mark.parametrize("at", ["directory", "parent", "its parent"])
def test_what_others_may_have_written_since_is_never_loaded(room: Path, at: str):
    """Each load looks again: the owner of a parent could have swapped it after the first look."""
    start(room, FLOAT32)
    cache = KernelCache(room, ())
    directory = cache.directory.path()
    places = {"directory": directory, "parent": directory.parent, "its parent": room.parent}
    made = plant(directory)
    places[at].chmod(0o777)
    dispatcher = numba.njit(nogil=True)(double)
    assert cache.load(dispatcher, FLOAT32)
    check(dispatcher, np.float32)
    assert compilations(dispatcher) == 1
    assert not made.exists()


def test_the_canary_would_run(room: Path, directory: Path):
    start(room, FLOAT32)
    made = plant(directory)
    start(room, FLOAT32)
    assert made.exists()


def test_a_kernel_that_is_compiled_at_its_first_call_is_kept_too(room: Path):
    for expected in (1, 0):
        dispatcher = KernelCache(room, ()).keep(numba.njit(nogil=True)(double))
        check(dispatcher, np.float32)
        assert compilations(dispatcher) == expected


@pytest.mark.parametrize("has_home", [True, False])
def test_without_a_home_or_a_writable_place_kernels_work(
    room: Path, has_home: bool, monkeypatch: pytest.MonkeyPatch
):
    """As in a container of YARN: no home or none to write to, the package read-only."""

    def home() -> Path:
        if has_home:
            return room / "__pycache__"  # a file
        raise RuntimeError("Could not determine home directory.")

    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    cache = KernelCache(room, ())
    check(cache.keep(numba.njit(nogil=True)(double)), np.float32)
    assert cache.directory.path().parent == Path(tempfile.gettempdir())


def test_the_environment_cannot_choose_another_directory_of_numba(
    room: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "UserWideCacheLocator")
    start(room, FLOAT32)
    assert list(directory.glob("*.nbi"))


def test_every_file_of_feeding_with_kernels_is_in_the_digest():
    feeding = Path(kernel_cache.__file__).parents[1]
    found = {
        str(path.relative_to(feeding))
        for path in feeding.rglob("*.py")
        if "import numba" in path.read_text() or "kernel_cache import kernel" in path.read_text()
    }
    assert found == set(kernel_cache.SOURCES)
