"""What the step of a save without a number counts: updates, or one more where they stand still.

The clock in the save is the number of updates in any case, and the values hold each of them once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ps.checkpoint.format import step_of
from ps.checkpoint.inspect import inspect
from ps.client.client import PSClient
from ps.manifest.manifest import Hyper
from tests.support.proxied_cluster import proxied
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest

__all__ = ["proxied"]
pytestmark = pytest.mark.socket

HYPER = Hyper(0.1)
PUSHES = 6


def saved(client: PSClient, root: Path) -> tuple[int, int]:
    """Save without a number; returns the step, and the updates that the save says it holds."""
    step = step_of(Path(client.save(root, None)).name)
    (report,) = [each for each in inspect(root).steps if each.step == step]
    assert not report.error
    assert step is not None
    return step, report.clock


def held(root: Path, step: int) -> set[float]:
    with cluster() as bed:
        client = bed.client()
        assert client.restore(root, step=step) == step
        return set(bed.pulled(client)["trainable"].tolist())


@pytest.mark.parametrize("consistency", ["async", "sync", "ssp"])
def test_a_step_is_the_number_of_updates_whatever_came_between(
    proxied: Any, tmp_path: Path, consistency: str
):
    """Neither what is sent twice nor what brings no gradient is counted as an update."""
    parts = proxied()
    bound = 2 if consistency == "ssp" else 0
    manifest = make_manifest(rule=ADD, consistency=consistency, staleness_bound=bound)
    (client,) = parts.workers(manifest)
    ones, into = filled(client.manifest, 1.0), filled(client.manifest)
    assert saved(client, tmp_path) == (0, 0)
    for number in range(1, PUSHES + 1):
        (cut,) = parts.proxy.plan(("down", 10))
        client.push_pull(ones, into, hyper=HYPER, rows=1)
        assert cut.fired.is_set()
        client.pull(into)
        if not client.manifest.has_barrier:  # there it ends a clock, and is counted as one
            client.push_null()
        assert saved(client, tmp_path) == (number, number)
        assert saved(client, tmp_path) == (number, number), "nothing has changed"
    (worker,) = client.stats()[0].workers
    assert (worker.pushes, worker.repeated) == (PUSHES, PUSHES)
    assert held(tmp_path, PUSHES) == {PUSHES}


@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_a_save_of_other_metadata_has_the_next_step_and_the_same_updates(
    tmp_path: Path, consistency: str
):
    """As after the last push of a run, when readers have told their last positions."""
    with cluster(num_servers=2) as bed:
        manifest = make_manifest(rule=ADD, consistency=consistency)
        (client,) = bed.workers(manifest, filled(manifest))
        ones = filled(manifest, 1.0)
        for _ in range(PUSHES):
            client.push(ones, hyper=HYPER, rows=1)
        assert saved(client, tmp_path) == (PUSHES, PUSHES)
        client.set_metadata("positions", [1, 2])
        assert saved(client, tmp_path) == (PUSHES + 1, PUSHES), "a step is never written twice"
        client.push(ones, hyper=HYPER, rows=1)
        assert saved(client, tmp_path) == (PUSHES + 2, PUSHES + 1), "no smaller than one before"
        for _ in range(3):
            client.push(ones, hyper=HYPER, rows=1)
        assert saved(client, tmp_path) == (PUSHES + 4, PUSHES + 4), "updates have caught up"
    assert held(tmp_path, PUSHES) == held(tmp_path, PUSHES + 1) == {PUSHES}
    assert held(tmp_path, PUSHES + 2) == {PUSHES + 1}
    with cluster(num_servers=2) as bed:
        client = bed.client()
        client.restore(tmp_path, step=PUSHES + 2)
        into = filled(client.manifest)
        assert client.pull(into).clock == PUSHES + 1, "a restore counts updates on, not steps"
