"""Kernels kept on a disk that several processes write at once, that is full, or that was damaged.

A new dispatcher of the same function stands for a new process: it knows nothing but the files.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types
from numba.core import caching

from ps.jit import cache

FLOAT32 = (types.Array(types.float32, 1, "C"),)
FLOAT64 = (types.Array(types.float64, 1, "C"),)


def double(values: np.ndarray) -> None:
    values[0] *= 2


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    cache.directory.cache_clear()
    yield cache.directory()
    cache.directory.cache_clear()


def start(*signatures: Any) -> Any:
    """What a process does before it serves; returns its kernel."""
    dispatcher = cache.kernel(double)
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


def test_what_is_in_the_cache_is_not_compiled_again(directory: Path):
    assert compilations(start(FLOAT32, FLOAT64)) == 2
    again = start(FLOAT64, FLOAT32)
    check(again, np.float32, np.float64)
    assert compilations(again) == 0


def test_processes_that_save_at_once_do_not_take_each_others_kernels(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    files = caching.IndexDataCacheFile
    save_data, waiting = files._save_data, []
    with monkeypatch.context() as both:
        both.setattr(files, "_load_index", lambda _: {})  # before the other one has saved
        both.setattr(files, "_save_data", lambda *arguments: waiting.append(arguments))
        start(FLOAT32)
        start(FLOAT64)
    for arguments in reversed(waiting):
        save_data(*arguments)
    check(start(FLOAT32, FLOAT64), np.float32, np.float64)


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", [lambda _: b"", lambda data: data[: len(data) // 2]])
def test_a_damaged_file_is_replaced(
    directory: Path, suffix: str, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
):
    start(FLOAT32)
    (path,) = directory.glob(f"*{suffix}")
    path.write_bytes(damage(path.read_bytes()))
    check(start(FLOAT32), np.float32)
    assert f"{directory}" in caplog.text
    assert compilations(start(FLOAT32)) == 0


def test_a_full_disk_costs_the_cache_not_the_server(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(caching.IndexDataCacheFile, "_save_data", full)
        check(start(FLOAT32), np.float32)
    assert "No space left on device" in caplog.text
    check(start(FLOAT32), np.float32)
    assert compilations(start(FLOAT32)) == 0
