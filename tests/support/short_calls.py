"""A file, and a kernel that moves a part of a value per call, as it does above 2 GiB."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

VALUE = bytes(range(256)) * 10


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A descriptor."""
    descriptor = os.open(tmp_path / "value", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1,000 bytes per call."""
    pread, pwrite = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda fd, count, at: pread(fd, min(count, 1000), at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1000], at))
