"""`python -m ps warm`: where it compiles to, and what it refuses before it compiles."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numba.core.registry import CPUDispatcher

from ps.cli import warm
from ps.cli.main import main
from ps.jit.cache import CACHE
from rpc.jit.cache_directory import CACHE_VARIABLE, CacheDirectory
from rpc.jit.kernel_cache import KernelCache


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was compiled; the cache of this process stays where it is."""
    found: list[str] = []

    def warm_all() -> int:
        found.append("all")
        return 7

    monkeypatch.setenv(CACHE_VARIABLE, "")
    directory = CacheDirectory(tmp_path, "digest")
    monkeypatch.setattr(warm, "CACHE", SimpleNamespace(directory=directory))
    monkeypatch.setattr(warm, "warm_all", warm_all)
    return found


def test_a_directory_is_made_and_filled(tmp_path: Path, compiled: list[str], capsys):
    assert main(["warm", str(tmp_path / "kernels")]) == 0
    where = tmp_path / "kernels" / "kernels-digest"
    assert capsys.readouterr().out.startswith(f"7 kernels in {where} after ")
    assert where.is_dir()
    assert compiled


def test_one_that_cannot_be_used_is_refused_before_minutes_of_compiling(
    tmp_path: Path, compiled: list[str], capsys
):
    (tmp_path / "file").touch()
    assert main(["warm", str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'} cannot be used (owner, mode or disk)" in capsys.readouterr().err
    assert not compiled


@pytest.mark.slow
def test_no_kernel_of_the_room_is_left_out(monkeypatch: pytest.MonkeyPatch):
    warmed: set[str] = set()

    def load(_: KernelCache, dispatcher: Any, _signature: object) -> bool:
        warmed.add(dispatcher.py_func.__name__)
        return False

    monkeypatch.setattr(KernelCache, "load", load)
    warm.warm_all()
    names = [name.removesuffix(".py").replace("/", ".") for name in CACHE._sources]
    found = [each for name in names for each in vars(import_module(f"ps.{name}")).values()]
    kernels = {
        each.py_func.__name__
        for each in found
        if isinstance(each, CPUDispatcher) and each.targetoptions.get("nogil")
    }
    assert kernels <= warmed, "those are compiled at the first call of each process"
