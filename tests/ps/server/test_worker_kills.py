"""Workers killed at random points of async pushes: what was acknowledged is applied, once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ps.manifest.manifest import Hyper
from ps.server import receive
from tests.support.programs.forked_workers import NUM_WORKERS
from tests.support.ps_cluster import ADD, Cluster, cluster, filled, make_manifest
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
SIZE = 60_000
MOST_PUSHES = 12
MOST_DELAY_S = 0.004
"""A push takes about a millisecond: the kill comes before, in or after any part of one."""


@contextmanager
def forked_workers(bed: Cluster) -> Iterator[Callable[[int, int, float], tuple[int, int]]]:
    """Give a function that runs and kills one worker; returns pushes begun and acknowledged."""
    places = [f"{endpoint.host}:{endpoint.port}" for endpoint in bed.endpoints]
    command = [
        sys.executable,
        "-m",
        "tests.support.programs.forked_workers",
        bed.credentials.cluster_id,
    ]
    process = subprocess.Popen(
        [*command, str(SIZE), *places],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to, answers = process.stdin, process.stdout

    def run_and_kill(generation: int, pushes: int, delay_s: float) -> tuple[int, int]:
        to.write(f"{generation} {pushes} {delay_s}\n")
        to.flush()
        begun, acknowledged = answers.readline().split()
        return int(begun), int(acknowledged)

    try:
        to.write(bed.credentials.secret.hex() + "\n")
        yield run_and_kill
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.fault("F01")
@pytest.mark.process
@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 200), marks=pytest.mark.long)], ids=["10", "200"]
)
def test_a_worker_killed_anywhere_loses_and_doubles_no_acknowledged_push(seeds, monkeypatch):
    """Every push adds 1 everywhere, so a value is the number of pushes that reached it."""
    monkeypatch.setattr(receive, "READ_BYTES", 8192)  # applied piece by piece
    manifest = make_manifest(SIZE, rule=ADD, bucket_bytes=4096)
    cut_in_half = 0
    with cluster("tcp", num_servers=2, num_workers=NUM_WORKERS) as bed:
        survivor = bed.client(0)
        survivor.seed(manifest, filled(manifest))
        with forked_workers(bed) as run_and_kill:
            before = bed.pulled(survivor)["trainable"]
            for seed in seeds:
                random_ = random.Random(seed)
                pushes, delay_s = random_.randint(0, MOST_PUSHES), random_.uniform(0, MOST_DELAY_S)
                begun, acknowledged = run_and_kill(seed, pushes, delay_s)
                assert acknowledged >= pushes
                # What the dead worker had sent is still applied.
                wait_until(
                    lambda: all(each.connections == 1 for each in survivor.stats()), "its end"
                )
                after = bed.pulled(survivor)["trainable"]
                applied = after - before
                assert acknowledged <= applied.min() <= applied.max() <= begun, f"seed {seed}"
                cut_in_half += applied.min() < applied.max()
                survivor.push(filled(manifest, 1.0), hyper=Hyper(1.0), rows=1)
                before = bed.pulled(survivor)["trainable"]
                assert np.array_equal(before, after + 1), f"seed {seed}: the others go on"
    assert len(seeds) < 100 or cut_in_half, "no kill has met a push in flight"
