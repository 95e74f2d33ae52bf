"""Hybrid over real servers: dense groups at the barrier, rows under permits, every wait ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ps.client import tables as client_tables
from ps.client.client import PSClient
from ps.errors import (
    ClosedError,
    ManifestMismatch,
    NonFiniteGradient,
    PSError,
    PSSettingsError,
    RequestTimeout,
    ServerPhaseError,
    ShapeError,
    StaleGeneration,
    WorkerLost,
)
from ps.manifest.manifest import SGD, Hyper, Manifest
from ps.server import handlers, lifecycle
from tests.support.ps_cluster import (
    ADD,
    WAIT_S,
    Cluster,
    cluster,
    filled,
    random_arrays,
    run_all,
    succeeded,
)
from tests.support.tables import ones, table, table_kernels_loaded, with_tables
from tests.support.waiting import wait_until

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.1)
IDS = np.arange(24)


def hybrid(bound: int = 1, **settings: Any) -> Manifest:
    return with_tables(
        table(), consistency="hybrid", staleness_bound=bound, **{"rule": ADD, **settings}
    )


def started(bed: Cluster, manifest: Manifest) -> list[PSClient]:
    return bed.workers(manifest, filled(manifest))


def begun(client: PSClient, **options: Any) -> Any:
    return client.tables.batch({"user": IDS}, **options)


def pushed(batch: Any) -> Any:
    return batch.push({"user": ones(IDS)}, hyper=HYPER)


def seen(batch: Any) -> float:
    (value,) = set(batch.rows["user"].ravel().tolist())
    return float(value)


def until_a_lookup_waits(bed: Cluster) -> None:
    wait_until(
        lambda: all(server.stats().waiting_lookups for server in bed.servers), "a lookup to wait"
    )


def test_lookups_on_connections_of_their_own_are_counted_with_the_others():
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, hybrid())
        before = client.link_stats()
        pushed(begun(client))
        for old, new in zip(before, client.link_stats(), strict=True):
            assert new.latencies["lookup_batch"].count == new.latencies["push_rows"].count == 1
            assert new.requests == old.requests + 2
            assert new.bytes_in - old.bytes_in > 4 * len(IDS) // 2  # rows, not acknowledgements
            assert (new.path, new.reconnects) == ("in process", 0)


def test_a_lookup_waits_at_the_bound_and_then_sees_the_push_that_let_it_go():
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, hybrid(2))
        first, second = begun(client), begun(client)

        def push() -> None:
            until_a_lookup_waits(bed)
            pushed(first)

        third, _ = succeeded(run_all(partial(begun, client), push))
        assert (seen(first), seen(second), seen(third)) == (0.0, 0.0, 1.0)
        for batch in (second, third):
            assert pushed(batch).applied
        assert seen(begun(client)) == 3.0
        assert all(not stats.waiting_lookups for stats in client.stats())


def dropped(client: PSClient) -> object:
    """A batch that an exception has ended, whose traceback still holds it."""
    return begun(client)


def looked_up(client: PSClient) -> Any:
    """A batch that is known by its routed ids."""
    ids = client.tables.route({"user": IDS})["user"]
    rows = np.empty((ids.unique.size, 4), np.float32)
    client.tables.lookup_into({"user": (ids, rows)}, training=True)
    return ids


def given_up(client: PSClient) -> object:
    """A batch of which the servers have not heard that it is over."""
    ids = looked_up(client)
    client.tables.give_up({"user": ids})
    return ids


@pytest.mark.parametrize("how", [dropped, looked_up, given_up])
@pytest.mark.parametrize("bound", [1, 2])
def test_a_client_that_is_closed_keeps_no_permit(how: Callable[[PSClient], object], bound: int):
    """Another client of the same worker and attempt, as after an exception in a notebook."""
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, hybrid(bound))
        held = [dropped(client) for _ in range(bound - 1)] + [how(client)]
        other = bed.client()
        other.attach()
        client.close()
        assert run_all(lambda: seen(begun(other, timeout_s=10))) == [0.0]
        assert held


def test_a_closed_client_leaves_the_permits_of_others_alone():
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, hybrid(1))
        other = bed.client()
        other.attach()
        pushed(begun(client))
        batch = begun(other)
        client.close()  # its own last batch finds no permit
        with pytest.raises(
            RequestTimeout, match="worker 0 has staleness_bound=1 batches under way"
        ):
            begun(other, timeout_s=2.0)
        assert pushed(batch).applied


@pytest.mark.parametrize("are_gone", [True, False])
def test_a_client_closes_soon_without_the_servers_that_hold_its_permits(
    monkeypatch: pytest.MonkeyPatch, are_gone: bool
):
    monkeypatch.setattr(client_tables, "GIVE_UP_S", 0.1)
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, hybrid(1))
        assert begun(client)
        if are_gone:
            for server in bed.servers:
                server._listener.close(0.0)
        else:
            bed.driver().stop_servers("the end")
        client.close()
        client.close()
        with pytest.raises(ClosedError):
            begun(client)


def test_a_client_closes_soon_while_a_server_restores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """However often that server says so within the time of the close."""
    monkeypatch.setattr(lifecycle, "RESTORE_LOOK_S", 0.05)
    monkeypatch.setattr(client_tables, "GIVE_UP_S", 0.2)
    goes_on, stands = threading.Event(), threading.Event()
    restores = vars(handlers)["restore_into"]

    def held(*args: Any, **options: Any) -> Any:
        stands.set()
        goes_on.wait(30.0)
        return restores(*args, **options)

    with cluster("tcp", num_servers=2) as bed:
        (client,) = started(bed, hybrid(1))
        assert begun(client)
        client.save(tmp_path, 0)
        monkeypatch.setattr(handlers, "restore_into", held)
        restart = threading.Thread(target=bed.restart, args=(1, tmp_path))
        restart.start()
        closing = threading.Thread(target=client.close)
        try:
            assert stands.wait(10.0)
            closing.start()
            closing.join(10.0)
            assert not closing.is_alive()
        finally:
            goes_on.set()
            restart.join()
            closing.join()


def test_what_ends_the_return_of_permits_leaves_no_connection(monkeypatch: pytest.MonkeyPatch):
    with cluster() as bed:
        (client,) = started(bed, hybrid(1))
        monkeypatch.setattr(client.tables, "return_permits", Mock(side_effect=RuntimeError("end")))
        with pytest.raises(RuntimeError, match="end"):
            client.close()
        assert client._servers.is_closed


GIVE_BACK: list[Callable[[Any], Any]] = [
    pushed,
    lambda batch: batch.close(),
    lambda batch: batch.push({}, hyper=HYPER),  # of no tables
]


def test_whatever_ends_a_batch_gives_its_permit_back_once():
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, hybrid())
        for give_back in GIVE_BACK * 2:
            batch = begun(client)
            give_back(batch)
            batch.close()
            with pytest.raises(ServerPhaseError, match="pushed or closed already"):
                pushed(batch)
        begun(client)
        with pytest.raises(RequestTimeout, match="worker 0 has staleness_bound=1 batches"):
            begun(client, timeout_s=4.0)


def test_an_error_in_the_block_gives_the_permit_back_and_is_not_hidden():
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, hybrid())
        with pytest.raises(ZeroDivisionError), begun(client):
            raise ZeroDivisionError
        with begun(client) as batch:
            assert seen(batch) == 0.0


@pytest.mark.fault("F48")
def test_a_refused_push_ends_its_batch_and_a_wrong_shape_does_not():
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, hybrid())
        with begun(client) as batch:
            with pytest.raises(ShapeError):
                batch.push({"user": ones(IDS[1:])}, hyper=HYPER)
            with pytest.raises(ManifestMismatch, match=r"gradients for \['item'\]"):
                batch.push({"item": ones(IDS)}, hyper=HYPER)
            with pytest.raises(NonFiniteGradient):
                batch.push({"user": ones(IDS, value=np.nan)}, hyper=HYPER)
        with begun(client) as batch:
            assert pushed(batch).applied


def test_looking_without_training_takes_no_permit():
    with cluster() as bed:
        (client,) = started(bed, hybrid())
        begun(client)
        for _ in range(5):
            client.tables.lookup({"user": IDS})
        driver = bed.driver()
        driver.attach()
        driver.tables.lookup({"user": IDS})


def test_a_lookup_does_not_wait_for_a_push_that_waits_at_the_barrier():
    """A worker looks its next rows up meanwhile; what it looks at first is made by the lookup."""
    with cluster(num_servers=2, num_workers=2) as bed:
        client, other = started(bed, hybrid())
        values = filled(client.manifest, 1.0)

        def look_up() -> None:
            wait_until(lambda: bed.servers[0].stats().waiting == 1, "a push to wait")
            assert begun(client).rows["user"].shape == (IDS.size, 4)
            assert bed.servers[0].stats().waiting == 1
            other.push(values, hyper=HYPER, rows=1)

        succeeded(run_all(partial(client.push, values, hyper=HYPER, rows=1), look_up))


def test_a_push_of_no_batch_is_refused_and_changes_nothing():
    with cluster() as bed:
        (client,) = started(bed, hybrid())
        with pytest.raises(PSSettingsError, match=r"use tables\.batch"):
            client.tables.push({"user": (IDS, ones(IDS))}, hyper=HYPER)
        assert not client.tables.lookup({"user": IDS})["user"].any()
        assert pushed(begun(client)).applied


@pytest.mark.parametrize("mode", [{"consistency": "async"}, {"consistency": "sync"}])
def test_other_modes_take_batches_and_never_wait(mode: dict):
    with cluster() as bed:
        (client,) = started(bed, with_tables(table(), **mode))
        batches = [begun(client, timeout_s=WAIT_S) for _ in range(5)]
        for batch in batches:
            with batch:
                assert pushed(batch).applied
        assert seen(begun(client)) == 5.0


def test_rows_looked_up_miss_at_most_the_workers_own_batches_within_the_bound():
    """Every worker adds 1 to all rows, batch after batch, and looks ahead as far as it may."""
    bound, num_batches = 3, 20
    with cluster(num_servers=2, num_workers=2) as bed:
        clients = started(bed, hybrid(bound))

        def work(client: PSClient) -> None:
            under_way: list[Any] = []
            for number in range(num_batches):
                under_way.append(begun(client))
                assert under_way[-1].rows["user"].min() >= number - (bound - 1)
                if len(under_way) == bound:
                    pushed(under_way.pop(0))
                    client.push(filled(client.manifest, 1.0), hyper=HYPER, rows=1)
            for batch in under_way:
                pushed(batch)
            client.finish()

        succeeded(run_all(*(partial(work, client) for client in clients)))
        assert set(clients[0].tables.lookup({"user": IDS})["user"].ravel()) == {2.0 * num_batches}


def waiting_ends_with(
    bed: Cluster, client: PSClient, act: Callable[[], Any], error: type[PSError], sentence: str
) -> None:
    """Let a lookup wait, do something, and see what the lookup hears."""
    begun(client)

    def go() -> None:
        until_a_lookup_waits(bed)
        act()

    heard, done = run_all(partial(begun, client), go)
    assert not isinstance(done, Exception), done
    assert isinstance(heard, error)
    assert sentence in str(heard)


@pytest.mark.fault("F34")
@pytest.mark.parametrize("how", ["leave", "finish"])
def test_a_worker_that_goes_ends_its_own_wait(how: str):
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, hybrid())
        waiting_ends_with(
            bed,
            client,
            getattr(client, how),
            ServerPhaseError,
            "finish" if how == "finish" else "left",
        )
        if how == "leave":
            client.join()
            assert pushed(begun(client)).applied, "its permits are free again"


@pytest.mark.fault("F06")
def test_a_frozen_worker_hears_that_it_was_replaced_and_its_successor_has_all_permits():
    with cluster(num_servers=2, num_workers=2) as bed:
        frozen, _ = started(bed, hybrid())
        driver = bed.driver()
        waiting_ends_with(bed, frozen, lambda: driver.fence(0, 1), StaleGeneration, "was replaced")
        newer = bed.client(0, generation=1)
        newer.attach()
        assert pushed(begun(newer)).applied


@pytest.mark.fault("F02")
def test_a_broken_barrier_ends_the_waits_of_all():
    with cluster(num_servers=2, num_workers=2) as bed:
        client, _ = started(bed, hybrid())
        driver = bed.driver()
        waiting_ends_with(
            bed, client, lambda: driver.worker_lost(1), WorkerLost, "worker 1 was lost"
        )


def test_stopping_servers_end_the_wait():
    with cluster() as bed:
        (client,) = started(bed, hybrid())
        driver = bed.driver()
        waiting_ends_with(
            bed, client, lambda: driver.stop_servers("enough"), ServerPhaseError, "DRAINING"
        )


def test_closing_the_client_ends_a_wait_on_another_thread():
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, hybrid())
        waiting_ends_with(bed, client, client.close, ClosedError, "this client is closed")


def test_dense_groups_are_those_of_sync_bit_for_bit():
    def trained(**mode: Any) -> np.ndarray[Any, Any]:
        manifest = with_tables(table(), rule=SGD(momentum=0.9), **mode)
        with cluster(num_servers=2, num_workers=3) as bed:
            clients = bed.workers(manifest, random_arrays(manifest, 0))

            def work(rank: int, client: PSClient) -> None:
                for step in range(10):
                    with begun(client) as batch:
                        client.push(
                            random_arrays(manifest, 100 * step + rank), hyper=HYPER, rows=rank + 1
                        )
                        pushed(batch)

            succeeded(run_all(*(partial(work, *pair) for pair in enumerate(clients))))
            assert set(clients[0].tables.lookup({"user": IDS})["user"].ravel()) == {30.0}
            return np.asarray(bed.pulled(clients[0])["trainable"])

    sync = trained(consistency="sync")
    assert np.array_equal(trained(consistency="hybrid", staleness_bound=2), sync)
