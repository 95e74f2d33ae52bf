"""A push in sync that one server fails for a reason of its own, and the others count."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.dense.staging import StagedGradient
from ps.errors import NonFiniteGradient, PSError, ServerError, ServerPhaseError
from ps.manifest.manifest import Hyper
from tests.support.ps_cluster import ADD, Cluster, cluster, filled, make_manifest, run_all

pytestmark = pytest.mark.socket

HYPER = Hyper(1.0)


def fail_once(bed: Cluster, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let ps:1 be without memory for the first gradient that comes."""
    pool = bed.servers[1]._service.life.loaded()._pool
    take, has_failed = pool.take, threading.Event()

    def without_memory() -> StagedGradient:
        monkeypatch.setattr(pool, "take", take)
        has_failed.set()
        raise MemoryError("no memory for a gradient")

    monkeypatch.setattr(pool, "take", without_memory)
    return has_failed


def push(client: PSClient) -> None:
    client.push(filled(client.manifest, 1.0), hyper=HYPER, rows=1)


def test_a_worker_whose_push_one_server_alone_has_failed_pushes_no_more(
    monkeypatch: pytest.MonkeyPatch,
):
    """At that server its next gradient would be averaged with the others' of the step before."""
    with cluster(num_servers=2, num_workers=2) as bed:
        manifest = make_manifest(rule=ADD, consistency="sync")
        first, second = bed.workers(manifest, filled(manifest))
        has_failed = fail_once(bed, monkeypatch)

        def others() -> None:
            assert has_failed.wait(20.0)
            second.timeout_s = 1.0  # ps:1 waits for what the first worker has not brought
            push(second)

        results = run_all(lambda: push(first), others)
        assert isinstance(results[0], ServerError)
        assert isinstance(results[1], PSError)
        first.timeout_s = 1.0
        (refused,) = run_all(lambda: push(first))
        assert isinstance(refused, ServerPhaseError)
        assert "only by some servers" in refused.message
        assert "build the model again" in refused.message, "its servers are in this process"


def test_without_a_barrier_a_worker_goes_on_after_a_servers_own_failure(
    monkeypatch: pytest.MonkeyPatch,
):
    with cluster(num_servers=2) as bed:
        manifest = make_manifest(rule=ADD)
        (client,) = bed.workers(manifest, filled(manifest))
        intake = bed.servers[1]._service.life.loaded()._gradients_in
        scratch = intake.scratch

        def without_memory() -> object:
            monkeypatch.setattr(intake, "scratch", scratch)
            raise MemoryError("no memory for a gradient")

        monkeypatch.setattr(intake, "scratch", without_memory)
        with pytest.raises(ServerError, match="MemoryError"):
            push(client)
        push(client)
        assert {float(value) for value in bed.pulled(client)["trainable"]} == {1.0, 2.0}


def test_without_a_barrier_a_refusal_hides_no_server_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
):
    """Whether that one has applied its part is unknown, whichever of the two comes first."""
    with cluster(num_servers=2) as bed:
        manifest = make_manifest(rule=ADD)
        (client,) = bed.workers(manifest, filled(manifest))
        intake, goes_on = bed.servers[1]._service.life.loaded()._gradients_in, threading.Event()
        scratch = intake.scratch

        def late() -> object:
            assert goes_on.wait(20.0)
            return scratch()

        monkeypatch.setattr(intake, "scratch", late)
        client.timeout_s = 1.0
        with pytest.raises(NonFiniteGradient):
            client.push(filled(manifest, np.nan), hyper=HYPER, rows=1)
        goes_on.set()
        client.timeout_s = 20.0
        with pytest.raises(ServerPhaseError, match=r"got no answer \(ps:1 at .* is unknown"):
            push(client)
