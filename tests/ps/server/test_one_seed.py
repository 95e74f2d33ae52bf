"""All first values come from one attempt of the chief, whichever servers the one before reached."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.errors import RequestTimeout, ServerPhaseError, StaleGeneration
from ps.manifest.manifest import Adam, Hyper, Manifest, WorkerRank
from ps.server.handlers import Service
from ps.server.server import PSServer
from tests.support.ps_cluster import (
    ADD,
    WAIT_S,
    Arrays,
    Cluster,
    cluster,
    filled,
    frozen_arrays,
    make_manifest,
    raw_seed,
    run_all,
    succeeded,
    with_frozen,
)
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.socket, pytest.mark.fault("F20")]

MANIFEST = make_manifest(1000, rule=ADD)
HYPER = Hyper(1.0)
ZERO = WorkerRank(0)


@pytest.fixture
def bed() -> Iterator[Cluster]:
    with cluster("tcp", num_servers=2, num_workers=2) as made:
        yield made


class LostWhileSeeding:
    """A server where the chief's process is lost as its seed has come, before it counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: PSServer) -> None:
        self._service = server._service
        self._monkeypatch = monkeypatch

    def __enter__(self) -> None:
        install = self._service.life.install

        def lost(shard: Any, by: Any = None) -> bool:
            if by is not None:
                self._service.worker_lost(by.worker, by.generation)
            return install(shard, by)

        self._monkeypatch.setattr(self._service.life, "install", lost)

    def __exit__(self, *error: object) -> None:
        self._monkeypatch.undo()


def seed_half(
    bed: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    manifest: Manifest,
    values: Arrays,
    generation: int = 0,
) -> None:
    """Let a chief fill ps:0 alone, and be lost."""
    old = bed.client(0, generation)
    with LostWhileSeeding(monkeypatch, bed.servers[1]), pytest.raises(StaleGeneration):
        old.seed(manifest, values)
    assert [each.phase for each in old.describe()] == ["SERVING", "EMPTY"]
    bed.servers[0].worker_lost(0, generation)


def everywhere(bed: Cluster, client: PSClient) -> set[float]:
    return set(bed.pulled(client)["trainable"])


def test_a_seed_that_did_not_reach_all_servers_is_replaced(
    bed: Cluster, monkeypatch: pytest.MonkeyPatch
):
    seed_half(bed, monkeypatch, MANIFEST, filled(MANIFEST, 13.0))
    new = bed.client(0, generation=1)
    new.seed(MANIFEST, filled(MANIFEST, 1.0))
    new.attach()
    assert everywhere(bed, new) == {1.0}
    assert new.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1).clock == 1
    assert everywhere(bed, new) == {2.0}


def test_a_seed_that_reached_all_servers_stays(bed: Cluster):
    bed.client(0).seed(MANIFEST, filled(MANIFEST, 13.0))
    worker = bed.client(1)
    worker.attach()
    bed.driver().worker_lost(0, 0)
    worker.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
    new = bed.client(0, generation=1)
    new.seed(MANIFEST, filled(MANIFEST, 1.0))
    assert everywhere(bed, new) == {14.0}


def test_frozen_weights_are_of_the_same_seed(bed: Cluster, monkeypatch: pytest.MonkeyPatch):
    manifest = with_frozen(MANIFEST)
    first, second = frozen_arrays(manifest, 1), frozen_arrays(manifest, 2)
    seed_half(bed, monkeypatch, manifest, {**filled(manifest, 13.0), **first})
    new = bed.client(0, generation=1)
    new.seed(manifest, {**filled(manifest, 1.0), **second})
    into = {name: np.zeros_like(each) for name, each in second.items()}
    new.pull_frozen(manifest, into)
    assert everywhere(bed, new) == {1.0}
    assert all(np.array_equal(into[name], second[name]) for name in second)


def test_a_seed_that_could_not_end_is_made_again_by_the_same_client(
    bed: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """Each call is a seed of its own, as its values may be others."""
    chief = bed.client(0)
    make = Service._new_shard

    def fail_once(service: Service, *parts: Any, **named: Any) -> Any:
        if service is bed.servers[1]._service:
            monkeypatch.undo()
            raise ServerPhaseError("not this time")
        return make(service, *parts, **named)

    monkeypatch.setattr(Service, "_new_shard", fail_once)
    with pytest.raises(ServerPhaseError, match="not this time"):
        chief.seed(MANIFEST, filled(MANIFEST, 13.0))
    chief.seed(MANIFEST, filled(MANIFEST, 1.0))
    assert everywhere(bed, chief) == {1.0}


class HeldReplacing:
    """A server that stands before it takes a seed in the place of another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: PSServer) -> None:
        self.stands, self.goes_on = threading.Event(), threading.Event()
        service = server._service
        replace = service._replace_seed

        def held(*arguments: Any) -> None:
            self.stands.set()
            assert self.goes_on.wait(WAIT_S)
            replace(*arguments)

        monkeypatch.setattr(service, "_replace_seed", held)


def test_no_worker_begins_with_the_values_of_two_seeds(
    bed: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """Every server serves, ps:0 what the lost chief has brought and ps:1 what the next one has."""
    seed_half(bed, monkeypatch, MANIFEST, filled(MANIFEST, 13.0))
    held = HeldReplacing(monkeypatch, bed.servers[0])
    new, early, late = bed.client(0, generation=1), bed.client(1), bed.client(1)
    early.describe()  # connects

    def look() -> set[float]:
        assert held.stands.wait(WAIT_S)
        wait_until(lambda: late.describe()[1].phase == "SERVING", "the seed of ps:1")
        try:
            with pytest.raises(RequestTimeout, match=r"ps:0 .* ps:1 .* different seeds"):
                early.attach(timeout_s=0.6)
        finally:
            held.goes_on.set()
        late.attach()
        return everywhere(bed, late)

    works = (lambda: new.seed(MANIFEST, filled(MANIFEST, 1.0)), look)
    assert succeeded(run_all(*works))[1] == {1.0}


def test_a_chief_that_is_lost_while_it_replaces_a_seed_is_followed_by_a_third(
    bed: Cluster, monkeypatch: pytest.MonkeyPatch
):
    seed_half(bed, monkeypatch, MANIFEST, filled(MANIFEST, 13.0))
    held = HeldReplacing(monkeypatch, bed.servers[0])
    second = bed.client(0, generation=1)

    def lose() -> None:
        assert held.stands.wait(WAIT_S)
        wait_until(lambda: bed.driver().describe()[1].phase == "SERVING", "the seed of ps:1")
        bed.servers[0].worker_lost(0, 1)
        held.goes_on.set()

    end = run_all(lambda: second.seed(MANIFEST, filled(MANIFEST, 7.0)), lose)[0]
    assert isinstance(end, StaleGeneration)
    monkeypatch.undo()
    third = bed.client(0, generation=2)
    assert not third.is_filled()
    third.seed(MANIFEST, filled(MANIFEST, 1.0))
    assert third.is_filled()
    assert everywhere(bed, third) == {1.0}


def test_a_late_copy_of_a_seed_changes_nothing_that_was_trained_since(
    bed: Cluster, monkeypatch: pytest.MonkeyPatch
):
    seed_half(bed, monkeypatch, MANIFEST, filled(MANIFEST, 13.0))
    replaced = bed.driver().describe()[0].seed_id
    new = bed.client(0, generation=1)
    new.seed(MANIFEST, filled(MANIFEST, 1.0))
    new.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
    own = new.describe()[0].seed_id
    assert own not in (0, replaced)
    raw_seed(bed, 0, MANIFEST, 1.0, seed_id=own, replaces=replaced, generation=1)
    raw_seed(bed, 1, MANIFEST, 1.0, seed_id=own, generation=1)
    assert everywhere(bed, new) == {2.0}


def test_a_seed_takes_the_place_of_no_other_than_the_one_it_names(bed: Cluster):
    for server in (0, 1):
        raw_seed(bed, server, MANIFEST, 7.0, seed_id=7)
    raw_seed(bed, 0, MANIFEST, 8.0, seed_id=8, replaces=6)
    client = bed.client()
    assert [each.seed_id for each in client.describe()] == [7, 7]
    client.attach()
    assert everywhere(bed, client) == {7.0}


def restart_empty(bed: Cluster, rank: int) -> None:
    """Start a server in the place of one that is gone, without its parameters."""
    old = bed.servers[rank]
    host, port = old.endpoint.host, old.endpoint.port
    old.close(0.5)
    bed.servers[rank] = server = PSServer(old.settings, bed.credentials)
    server.bind_tcp(host, port)
    server.start()


def test_trained_values_are_not_mixed_with_those_of_a_seed(bed: Cluster):
    manifest = make_manifest(1000, rule=Adam())
    old = bed.client(0)
    old.seed(manifest, filled(manifest, 13.0))
    old.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
    restart_empty(bed, 1)
    before = bed.servers[0]._service.life.loaded().dense.values(0).copy()
    new = bed.client(0, generation=1)
    with pytest.raises(
        ServerPhaseError,
        match="ps:0 has trained the values of its seed",
    ):
        new.seed(manifest, filled(manifest, 1.0))
    after = bed.servers[0]._service.life.loaded().dense.values(0)
    assert np.array_equal(before, after)


def test_restored_values_are_not_mixed_with_those_of_a_seed(bed: Cluster, tmp_path: Path):
    chief = bed.client(0)
    chief.seed(MANIFEST, filled(MANIFEST, 13.0))
    chief.save(tmp_path, 3)
    bed.restart(0, tmp_path)
    assert chief.is_filled(), "one that is restored belongs to the others"
    restart_empty(bed, 1)
    with pytest.raises(ServerPhaseError, match=r"ps:0 .* checkpoint.* ps:1 .* restore"):
        chief.seed(MANIFEST, filled(MANIFEST, 1.0))
    assert chief.describe()[1].phase == "EMPTY"
