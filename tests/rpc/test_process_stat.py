"""What /proc tells of a process."""

from __future__ import annotations

import os

import psutil
import pytest

from rpc.process_stat import resident_bytes, stat_fields


def test_resident_memory_is_that_of_the_process():
    assert resident_bytes(os.getpid()) == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert resident_bytes(0) == 0


def test_the_fields_of_stat_begin_behind_the_name_of_the_process():
    state, parent, *_ = stat_fields(os.getpid())
    assert state in (b"R", b"S")
    assert int(parent) == os.getppid()
    assert stat_fields(0) == []
