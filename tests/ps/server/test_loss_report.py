"""What users are told of a loss, and when; who is a server's latest process."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from ps.checkpoint.fencing import GenerationFence
from ps.checkpoint.lease import this_holder
from ps.checkpoint.storage import storage_at
from ps.errors import CheckpointError
from ps.server.loss_report import LossReport
from ps.stats.server_stats import ServerStats
from tests.support.ps_cluster import run_all


def stats(lost: int) -> ServerStats:
    return ServerStats(1, "SERVING", 0, 0.0, lost_updates=lost, restored_step=900, lost_s=12.3)


@pytest.mark.fault("F08")
def test_a_loss_is_told_when_it_has_settled_and_again_when_it_grew():
    report = LossReport()
    assert report.poll(stats(0), 0.0) == ""
    assert report.poll(stats(1700), 1.0) == ""
    assert report.poll(stats(3410), 1.9) == ""
    assert report.poll(stats(3410), 2.8) == ""
    text = "ps:1: 12 s, at least 3,410 updates lost since step 900"
    assert report.poll(stats(3410), 3.0) == text
    assert report.poll(stats(3410), 9.0) == ""
    assert report.last(stats(3410)) == ""
    assert report.last(stats(3411)).startswith("ps:1: 12 s, at least 3,411 updates")
    assert LossReport().last(stats(1)).startswith("ps:1: 12 s, at least 1 update lost")


COPIES = [".ps-3.epoch.copy", "ps-3.epoch"]


def guard(root: Path, cluster: str = "c") -> GenerationFence:
    return GenerationFence(storage_at(root), cluster, 3)


@pytest.mark.fault("F11")
def test_the_later_process_is_the_server(tmp_path: Path):
    first = guard(tmp_path)
    first.claim()
    second = guard(tmp_path)
    assert (first.number, second.number) == (1, 2)
    assert first.successor() is None  # not before it serves
    second.claim()
    assert first.successor() == second._mine
    assert re.fullmatch(
        r"ps:3 \(start 1, pid \d+\) was replaced by start 2 \(host .*, pid \d+\)",
        first.replaced_text(second._mine),
    )
    assert second.successor() is None
    with pytest.raises(CheckpointError, match=r"replaced by start 2 .* while it started"):
        first.claim()


@pytest.mark.fault("F11")
def test_of_two_that_claim_one_number_at_once_one_serves(tmp_path: Path):
    for number in range(1, 6):
        both = [guard(tmp_path), guard(tmp_path)]
        assert [each.number for each in both] == [number, number]
        results = run_all(*(each.claim for each in both))
        errors = [result for result in results if isinstance(result, CheckpointError)]
        assert len(errors) == 1, results
        assert "stop one of them" in str(errors[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == COPIES


@pytest.mark.fault("F11")
def test_a_claim_of_a_killed_process_is_followed(tmp_path: Path):
    dead = msgspec.structs.replace(this_holder("ps:3, start 1, ab", "ab"), started="1")
    (tmp_path / "ps-3.epoch.lease").write_bytes(msgspec.json.encode(dead))
    guard(tmp_path).claim()
    assert guard(tmp_path).number == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == COPIES


def test_another_clusters_number_means_nothing(tmp_path: Path):
    first, other = guard(tmp_path), guard(tmp_path, "other")
    first.claim()
    other.claim()
    assert (first.number, other.number) == (1, 1)
    assert first.successor() is None
