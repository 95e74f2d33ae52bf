"""A long run with kills: exact counters, and nothing that grows in whoever is never killed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.soak import SETTLE_S, Soak
from tests.support.waiting import wait_until

LONG_S = 1800.0
KILL_EVERY_S = 30.0
SAVE_EVERY_PUSHES = 400
WARM_UP_S = 600.0
"""Ten kills of each kind. Each of the first adds some 10 KB of arenas, 2 % an hour if measured
alone; two hours of further ones grow by .25 % an hour."""
MOST_PER_HOUR = 0.01


@pytest.fixture
def soak(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Soak]:
    bed = Soak(tmp_path, num_workers=request.param)
    try:
        bed.start()
        bed.further(20)
        bed.save()
        yield bed
    finally:
        bed.close()


def settled(soak: Soak, held: tuple[tuple[int, int], ...]) -> None:
    """Wait until descriptors and threads are as many as they were."""
    wait_until(lambda: soak.held() == held, f"{soak.held()} to become {held}", timeout_s=SETTLE_S)


@pytest.mark.fault("F01")
@pytest.mark.fault("F08")
@pytest.mark.process
@pytest.mark.timeout(300)  # of seven processes that start, where the machine has others
@pytest.mark.parametrize("soak", [2], indirect=True, ids=["2 workers"])
def test_counters_stay_exact_while_workers_and_servers_are_killed(soak: Soak):
    held = soak.held()
    soak.kill_worker(1)
    settled(soak, held)
    soak.kill_server()
    settled(soak, held)
    assert soak.lost > 0
    soak.check_counters()


@pytest.mark.fault("F01")
@pytest.mark.fault("F08")
@pytest.mark.fault("F61")
@pytest.mark.long
@pytest.mark.timeout(LONG_S + 300)
@pytest.mark.parametrize("soak", [3], indirect=True, ids=["3 workers"])
def test_half_an_hour_of_kills_leaves_nothing(soak: Soak):
    random_ = random.Random(0)
    begun_s = time.monotonic()
    samples: list[tuple[float, ...]] = []
    held = soak.held()
    for kill in range(1, int(LONG_S / KILL_EVERY_S)):
        while time.monotonic() < begun_s + kill * KILL_EVERY_S:
            soak.further(SAVE_EVERY_PUSHES)
            soak.save()
            samples.append((time.monotonic() - begun_s, *soak.resident()))
        if kill % 2:
            soak.kill_worker(random_.randrange(1, soak.num_workers))
        else:
            soak.kill_server()
        settled(soak, held)
    soak.check_counters()
    for place, name in enumerate(("ps:0", "worker:0"), start=1):
        growth = per_hour(samples, place)
        print(f"{name}: {samples[-1][place] / 1e6:.1f} MB, {growth:+.4%} an hour")  # noqa: T201
        assert growth < MOST_PER_HOUR, f"{name}: {samples}"


def per_hour(samples: list[tuple[float, ...]], place: int) -> float:
    """Return the slope of the resident bytes after warm-up, relative to their mean."""
    table = np.array([sample for sample in samples if sample[0] > WARM_UP_S])
    slope = np.polyfit(table[:, 0], table[:, place], 1)[0]
    return float(slope * 3600 / table[:, place].mean())
