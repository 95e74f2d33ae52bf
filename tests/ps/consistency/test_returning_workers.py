"""A server is started again while a worker that was lost has come back, or still has no rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.errors import ServerPhaseError
from ps.manifest.manifest import Hyper, WorkerRank
from tests.support.ps_cluster import (
    ADD,
    Cluster,
    cluster,
    filled,
    make_manifest,
    run_all,
    succeeded,
)
from tests.support.tables import ones, table, table_kernels_loaded, with_tables
from tests.support.waiting import wait_until

__all__ = ["table_kernels_loaded"]
pytestmark = [
    pytest.mark.socket,
    pytest.mark.fault("F08"),
    pytest.mark.usefixtures("table_kernels_loaded"),
]

HYPER = Hyper(1.0)
LATE = WorkerRank(2)
MODES = pytest.mark.parametrize("mode", ["sync", "ssp", "hybrid"])


@contextmanager
def two_and_one_lost(
    root: Path, mode: str, *, num_servers: int = 2
) -> Iterator[tuple[Cluster, list[PSClient], PSClient]]:
    """Two workers, and the attempt 100 of a third one that was lost after the first step."""
    settings: dict[str, Any] = {"size": 600, "rule": ADD, "consistency": mode, "reduction": "sum"}
    if mode == "hybrid":
        manifest = with_tables(table(), staleness_bound=1, **settings)
    else:
        manifest = make_manifest(**settings)  # ssp: nobody may be ahead
    with cluster(num_servers=num_servers, num_workers=3, on_lost="continue") as bed:
        clients = bed.workers(manifest, filled(manifest))
        step(*clients)
        clients[0].save(root, 1)
        for server in bed.servers:
            server.worker_lost(LATE, 0)
        back = bed.client(LATE, 100)
        back.attach()
        yield bed, clients[:2], back


def restart(bed: Cluster, rank: int, root: Path) -> None:
    """As a supervisor does, which repeats the orders that concern workers."""
    bed.restart(rank, root).worker_lost(LATE, 0)


def step(*clients: PSClient) -> None:
    """One push of everybody, as each clock of a barrier takes."""
    pushes = [
        partial(client.push, filled(client.manifest, 1.0), hyper=HYPER, rows=1)
        for client in clients
    ]
    succeeded(run_all(*pushes, timeout_s=20.0))


def values_of(bed: Cluster, rank: int) -> set[float]:
    dense = bed.servers[rank]._service.life.loaded().dense
    return {float(value) for bucket in dense.owned for value in np.unique(bucket.values)}


def clocks(bed: Cluster) -> list[int]:
    return [server.stats().clock for server in bed.servers]


@MODES
def test_a_restarted_server_waits_for_no_worker_that_has_no_rows_yet(tmp_path: Path, mode: str):
    with two_and_one_lost(tmp_path, mode) as (bed, others, back):
        restart(bed, 1, tmp_path)
        step(*others)
        step(*others)
        assert values_of(bed, 1) == {7.0}
        back.join()  # by itself a newer attempt joins between two clocks, or between two servers'
        step(*others, back)
        assert values_of(bed, 1) == {10.0}


@MODES
def test_a_worker_that_had_joined_goes_on_at_a_restarted_server(tmp_path: Path, mode: str):
    with two_and_one_lost(tmp_path, mode) as (bed, others, back):
        back.join()
        step(*others, back)
        restart(bed, 1, tmp_path)
        for _ in range(3):
            step(*others, back)
        assert values_of(bed, 0) == {15.0}
        if mode != "ssp":
            assert clocks(bed) == [5, 5]


@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_a_barrier_that_went_on_without_a_worker_takes_none_of_its_steps_for_a_later_one(
    tmp_path: Path, mode: str
):
    """In hybrid it looks rows up first, which makes it a member again before its push comes."""
    with two_and_one_lost(tmp_path, mode) as (bed, others, back):
        back.join()
        step(*others, back)
        restart(bed, 1, tmp_path)
        ones = partial(filled, back.manifest, 1.0)
        late: list[int] = []

        def come_late() -> None:
            wait_until(lambda: bed.servers[1].stats().clock == 3, "the others' barrier")
            if mode == "hybrid":
                routed = back.tables.route({"user": [1, 2, 3]})["user"]
                into = np.empty((3, 4), np.float32)
                back.tables.lookup_into({"user": (routed, into)}, training=True)
            late.append(back.push(ones(), hyper=HYPER, rows=1).clock)

        pushes = [partial(client.push, ones(), hyper=HYPER, rows=1) for client in others]
        succeeded(run_all(*pushes, come_late, timeout_s=20.0))
        assert late == [3]
        assert clocks(bed) == [3, 3]
        assert [values_of(bed, rank) for rank in (0, 1)] == [{9.0}, {5.0}]
        assert bed.servers[1].stats().lost_updates >= 1
        step(*others, back)
        assert clocks(bed) == [4, 4]
        assert [values_of(bed, rank) for rank in (0, 1)] == [{12.0}, {8.0}]


def test_a_loss_that_is_heard_behind_the_newer_attempt_holds_up_no_barrier(tmp_path: Path):
    """The newer attempt waits for rows at a rendezvous, and was heard there first."""
    with two_and_one_lost(tmp_path, "sync") as (bed, others, back):
        server = bed.restart(0, tmp_path)
        server._service.life.hear((LATE, 100))  # type: ignore[arg-type]
        server.worker_lost(LATE, 0)
        restart(bed, 1, tmp_path)
        step(*others)
        back.join()
        step(*others, back)
        assert [values_of(bed, rank) for rank in (0, 1)] == [{8.0}, {8.0}]


def test_a_batch_of_rows_is_looked_up_at_a_restarted_server_by_a_worker_that_had_joined(
    tmp_path: Path,
):
    with two_and_one_lost(tmp_path, "hybrid", num_servers=1) as (bed, _, back):
        back.join()
        restart(bed, 0, tmp_path)
        assert LATE not in bed.servers[0].stats().missing
        ids = {"user": np.arange(4)}

        def train() -> None:
            with back.tables.batch(ids) as batch:
                batch.push({"user": ones(ids["user"])}, hyper=HYPER)

        assert run_all(train, timeout_s=20.0) == [None]
        assert LATE in bed.servers[0].stats().missing, "the others wait for its step now"


def test_a_worker_that_has_left_still_has_to_join(tmp_path: Path):
    with two_and_one_lost(tmp_path, "sync", num_servers=1) as (bed, _, back):
        restart(bed, 0, tmp_path)
        back.leave()
        with pytest.raises(ServerPhaseError, match=r"has left the barrier; call join\(\)"):
            back.push(filled(back.manifest, 1.0), hyper=HYPER, rows=1)


def test_two_clients_of_one_worker_push_in_turn_and_no_push_is_taken_for_a_late_one():
    manifest = make_manifest(size=600, rule=ADD, consistency="sync", reduction="sum")
    with cluster(num_servers=2) as bed:
        (one,) = bed.workers(manifest, filled(manifest))
        other = bed.client()
        other.attach()
        for client in (one, other, one, other):
            step(client)
        assert clocks(bed) == [4, 4]
        assert [values_of(bed, rank) for rank in (0, 1)] == [{4.0}, {4.0}]
