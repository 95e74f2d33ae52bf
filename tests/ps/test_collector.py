"""What a server keeps is frozen once, and requests leave nothing to the collector of cycles."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from ps.collector import StartFreeze
from ps.manifest.manifest import Hyper
from ps.protocol.permissions import ServerPhase
from tests.support.ps_cluster import cluster, filled
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]

STEPS = 60


def test_objects_are_frozen_once_when_the_server_serves(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    freeze = StartFreeze()
    freeze.poll(ServerPhase.EMPTY)
    assert calls == []
    for _ in range(2):
        freeze.poll(ServerPhase.SERVING)
    assert calls == ["collect", "freeze"]


@pytest.mark.socket
@pytest.mark.usefixtures("table_kernels_loaded")
@pytest.mark.parametrize("consistency", ["async", "hybrid"])
def test_requests_make_no_cycles_and_keep_no_objects(consistency):
    """Else the collector would run in the data path of servers and workers."""
    bound = {"staleness_bound": 2} if consistency == "hybrid" else {}
    manifest = with_tables(table("user"), consistency=consistency, **bound)
    ids = np.arange(500)

    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))

        def steps(number: int) -> None:
            for _ in range(number):
                with client.tables.batch({"user": ids}) as batch:
                    batch.push({"user": ones(ids)}, hyper=Hyper(0.1))

        steps(10)
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            steps(STEPS)
            kept = len(gc.get_objects()) - before
            garbage = gc.collect()
        finally:
            gc.enable()
    assert garbage == 0
    assert kept < 2 * STEPS
