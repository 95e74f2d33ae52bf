"""What /proc tells of a process."""

from __future__ import annotations

import mmap
import os

import psutil
import pytest

from rpc.process_stat import private_bytes, resident_bytes, stat_fields


def test_resident_memory_is_that_of_the_process():
    assert resident_bytes(os.getpid()) == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert resident_bytes(0) == 0


def test_pages_of_mapped_files_are_not_private(tmp_path):
    path, num_bytes = tmp_path / "data", 64 << 20
    path.write_bytes(bytes(num_bytes))
    before, resident = private_bytes(os.getpid()), resident_bytes(os.getpid())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # each page is read
        assert resident_bytes(os.getpid()) - resident > num_bytes // 2
        assert abs(private_bytes(os.getpid()) - before) < num_bytes // 4
        kept = os.urandom(num_bytes)
        assert private_bytes(os.getpid()) - before > len(kept) // 2
    assert private_bytes(0) == 0


def test_the_fields_of_stat_begin_behind_the_name_of_the_process():
    state, parent, *_ = stat_fields(os.getpid())
    assert state in (b"R", b"S")
    assert int(parent) == os.getppid()
    assert stat_fields(0) == []
