"""Values in descriptors: whole, though the kernel moves a part per call (2 GiB - 4 KiB at most)."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.short_calls import VALUE, file, short_calls
from tfos.node import whole_files
from tfos.runner import local_run
from tfos.runner.local_process import RankOutcome, leave_outcome
from tfos.worker.context import NodeContext

__all__ = ["file", "short_calls"]


def test_what_is_written_is_read_whole(file, short_calls):
    whole_files.write_at(file, VALUE, 7)
    assert whole_files.read_at(file, len(VALUE), 7) == VALUE
    whole_files.replace(file, VALUE[:2000])
    assert whole_files.contents(file) == VALUE[:2000]
    whole_files.replace(file, b"")
    assert whole_files.contents(file) == b""


def test_a_file_that_ends_early_is_an_error_and_no_endless_wait(file):
    whole_files.replace(file, b"123")
    with pytest.raises(OSError, match=r"ends 2 bytes before byte 5, where 4 bytes should end"):
        whole_files.read_at(file, 4, 1)


def test_a_rank_hands_its_value_over_whole(file, short_calls):
    context = cast("Any", SimpleNamespace(_value_fd=file, _name="worker:0"))
    NodeContext.hand_over(context, VALUE)
    assert whole_files.contents(file) == VALUE


def running(file):
    return local_run._Running(0, cast("Any", None), 0, cast("Any", None), file)


def test_a_rank_beside_the_driver_leaves_its_outcome_whole(file, short_calls):
    leave_outcome(file, RankOutcome(VALUE))
    assert running(file).outcome() == RankOutcome(VALUE)


def test_an_outcome_that_was_cut_by_the_ranks_death_is_none(file):
    leave_outcome(file, RankOutcome(VALUE))
    os.ftruncate(file, 100)
    assert running(file).outcome() is None
