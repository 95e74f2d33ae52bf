"""Rows of a running cluster at the driver and in Spark's tasks, without Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ps.manifest.manifest import Hyper
from rpc.auth.handshake import Role
from tests.support.ps_cluster import Cluster, cluster, filled
from tests.support.tables import ones, table, table_kernels_loaded, with_tables
from tfos.driver.table_calls import TableCalls
from tfos.errors import (
    IdError,
    ManifestMismatch,
    NoServersError,
    PhaseError,
    RoleError,
    SettingsError,
    ShapeError,
)
from tfos.phases import ClusterPhase
from tfos.serving.load_task import LoadTask
from tfos.serving.scan_task import ScanTask
from tfos.serving.task_servers import TaskServers

__all__ = ["table_kernels_loaded"]
pytestmark = pytest.mark.usefixtures("table_kernels_loaded")

IDS = np.arange(50)


def calls_to(bed: Cluster | None, phase: ClusterPhase = ClusterPhase.RUNNING) -> TableCalls:
    endpoints = [] if bed is None else bed.endpoints
    state = SimpleNamespace(
        servers=[SimpleNamespace(endpoint=each) for each in endpoints], workers=[None]
    )
    calls = TableCalls()
    calls._reserved = SimpleNamespace(  # type: ignore[assignment]  # what a call uses of it
        coordinator=SimpleNamespace(phase=phase, read=lambda what: what(state)),
        credentials=None if bed is None else bed.credentials,
    )
    return calls


def pushed(bed: Cluster) -> Any:
    """Return the chief's client; each row has its id as its numbers."""
    manifest = with_tables(table(unseen=(9.0,) * 4))
    (chief,) = bed.workers(manifest, filled(manifest))
    gradients = np.repeat(IDS[:, None], 4, 1).astype(np.float32)
    chief.tables.push({"user": (IDS, gradients)}, hyper=Hyper(1.0))
    return chief


def test_single_rows_at_the_driver():
    with cluster(num_servers=2) as bed:
        pushed(bed)
        calls = calls_to(bed)
        rows = calls.lookup("user", [[3, 77], [49, 3]])
        assert rows[..., 0].tolist() == [[3.0, 9.0], [49.0, 3.0]]
        assert calls.lookup("user", [77])[0].tolist() == [9.0] * 4  # no row was made
        with pytest.raises(ManifestMismatch, match="no table 'item'; the manifest has 'user'"):
            calls.lookup("item", [1])
        with pytest.raises(IdError, match="'user'"):
            calls.lookup("user", [-1])


def test_a_task_reads_the_rows_of_its_server():
    with cluster(num_servers=2) as bed:
        pushed(bed)
        task = ScanTask("user", TaskServers(bed.endpoints, lambda: bed.credentials, 1))
        found = []
        for rank in range(2):
            batches = list(task(iter([pa.record_batch([pa.array([rank])], ["id"])])))
            found.append({one for batch in batches for one in batch["id"].to_pylist()})
            for batch in batches:
                assert batch["row"].to_pylist() == [
                    [float(one)] * 4 for one in batch["id"].to_pylist()
                ]
        assert found[0] | found[1] == set(IDS.tolist())
        assert found[0]
        assert not found[0] & found[1]


def frame_of(columns: dict[str, str]) -> Any:
    """A DataFrame's columns and types."""
    return SimpleNamespace(dtypes=list(columns.items()))


def batch_of(ids: list[Any], rows: list[Any]) -> pa.RecordBatch:
    lists = pa.array(rows, pa.list_(pa.float32()))
    return pa.record_batch([pa.array(ids), lists], ["id", "row"])


def test_a_task_loads_its_rows_and_may_run_twice():
    with cluster(num_servers=2) as bed:
        chief = pushed(bed)
        task = LoadTask("user", TaskServers(bed.endpoints, lambda: bed.credentials, 1))
        sliced = batch_of([1, 60, 61], [[0.0] * 4, [1.0] * 4, [2.0] * 4])[1:]
        for added in (3, 0):
            given = [sliced, batch_of(["a"], [[3.0] * 4]), batch_of([], [])]
            counted = [batch.to_pydict() for batch in task(iter(given))]
            assert sum(one for counts in counted for one in counts["added"]) == added
            assert sum(one for counts in counted for one in counts["given"]) == 3
        calls = calls_to(bed)
        assert calls.lookup("user", [60, 61])[:, 0].tolist() == [1.0, 2.0]
        assert calls.lookup("user", ["a"]).tolist() == [[3.0] * 4]
        assert chief.tables.lookup({"user": [7]})["user"][0, 0] == 7.0


def test_rows_that_a_task_cannot_load_are_refused_by_name():
    wrong = [
        (batch_of([1, None], [[0.0] * 4] * 2), "1 of 2 ids of a batch are null"),
        (batch_of([1, 2], [[0.0] * 4, None]), "1 rows that are null"),
        (batch_of([1, 2], [[0.0] * 4, [0.0, None, 0.0, 0.0]]), "1 values that are null"),
        (batch_of([1, 2], [[0.0] * 4, [0.0] * 3]), r"rows of 4 and 3 values \(the key 2\)"),
        (batch_of([1, 2], [[0.0] * 3] * 2), r"float32\[2, 4\] .*got float32\[2, 3\]"),
        (batch_of([5, 5], [[0.0] * 4] * 2), "id 5 occurs twice"),
    ]
    with cluster() as bed:
        pushed(bed)
        task = LoadTask("user", TaskServers(bed.endpoints, lambda: bed.credentials, 1))
        for batch, message in wrong:
            with pytest.raises((SettingsError, ShapeError, IdError), match=message):
                list(task(iter([batch])))
        for columns in [
            {"id": "bigint", "row": "array<double>"},
            {"id": "double", "row": "array<float>"},
            {"user": "bigint", "row": "array<float>"},
        ]:
            with pytest.raises(SettingsError, match=r"takes the columns id .*row array<float>, th"):
                calls_to(bed).load_rows("user", frame_of(columns))


def test_a_task_can_change_no_row():
    with cluster() as bed:
        pushed(bed)
        client = bed.client(role=Role.FEEDER)
        client.attach()
        with pytest.raises(RoleError, match="may not call pushrows"):
            client.tables.push({"user": ([1], ones([1]))}, hyper=Hyper(1.0))


def test_a_cluster_that_cannot_answer():
    with pytest.raises(PhaseError, match=r"lookup\(\)"):
        calls_to(None, ClusterPhase.RESERVED).lookup("user", [1])
    with pytest.raises(NoServersError, match="num_ps >= 1"):
        calls_to(None).lookup("user", [1])
