"""Kills, freezes, saves and a bad network in any order and every mode: exact = told.

scripts/test --long tests/system/soak/test_storm.py --storm-s 1200 --storm-seed 7
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps.manifest.manifest import Consistency
from tests.support.storm import Storm

MODES: tuple[Consistency, ...] = ("async", "ssp", "sync", "hybrid")
LONG_S = 600.0


@pytest.fixture
def storms(tmp_path: Path) -> Iterator[list[Storm]]:
    made: list[Storm] = []
    yield made
    for storm in made:
        storm.close()


def seed_of(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--storm-seed"))


@pytest.mark.fault("F01")
@pytest.mark.fault("F08")
@pytest.mark.fault("F23")
@pytest.mark.process
@pytest.mark.timeout(300)  # of six processes that start, where the machine has others
def test_a_few_misfortunes_lose_nothing_untold(
    request: pytest.FixtureRequest, tmp_path: Path, storms: list[Storm]
):
    storm = Storm(tmp_path, "hybrid", seed_of(request), num_servers=2, num_workers=2)
    storms.append(storm)
    storm.start()
    storm.further(4)  # two steps of each worker, which the kill then loses
    storm.kill_server()
    storm.kill_worker()
    storm.save()
    storm.freeze_server()
    storm.end()
    assert sum(storm.told()) > 0


@pytest.mark.fault("F01")
@pytest.mark.fault("F08")
@pytest.mark.fault("F11")
@pytest.mark.fault("F23")
@pytest.mark.long
@pytest.mark.timeout(0)  # each of its waits has a deadline
@pytest.mark.parametrize("consistency", MODES)
def test_what_is_there_and_what_was_told_lost_is_all_that_was_acknowledged(
    request: pytest.FixtureRequest, tmp_path: Path, storms: list[Storm], consistency: Consistency
):
    storm = Storm(tmp_path, consistency, seed_of(request))
    storms.append(storm)
    storm.start()
    end_s = time.monotonic() + float(request.config.getoption("--storm-s")) / len(MODES)
    while time.monotonic() < end_s:
        storm.misfortune()
    storm.end()
    acknowledged = sum(each.acknowledged for each in storm.generations)
    print(  # noqa: T201
        f"{consistency}: {len(storm.log)} events, {len(storm.generations)} workers, "
        f"{acknowledged} acknowledged, told {storm.told()}"
    )
