"""`python -m ps warm`: where it compiles to, and what it refuses before it compiles."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ps.cli import warm
from ps.cli.main import main
from rpc.jit.cache_directory import CACHE_VARIABLE, CacheDirectory


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
