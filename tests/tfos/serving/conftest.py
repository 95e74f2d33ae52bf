"""Serving: indexes in a directory of the test's own, the kernel loaded before a test's clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps.sorted_rows import search


@pytest.fixture(scope="session", autouse=True)
def search_loaded() -> None:
    search.warm("float32")
    search.warm("float64")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path
