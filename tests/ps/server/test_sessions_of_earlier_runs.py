"""The record of pushes belongs to the run whose clients may send them again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ps import exactly_once
from ps.manifest.manifest import Hyper, WorkerRank
from tests.support.ps_cluster import ADD, Cluster, cluster, filled, make_manifest

pytestmark = pytest.mark.socket

HYPER = Hyper(1.0)
MANIFEST = make_manifest(rule=ADD)


def num_sessions(bed: Cluster) -> int:
    return sum(map(len, bed.servers[0]._service.life.loaded()._log._sessions.values()))


def test_each_run_that_resumes_has_room_for_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(exactly_once, "MAX_SESSIONS", 2)
    for run in range(1, 5):
        with cluster() as bed:
            client = bed.client()
            if run == 1:
                client.seed(MANIFEST, filled(MANIFEST))
            else:
                client.restore(tmp_path)
            client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
            client.save(tmp_path, run)
            np.testing.assert_array_equal(bed.pulled(client)["trainable"], np.float32(run))
            assert num_sessions(bed) == 1


def test_runs_of_one_cluster_id_have_room_for_their_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As servers that are started by hand, with the same command for each run."""
    monkeypatch.setattr(exactly_once, "MAX_RESTORES", 3)
    counts = []
    for run in range(1, 9):
        with cluster(job="daily") as bed:
            client = bed.client()
            if run == 1:
                client.seed(MANIFEST, filled(MANIFEST))
            else:
                client.restore(tmp_path)
            client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
            client.save(tmp_path, run)
            np.testing.assert_array_equal(bed.pulled(client)["trainable"], np.float32(run))
            counts.append(num_sessions(bed))
    assert counts == [1, 2, 3, 4, 4, 4, 4, 4]


def test_a_client_that_pushes_keeps_its_record_through_any_number_of_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(exactly_once, "MAX_RESTORES", 3)
    with cluster() as bed:
        client = bed.client()
        client.seed(MANIFEST, filled(MANIFEST))
        for step in range(1, 2 * exactly_once.MAX_RESTORES):
            client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
            client.save(tmp_path, step)
            bed.restart(0, tmp_path)
            (session,) = (
                bed.servers[0]._service.life.loaded()._log._sessions[WorkerRank(0)].values()
            )
            assert (session.completed, session.updates) == (step, step)
            assert session.restores == 1


def test_a_run_that_fills_its_own_servers_again_keeps_its_record(tmp_path: Path):
    with cluster() as bed:
        client, other = bed.client(), bed.client()
        client.seed(MANIFEST, filled(MANIFEST))
        client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
        client.save(tmp_path, 1)
        bed.restart(0, tmp_path)
        assert num_sessions(bed) == 1
        client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
        other.attach()
        np.testing.assert_array_equal(bed.pulled(other)["trainable"], np.float32(2.0))
        assert num_sessions(bed) == 1
