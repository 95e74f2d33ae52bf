"""Server and client together, over memory and over TCP: the same promises."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import pytest

from ps import successor_watch
from ps.checkpoint.fencing import GenerationFence
from ps.checkpoint.storage import storage_at
from ps.client.client import PSClient
from ps.client.slices import slice_by_server, views_per_server
from ps.dense.shard import DenseShard
from ps.errors import (
    CheckpointError,
    ClosedError,
    ManifestMismatch,
    NonFiniteGradient,
    PSError,
    PSSettingsError,
    RequestTimeout,
    RoleError,
    SequenceGap,
    ServerPhaseError,
    ShapeError,
    StaleGeneration,
    WorkerLost,
)
from ps.manifest.manifest import Adam, GroupSpec, Hyper, Layout, Manifest, ParamSpec
from ps.protocol import messages
from ps.protocol.messages import Number
from ps.server.handlers import Service
from ps.server.server import PSServer, ServerSettings
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.limits import DEFAULT_LIMITS
from tests.support.ps_cluster import (
    ADD,
    WAIT_S,
    Cluster,
    cluster,
    filled,
    make_manifest,
    random_arrays,
    raw_call,
    run_all,
    succeeded,
)
from tests.support.tables import table
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from rpc.server.listener import Call

pytestmark = pytest.mark.socket

HYPER = Hyper(0.1)


def push_all(clients, grads, into, rows):
    works = [
        partial(client.push_pull, grads[i], into[i], hyper=HYPER, rows=rows[i])
        for i, client in enumerate(clients)
    ]
    return succeeded(run_all(*works))


def test_seed_then_pull_gives_the_same_bytes():
    manifest = make_manifest(statistics=7)
    values = random_arrays(manifest, 1)
    with cluster(num_servers=3) as bed:
        client = bed.client()
        assert [server.phase for server in client.describe()] == ["EMPTY"] * 3
        client.seed(manifest, values)
        pulled = bed.pulled(client)
    assert all(np.array_equal(pulled[name], values[name]) for name in values)


def test_a_second_seed_adopts_and_overwrites_nothing():
    manifest = make_manifest()
    with cluster() as bed:
        bed.client().seed(manifest, filled(manifest, 1.0))
        late = bed.client()
        late.seed(manifest, filled(manifest, 2.0))
        assert bed.pulled(late)["trainable"][0] == 1.0


def test_seeding_other_parameters_lists_the_differences():
    manifest = make_manifest(1000)
    other = make_manifest(1002, rule=Adam())
    with cluster() as bed:
        bed.client().seed(manifest, filled(manifest))
        with pytest.raises(ManifestMismatch, match=r"rule.*'dense/kernel' expected shape \(333,\)"):
            bed.client().seed(other, filled(other))
        assert bed.pulled(bed.workers(manifest, filled(manifest))[0])["trainable"].sum() == 0


def test_a_manifest_that_an_empty_server_cannot_read_is_refused_with_the_field():
    manifest = make_manifest(reduction="max")
    with cluster() as bed, pytest.raises(ManifestMismatch, match=r"'max' - at `\$\.reduction`"):
        bed.client().seed(manifest, filled(manifest))


def test_attach_waits_for_the_seed():
    manifest = make_manifest()
    with cluster(num_servers=2, num_workers=2) as bed:
        chief, other = bed.client(0), bed.client(1)
        attached, _ = succeeded(
            run_all(other.attach, partial(chief.seed, manifest, filled(manifest)))
        )
    assert attached == manifest


@pytest.mark.fault("F34")
def test_a_worker_that_finished_before_the_seed_is_not_waited_for():
    manifest = make_manifest(rule=ADD, consistency="sync")
    with cluster(num_servers=2, num_workers=2) as bed:
        bed.client(1).finish()
        chief = bed.client(0)
        chief.seed(manifest, filled(manifest))
        assert chief.push(filled(manifest, 1.0), hyper=HYPER, rows=1).clock == 1
        late = bed.client(1)
        late.attach()
        with pytest.raises(ServerPhaseError, match="final"):
            late.join()


def test_a_late_report_of_a_lost_attempt_leaves_the_newer_one_in_its_rendezvous():
    manifest = make_manifest()
    with cluster(num_workers=2) as bed:
        chief = bed.client(0)
        chief.seed(manifest, filled(manifest))
        newer = bed.client(1, generation=1)
        newer.attach()
        newer.join()

        def lose_then_meet() -> dict[int, bytes]:
            bed.driver().worker_lost(1, 0)
            return chief.rendezvous("epoch", b"chief", timeout_s=20.0)

        meet = partial(newer.rendezvous, "epoch", b"newer", timeout_s=20.0)
        met = succeeded(run_all(meet, lose_then_meet))
    assert met == [{0: b"chief", 1: b"newer"}] * 2


@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_a_worker_may_finish_while_the_servers_stop(consistency: str):
    manifest = make_manifest(consistency=consistency)
    with cluster(num_servers=2) as bed:
        (worker,) = bed.workers(manifest, filled(manifest))
        bed.driver().stop_servers("enough")
        worker.leave()
        worker.finish()
        with pytest.raises(ServerPhaseError, match="DRAINING"):
            worker.join()


@pytest.mark.fault("F19")
def test_attach_to_an_empty_server_ends_in_time_and_says_whom_to_ask():
    with cluster() as bed:
        client = bed.client()
        client.describe()  # connects, which a busy machine takes longer for
        with pytest.raises(RequestTimeout, match=r"ps:0 is still EMPTY.*chief"):
            client.attach(timeout_s=2.0)


def test_calls_before_seed_and_after_close_say_what_to_do():
    manifest = make_manifest()
    with cluster() as bed:
        client = bed.client()
        with pytest.raises(ServerPhaseError, match=r"seed\(\) or attach\(\)"):
            client.pull(filled(manifest))
        client.close()
        client.close()
        with pytest.raises(ClosedError, match="closed"):
            client.describe()


def test_a_manifest_larger_than_a_frames_meta_travels():
    params = tuple(ParamSpec(f"layer-{n:05}/{'x' * 100}", (3,)) for n in range(2000))
    manifest = Manifest(groups=(GroupSpec("trainable", "float32", ADD, params),))
    assert len(manifest.encode()) > 200_000
    with cluster(num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        assert clients[1].manifest == manifest


def test_async_push_pull_applies_and_returns_what_was_applied():
    manifest = make_manifest(statistics=5)
    values, grads = random_arrays(manifest, 1), random_arrays(manifest, 2)
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, values)
        into = filled(manifest, np.nan)
        ack = client.push_pull(grads, into, hyper=HYPER, rows=32)
        assert (ack.clock, ack.applied, ack.staleness) == (1, True, 0)
        expected = values["trainable"] - grads["trainable"] * np.float32(0.1)
        assert np.array_equal(into["trainable"], expected)
        assert np.array_equal(into["statistics"], grads["statistics"])
        assert np.array_equal(bed.pulled(client)["trainable"], expected)


def test_push_pull_streams_many_parts():
    """12 MB: several reads and several parts of the reply, also through the small pipe."""
    manifest = make_manifest(3_000_000, rule=ADD, bucket_bytes=262_144)
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        grads = random_arrays(manifest, 1)
        into = filled(manifest)
        client.push_pull(grads, into, hyper=HYPER, rows=1)
        assert np.array_equal(into["trainable"], grads["trainable"])


def test_two_servers_equal_one_bit_for_bit():
    manifest = make_manifest(2000, rule=Adam(), statistics=9, bucket_bytes=256)
    results = []
    for num_servers in (1, 2, 5):
        with cluster(num_servers=num_servers) as bed:
            (client,) = bed.workers(manifest, random_arrays(manifest, 0))
            into = filled(manifest)
            for step in range(5):
                client.push_pull(random_arrays(manifest, step), into, hyper=HYPER, rows=8)
            results.append(into)
    for other in results[1:]:
        assert all(np.array_equal(results[0][name], other[name]) for name in other)


def test_more_servers_than_buckets():
    manifest = make_manifest(3, rule=ADD)
    with cluster(num_servers=4) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        into = filled(manifest)
        client.push_pull(filled(manifest, 1.0), into, hyper=HYPER, rows=1)
        assert into["trainable"].tolist() == [1.0, 1.0, 1.0]


def test_eight_clients_many_adds_count_exactly():
    manifest = make_manifest(500, rule=ADD)
    with cluster(num_servers=2, num_workers=8) as bed:
        clients = bed.workers(manifest, filled(manifest))
        ones = filled(manifest, 1.0)

        def work(client):
            return [client.push(ones, hyper=HYPER, rows=3).applied for _ in range(25)]

        acks = succeeded(run_all(*(partial(work, client) for client in clients)))
        assert all(all(applied) for applied in acks)
        assert set(bed.pulled(clients[0])["trainable"]) == {200.0}
        for stats in clients[0].stats():
            assert [(w.pushes, w.rows) for w in stats.workers] == [(25, 75)] * 8
            assert stats.clock == 200
            assert sum(stats.staleness) == 200


def test_all_workers_are_served_beyond_the_limit_of_connections_that_nobody_has_chosen(monkeypatch):
    few = dataclasses.replace(DEFAULT_LIMITS, max_connections=2)
    monkeypatch.setattr("ps.server.server.DEFAULT_LIMITS", few)
    with cluster(num_workers=3) as bed:
        found = run_all(*(bed.client(rank, timeout_s=2).describe for rank in range(3)))
        assert [type(each) for each in found] == [list] * 3, found


def test_staleness_counts_the_updates_of_others():
    manifest = make_manifest(rule=ADD)
    with cluster(num_workers=2) as bed:
        one, other = bed.workers(manifest, filled(manifest))
        bed.pulled(other)
        for _ in range(3):
            assert one.push(filled(manifest, 1.0), hyper=HYPER, rows=1).staleness == 0
        assert other.push(filled(manifest, 1.0), hyper=HYPER, rows=1).staleness == 3


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sync_equals_the_numpy_reduction_bit_for_bit(reduction: str):
    manifest = make_manifest(statistics=6, consistency="sync", reduction=reduction)
    values, rows = random_arrays(manifest, 9), [32, 5, 27]
    with cluster(num_servers=2, num_workers=3) as bed:
        clients = bed.workers(manifest, values)
        into = [filled(manifest) for _ in clients]
        expected = {name: array.copy() for name, array in values.items()}
        for step in range(3):
            grads = [random_arrays(manifest, 10 * step + rank) for rank in range(3)]
            acks = push_all(clients, grads, into, rows)
            assert [ack.clock for ack in acks] == [step + 1] * 3
            weights = [np.float32(n / 64) for n in rows]
            parts = [
                g["trainable"] * (w if reduction == "mean" else np.float32(1))
                for g, w in zip(grads, weights, strict=True)
            ]
            expected["trainable"] -= ((parts[0] + parts[1]) + parts[2]) * np.float32(0.1)
            means = [g["statistics"] * w for g, w in zip(grads, weights, strict=True)]
            expected["statistics"] = (means[0] + means[1]) + means[2]
        for pulled in into:
            assert np.array_equal(pulled["trainable"], expected["trainable"])
            assert np.array_equal(pulled["statistics"], expected["statistics"])


def test_sync_uses_the_learning_rate_of_the_lowest_rank():
    manifest = make_manifest(consistency="sync")
    with cluster(num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        ones = filled(manifest, 1.0)
        succeeded(
            run_all(
                partial(clients[1].push, ones, hyper=Hyper(99.0), rows=1),
                partial(clients[0].push, ones, hyper=Hyper(0.5), rows=1),
            )
        )
        assert bed.pulled(clients[0])["trainable"][0] == -0.5


def test_sync_null_pushes_keep_the_barrier():
    manifest = make_manifest(consistency="sync")
    with cluster(num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        into = filled(manifest, np.nan)
        acks = succeeded(
            run_all(
                partial(clients[0].push_null, rows=32, into=into),
                partial(clients[1].push, filled(manifest, 1.0), hyper=HYPER, rows=4),
            )
        )
        assert [(ack.clock, ack.applied) for ack in acks] == [(1, False), (1, True)]
        assert np.array_equal(into["trainable"], np.full(1000, -0.1, np.float32))
        acks = succeeded(run_all(*(client.push_null for client in clients)))
        assert [ack.clock for ack in acks] == [2, 2]
        assert bed.pulled(clients[0])["trainable"][0] == np.float32(-0.1)


def test_async_null_push_changes_nothing():
    manifest = make_manifest()
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest, 1.0))
        into = filled(manifest)
        ack = client.push_null(into=into)
        assert (ack.clock, ack.applied) == (0, False)
        assert into["trainable"][0] == 1.0
        assert client.stats()[0].workers[0].null_pushes == 1


@pytest.mark.fault("F34")
def test_sync_workers_with_uneven_data_leave_and_join_without_a_hang():
    manifest = make_manifest(consistency="sync", rule=ADD, reduction="sum")
    steps = [[5, 0], [2, 7], [0, 3]]
    with cluster(num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))

        def work(client, mine):
            for epoch, count in enumerate(mine):
                for _ in range(count):
                    client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
                client.leave()
                client.rendezvous(f"end-{epoch}", b"", timeout_s=10)
                client.join()
                client.rendezvous(f"begin-{epoch}", b"", timeout_s=10)
            client.finish()
            return True

        succeeded(
            run_all(
                *(
                    partial(work, client, [epoch[rank] for epoch in steps])
                    for rank, client in enumerate(clients)
                )
            )
        )
        assert set(bed.pulled(clients[0])["trainable"]) == {17.0}
        assert {stats.clock for stats in clients[0].stats()} == {5 + 7 + 3}


@pytest.mark.fault("F34")
def test_sync_join_between_two_servers_clocks_gives_both_the_same_gradients():
    """Server 1 has completed clock 1 without the joining worker, server 0 has not."""
    manifest = make_manifest(consistency="sync", rule=ADD, reduction="sum")
    pieces = slice_by_server(Layout.of(manifest), 2)
    with cluster(num_servers=2, num_workers=2) as bed:
        _, joining = bed.workers(manifest, filled(manifest))
        joining.leave()
        ones = filled(manifest, 1.0)
        first = messages.Push(manifest.hash(), Number(1, 1), 1, HYPER, wait_s=10.0)

        def push_first(server: int):
            return raw_call(bed, server, first, views_per_server(ones, pieces)[server])

        assert push_first(1).clock == 1

        def late():
            wait_until(
                lambda: bed.servers[0].stats().missing == (0,), "the joining worker's null push"
            )
            return push_first(0)

        joined, ack = succeeded(run_all(joining.join, late))
        assert (joined.clock, ack.clock) == (1, 1)
        second = msgspec.structs.replace(first, number=Number(1, 2, 1))
        works = [
            partial(joining.push, filled(manifest, 10.0), hyper=HYPER, rows=1),
            partial(raw_call, bed, 0, second, views_per_server(ones, pieces)[0]),
            partial(raw_call, bed, 1, second, views_per_server(ones, pieces)[1]),
        ]
        assert [ack.clock for ack in succeeded(run_all(*works))] == [2, 2, 2]
        assert set(bed.pulled(joining)["trainable"]) == {12.0}


@pytest.mark.fault("F34")
def test_sync_worker_joining_in_the_middle_meets_the_same_clock_on_all_servers():
    """One worker steps all the time, the other joins and leaves at any moment."""
    manifest = make_manifest(consistency="sync", statistics=4, bucket_bytes=256)
    with cluster(num_servers=3, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))

        def steady():
            for _ in range(60):
                clients[0].push(filled(manifest, 1.0), hyper=HYPER, rows=1)
            clients[0].finish()

        def visitor():
            for _ in range(8):
                clients[1].leave()
                clients[1].join()
                clients[1].push(filled(manifest, 3.0), hyper=HYPER, rows=3)
            clients[1].finish()

        succeeded(run_all(steady, visitor))
        trainable = bed.pulled(clients[0])["trainable"]
        assert len(set(trainable.tolist())) == 1, "servers have reduced different gradients"
        assert len({stats.clock for stats in clients[0].stats()}) == 1


def test_sync_push_after_leave_says_join():
    manifest = make_manifest(consistency="sync")
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        client.leave()
        with pytest.raises(ServerPhaseError, match="join"):
            client.push(filled(manifest), hyper=HYPER, rows=1)
        client.join()
        assert client.push(filled(manifest), hyper=HYPER, rows=1).clock == 1


@pytest.mark.slow
def test_sync_barrier_times_out_naming_the_missing_worker():
    manifest = make_manifest(consistency="sync")
    with cluster(num_workers=2) as bed:
        bed.workers(manifest, filled(manifest))
        hasty = bed.client(1, timeout_s=4.0)
        hasty.attach(timeout_s=WAIT_S)
        with pytest.raises(RequestTimeout, match="waits for worker 0"):
            hasty.push(filled(manifest), hyper=HYPER, rows=1)
        with pytest.raises(ServerPhaseError, match="whether it was applied is unknown"):
            hasty.push(filled(manifest), hyper=HYPER, rows=1)


@pytest.mark.fault("F02")
def test_sync_lost_worker_ends_the_waiting_push_typed():
    manifest = make_manifest(consistency="sync")
    with cluster(num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))

        def lose():
            wait_until(
                lambda: all(server.stats().missing == (1,) for server in bed.servers),
                "worker 0 to wait",
            )
            bed.driver().worker_lost(1)

        pushed, _ = run_all(
            partial(clients[0].push, filled(manifest, 1.0), hyper=HYPER, rows=1), lose
        )
        assert isinstance(pushed, WorkerLost)
        assert "worker 1 was lost" in str(pushed)
        with pytest.raises(WorkerLost):
            clients[0].push(filled(manifest), hyper=HYPER, rows=1)
        with pytest.raises(StaleGeneration):
            clients[1].push(filled(manifest), hyper=HYPER, rows=1)
        assert bed.pulled(clients[0])["trainable"][0] == 0.0


@pytest.mark.fault("F02")
def test_sync_can_continue_without_the_lost_worker():
    manifest = make_manifest(consistency="sync", rule=ADD)
    with cluster(num_workers=2, on_lost="continue") as bed:
        clients = bed.workers(manifest, filled(manifest))

        def lose():
            wait_until(lambda: bed.servers[0].stats().missing == (1,), "worker 0 to wait")
            bed.servers[0].worker_lost(1)

        ack, _ = succeeded(
            run_all(partial(clients[0].push, filled(manifest, 1.0), hyper=HYPER, rows=1), lose)
        )
        assert (ack.clock, ack.applied) == (1, True)
        replaced = bed.client(1, generation=1)
        replaced.attach()
        replaced.join()
        works = [
            partial(client.push, filled(manifest, 1.0), hyper=HYPER, rows=1)
            for client in (clients[0], replaced)
        ]
        assert [ack.clock for ack in succeeded(run_all(*works))] == [2, 2]


@pytest.mark.fault("F01")
def test_async_goes_on_when_a_worker_is_lost():
    manifest = make_manifest(rule=ADD)
    with cluster(num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        clients[1].push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        bed.driver().worker_lost(1)
        assert clients[0].push(filled(manifest, 1.0), hyper=HYPER, rows=1).clock == 2
        with pytest.raises(StaleGeneration, match="must end"):
            clients[1].push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        assert bed.pulled(clients[0])["trainable"][0] == 2.0


@pytest.mark.fault("F06")
@pytest.mark.fault("F20")
def test_a_fenced_generation_is_refused_and_its_successor_is_not():
    manifest = make_manifest(rule=ADD)
    with cluster(num_servers=2) as bed:
        (old,) = bed.workers(manifest, filled(manifest))
        old.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        bed.driver().fence(0, 1)
        with pytest.raises(StaleGeneration, match="generation 0 was replaced"):
            old.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        new = bed.client(0, generation=1)
        new.attach()
        new.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        assert bed.pulled(new)["trainable"][0] == 2.0
        assert [stats.workers[0].pushes for stats in new.stats()] == [2, 2]


def test_a_late_report_of_an_old_generation_spares_the_new_one():
    manifest = make_manifest(rule=ADD)
    with cluster() as bed:
        bed.workers(manifest, filled(manifest))
        new = bed.client(0, generation=1)
        new.attach()
        new.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        bed.driver().worker_lost(0, 0)
        assert new.push(filled(manifest, 1.0), hyper=HYPER, rows=1).clock == 2


def test_two_clients_of_one_worker_do_not_disturb_each_other():
    manifest = make_manifest(rule=ADD)
    with cluster() as bed:
        (one,) = bed.workers(manifest, filled(manifest))
        other = bed.client(0)
        other.attach()
        for client in (one, other, other, one):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        assert bed.pulled(one)["trainable"][0] == 4.0


def test_assign_replaces_values_and_keeps_optimizer_slots():
    manifest = make_manifest(rule=Adam())
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        grads = random_arrays(manifest, 3)
        client.push(grads, hyper=HYPER, rows=1)
        first = bed.pulled(client)["trainable"]
        client.assign(filled(manifest, 5.0))
        assert bed.pulled(client)["trainable"][0] == 5.0
        client.push(grads, hyper=HYPER, rows=1)
        second = bed.pulled(client)["trainable"] - np.float32(5.0)
        assert not np.allclose(second, 0.0)
        assert np.allclose(second, first, atol=1e-4), "Adam's moments and step went on"


def test_rendezvous_gives_all_values_by_rank():
    with cluster(num_servers=2, num_workers=3) as bed:
        clients = [bed.client(rank) for rank in range(3)]
        for _ in range(2):  # the same key may be used again
            works = [
                partial(client.rendezvous, "epoch", b"v" * rank, timeout_s=10)
                for rank, client in enumerate(clients)
            ]
            assert succeeded(run_all(*works)) == [{0: b"", 1: b"v", 2: b"vv"}] * 3


@pytest.mark.fault("F34")
def test_rendezvous_does_not_wait_for_finished_or_lost_workers():
    manifest = make_manifest()
    with cluster(num_workers=3) as bed:
        clients = bed.workers(manifest, filled(manifest))
        clients[1].finish()
        clients[1].finish()
        values, _ = succeeded(
            run_all(
                partial(clients[0].rendezvous, "k", b"a", timeout_s=10),
                partial(bed.driver().worker_lost, 2),
            )
        )
        assert values == {0: b"a"}
        with pytest.raises(StaleGeneration, match="worker 2 generation 0"):
            clients[2].rendezvous("k", b"", timeout_s=1)
        with pytest.raises(ServerPhaseError, match="finish"):
            clients[1].rendezvous("k", b"", timeout_s=1)


def test_rendezvous_times_out_naming_the_missing():
    with cluster(num_workers=3) as bed:
        client = bed.client(0)
        client.describe()  # connects, which a busy machine takes longer for
        with pytest.raises(RequestTimeout, match=r"'epoch-3' still waits for worker 1, 2"):
            client.rendezvous("epoch-3", b"", timeout_s=1.0)


@pytest.mark.parametrize("timeout_s", [1e-9, -1.0])
def test_a_rendezvous_whose_time_is_over_before_it_is_sent_names_the_missing(timeout_s: float):
    """As after a turn that ps:0 restored in, or that the process stood still in."""
    with cluster(num_workers=2) as bed:
        client = bed.client(0)
        client.describe()  # connects, which a busy machine takes longer for
        with pytest.raises(RequestTimeout, match="'k' still waits for worker 1"):
            client.rendezvous("k", b"x", timeout_s=timeout_s)


@pytest.mark.fault("F48")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_async_refuses_a_nonfinite_gradient_and_leaves_its_bucket(bad: float):
    manifest = make_manifest(rule=ADD)
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        grads = filled(manifest, 1.0)
        grads["trainable"][700] = bad
        with pytest.raises(NonFiniteGradient, match=r"'dense/bias'.*worker:0"):
            client.push_pull(grads, filled(manifest), hyper=HYPER, rows=1)
        values = bed.pulled(client)["trainable"]
        assert np.isfinite(values).all()
        assert values[700] == 0.0
        assert client.push(filled(manifest, 1.0), hyper=HYPER, rows=1).applied
        assert client.stats()[0].workers[0].refused == 1


@pytest.mark.fault("F48")
def test_sync_refused_gradient_counts_as_null_so_the_others_go_on():
    manifest = make_manifest(consistency="sync", rule=ADD)
    with cluster(num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        grads = filled(manifest, 1.0)
        grads["trainable"][0] = np.nan
        refused, ack = run_all(
            partial(clients[0].push, grads, hyper=HYPER, rows=1),
            partial(clients[1].push, filled(manifest, 1.0), hyper=HYPER, rows=1),
        )
        assert isinstance(refused, NonFiniteGradient)
        assert (ack.clock, ack.applied) == (1, True)
        works = [partial(c.push, filled(manifest, 1.0), hyper=HYPER, rows=1) for c in clients]
        assert [ack.clock for ack in succeeded(run_all(*works))] == [2, 2]
        assert bed.pulled(clients[0])["trainable"][0] == 2.0


@pytest.mark.fault("F48")
def test_sync_a_refused_worker_may_push_again_at_once():
    manifest = make_manifest(consistency="sync", rule=ADD)
    with cluster(num_workers=2) as bed:
        (server,) = bed.servers
        first, second = bed.workers(manifest, filled(manifest))

        def refused_then_good() -> int:
            with pytest.raises(NonFiniteGradient):
                first.push(filled(manifest, np.nan), hyper=HYPER, rows=1)
            return first.push(filled(manifest, 4.0), hyper=HYPER, rows=1).clock

        def late_then_good() -> int:
            wait_until(lambda: server.stats().missing == (1,), "worker 0's refused push")
            second.push(filled(manifest, 2.0), hyper=HYPER, rows=1)
            return second.push(filled(manifest, 2.0), hyper=HYPER, rows=1).clock

        assert succeeded(run_all(refused_then_good, late_then_good)) == [2, 2]
        assert bed.pulled(first)["trainable"][0] == 5.0


def test_sync_sum_that_overflows_is_refused_and_changes_nothing():
    manifest = make_manifest(consistency="sync", rule=ADD, reduction="sum")
    with cluster(num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        huge = filled(manifest, 3e38)
        results = run_all(*(partial(c.push, huge, hyper=HYPER, rows=1) for c in clients))
        assert [type(result) for result in results] == [NonFiniteGradient] * 2
        assert bed.pulled(clients[0])["trainable"][0] == 0.0


def test_seeding_nonfinite_values_is_refused():
    manifest = make_manifest()
    with cluster() as bed:
        values = filled(manifest)
        values["trainable"][3] = np.nan
        with pytest.raises(NonFiniteGradient, match="dense/kernel"):
            bed.client().seed(manifest, values)
        assert bed.client().describe()[0].phase == "EMPTY"


@pytest.mark.fault("F47")
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"trainable": np.zeros(999, np.float32)}, r"float32\[1000\], got float32\[999\]"),
        ({"trainable": np.zeros((10, 100), np.float32)}, r"got float32\[10, 100\]"),
        ({"trainable": np.zeros(1000, np.float64)}, r"got float64\[1000\]"),
        ({"trainable": np.zeros(2000, np.float32)[::2]}, "contiguous"),
        ({"trainable": [0.0] * 1000}, "got list"),
        ({}, r"groups \['trainable'\], got \[\]"),
        ({"trainable": np.zeros(1000, np.float32), "x": np.zeros(1)}, "'x'"),
    ],
    ids=["size", "rank", "dtype", "stride", "list", "missing", "unknown"],
)
def test_wrong_arrays_are_refused_before_anything_is_sent(wrong: dict, text: str):
    manifest = make_manifest()
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        with pytest.raises(ShapeError, match=text):
            client.push(wrong, hyper=HYPER, rows=1)
        assert client.push(filled(manifest), hyper=HYPER, rows=1).clock == 1


def test_into_must_be_writable():
    manifest = make_manifest()
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        into = filled(manifest)
        into["trainable"].flags.writeable = False
        with pytest.raises(ShapeError, match="writable"):
            client.pull(into)


@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_scalars_that_do_not_fit_the_rule_change_nothing(consistency: str):
    hyper = Hyper(0.1, {"trainable": (1.0, 2.0)})
    manifest = make_manifest(rule=Adam(), consistency=consistency)
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest, 1.0))
        with pytest.raises(PSSettingsError, match="takes the step scalars: alpha"):
            client.push(filled(manifest, 1.0), hyper=hyper, rows=1)
        assert set(bed.pulled(client)["trainable"]) == {1.0}
        assert client.push(filled(manifest), hyper=HYPER, rows=1).clock == 1


def test_rows_of_a_push_are_checked():
    manifest = make_manifest()
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        with pytest.raises(PSSettingsError, match="at least 1 row, got 0"):
            client.push(filled(manifest), hyper=HYPER, rows=0)


@pytest.mark.attack("A15")
def test_roles_are_checked_on_the_wire():
    manifest = make_manifest()
    with cluster(num_workers=2) as bed:
        chief, other = bed.workers(manifest, filled(manifest))
        for call in (
            lambda: chief.stop_servers("no"),
            lambda: chief.fence(1, 5),
            lambda: chief.worker_lost(1),
            lambda: other.assign(filled(manifest)),
            lambda: other.seed(manifest, filled(manifest)),
        ):
            with pytest.raises(RoleError, match="may not call"):
                call()
        with pytest.raises(RoleError, match=r"workers 0\.\.1"):
            bed.client(2).describe()
        with pytest.raises(RoleError, match="feeder"):
            bed.client(role=Role.FEEDER).stop_servers("no")


def test_endpoints_in_the_wrong_order_are_refused():
    with cluster(num_servers=2) as bed:
        client = bed.client(endpoints=bed.endpoints[::-1])
        with pytest.raises(PSSettingsError, match="order of ranks"):
            client.describe()


def test_a_client_of_another_cluster_size_is_refused():
    manifest = make_manifest()
    with cluster(num_servers=2) as bed:
        bed.workers(manifest, filled(manifest))
        with pytest.raises(ManifestMismatch, match="2 servers and 1 workers"):
            bed.client(endpoints=bed.endpoints[:1]).attach()
        with pytest.raises(ManifestMismatch, match="2 servers and 1 workers"):
            bed.client(endpoints=bed.endpoints[:1]).seed(manifest, filled(manifest))


def test_stop_ends_waiting_pushes_and_still_answers_pulls():
    manifest = make_manifest(consistency="sync")
    with cluster(num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest, 1.0))
        (server,) = bed.servers

        def stop():
            wait_until(lambda: server.stats().missing == (1,), "worker 0 to wait")
            bed.driver().stop_servers("enough")

        pushed, _ = run_all(partial(clients[0].push, filled(manifest), hyper=HYPER, rows=1), stop)
        assert isinstance(pushed, ServerPhaseError)
        assert "DRAINING (enough)" in str(pushed)
        assert server.wait_stopped(1.0)
        assert bed.pulled(clients[0])["trainable"][0] == 1.0
        with pytest.raises(ServerPhaseError, match="DRAINING"):
            clients[1].push(filled(manifest), hyper=HYPER, rows=1)


def test_a_server_ends_after_it_has_answered_the_stop_request():
    service = Service(ServerSettings(rank=0, num_servers=1, num_workers=1), open_connections=int)
    may_end: list[bool] = []

    class StopCall:
        peer = Identity(Role.DRIVER, 0)
        meta = messages.encode(messages.StopServer("enough"))

        def reply(self, meta: bytes, buffers: object) -> None:
            may_end.append(service.life.stopping.is_set())

    service.handle(cast("Call", StopCall()))
    assert (may_end, service.life.stopping.is_set()) == ([False], True)


@pytest.mark.fault("F11")
def test_a_server_that_is_replaced_during_a_push_does_not_acknowledge_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(successor_watch, "LOOK_S", 0.0)
    manifest = make_manifest(rule=ADD)
    credentials = Credentials("c", b"s" * 32)
    settings = ServerSettings(rank=0, num_servers=1, num_workers=1)
    fences = [GenerationFence(storage_at(str(tmp_path)), "c", 0)]
    with PSServer(settings, credentials, guard=fences[0]) as server:
        server.bind_tcp("127.0.0.1")
        server.start()
        apply = DenseShard.update

        def update(*arguments) -> None:
            fences.append(GenerationFence(storage_at(str(tmp_path)), "c", 0))
            fences[-1].claim()
            apply(*arguments)

        monkeypatch.setattr(DenseShard, "update", update)
        identity = Identity(Role.WORKER, 0)
        with PSClient(
            [server.endpoint], credentials, identity, num_workers=1, reconnect_s=0.1
        ) as client:
            client.seed(manifest, filled(manifest))
            with pytest.raises(PSError, match=r"replaced by start|could not be reached"):
                client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
    assert len(fences) > 1


@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_a_saved_run_goes_on_in_new_servers(consistency: str, tmp_path: Path):
    manifest = make_manifest(rule=Adam(), consistency=consistency, statistics=5)

    def steps(client, into, numbers):
        for step in numbers:
            client.push_pull(random_arrays(manifest, step), into, hyper=HYPER, rows=4)

    whole, resumed = filled(manifest), filled(manifest)
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, random_arrays(manifest, 99))
        steps(client, whole, range(3))
        client.save(tmp_path, 3)
        steps(client, whole, range(3, 6))
    with cluster(num_servers=3) as bed:
        client = bed.client()
        assert client.restore(tmp_path) == 3
        assert [server.clock for server in client.describe()] == [3] * 3
        client.seed(manifest, filled(manifest))  # adopts, never overwrites
        steps(client, resumed, range(3, 6))
    assert all(np.array_equal(whole[name], resumed[name]) for name in whole)


def test_restore_into_a_serving_shard_is_refused(tmp_path: Path):
    manifest = make_manifest()
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        client.save(tmp_path, 1)
        with pytest.raises(ServerPhaseError, match="EMPTY"):
            client.restore(tmp_path)


def test_a_run_that_resumes_is_told_that_the_checkpoint_keeps_what_it_would_change(tmp_path: Path):
    saved, other = make_manifest(rule=Adam()), make_manifest(rule=Adam(beta_1=0.5))
    with cluster() as bed:
        bed.workers(saved, filled(saved))[0].save(tmp_path, 7)
    with cluster() as bed:
        bed.client().restore(tmp_path)
        with pytest.raises(ManifestMismatch, match=r"rule.*resumes from step 7 of a checkpoint"):
            bed.client().seed(other, filled(other))


def test_a_step_is_saved_once(tmp_path: Path):
    manifest = make_manifest()
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        client.save(tmp_path, 1)
        with pytest.raises(CheckpointError, match="step 1 exists"):
            client.save(tmp_path, 1)
        assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["lease.json", "step-1"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.attack("A10")
@pytest.mark.parametrize("consistency", ["async", "sync", "hybrid"])
def test_a_quiet_client_goes_on_after_any_number_of_others(consistency: str):
    is_hybrid = consistency == "hybrid"
    manifest = msgspec.structs.replace(
        make_manifest(rule=ADD),
        consistency=consistency,
        tables=(table(),) if is_hybrid else (),
        staleness_bound=int(is_hybrid),
    )
    ones = filled(manifest, 1.0)
    with cluster() as bed:
        clients = bed.workers(manifest, filled(manifest))
        clients += [bed.client() for _ in range(20)]
        for number, client in enumerate([*clients, *clients], start=1):
            client.attach()
            if is_hybrid:
                with client.tables.batch({"user": [7]}) as batch:
                    batch.push({"user": np.ones((1, 4), np.float32)}, hyper=HYPER)
            assert client.push(ones, hyper=HYPER, rows=1).clock == number
        assert bed.pulled(clients[0])["trainable"][0] == 2 * len(clients)


@pytest.mark.fault("F08")
def test_only_lost_updates_are_counted_as_lost(tmp_path: Path):
    manifest = msgspec.structs.replace(make_manifest(rule=ADD), tables=(table(),))
    ones = filled(manifest, 1.0)
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        client.push(ones, hyper=HYPER, rows=1)
        client.save(tmp_path, 1)
        for _ in range(5):
            client.leave()
            client.join()
        client.push_null()
        client.push(ones, hyper=HYPER, rows=1)
        client.tables.push({"user": ([7], np.ones((1, 4), np.float32))}, hyper=HYPER)
        client.assign(filled(manifest, 5.0))
        restart(bed)
        bed.client().restore(tmp_path)
        client.leave()
        assert client.stats()[0].lost_updates == 3


@pytest.mark.fault("F06")
def test_a_server_restored_by_hand_knows_a_fence_from_the_newer_attempt(tmp_path: Path):
    """Its checkpoint may be another run's, whose attempts count from 0 again."""
    manifest = make_manifest(rule=ADD)
    ones = filled(manifest, 1.0)
    with cluster() as bed:
        (older,) = bed.workers(manifest, filled(manifest))
        newer = bed.client(0, 1)
        newer.attach()
        newer.push(ones, hyper=HYPER, rows=1)
        newer.save(tmp_path, 1)
        restart(bed)
        bed.driver().restore(tmp_path)
        older.push(ones, hyper=HYPER, rows=1)
        newer.push(ones, hyper=HYPER, rows=1)
        with pytest.raises(StaleGeneration, match="generation 0 was replaced"):
            older.push(ones, hyper=HYPER, rows=1)
        assert bed.pulled(newer)["trainable"][0] == 3.0


@pytest.mark.fault("F08")
def test_a_live_client_of_restored_servers_goes_on_and_the_loss_is_counted(tmp_path: Path):
    manifest = make_manifest(rule=ADD)
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        ones = filled(manifest, 1.0)
        client.push(ones, hyper=HYPER, rows=1)
        client.save(tmp_path, 1)
        client.push(ones, hyper=HYPER, rows=1)
        client.push(ones, hyper=HYPER, rows=1)
        restart(bed)
        chief = bed.client()
        chief.restore(tmp_path)
        client.push(ones, hyper=HYPER, rows=1)
        assert bed.pulled(client)["trainable"][0] == 2.0
        assert client.stats()[0].lost_updates == 2


@pytest.mark.fault("F30")
def test_a_server_that_was_restarted_empty_is_noticed():
    manifest = make_manifest(rule=ADD)
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        restart(bed)
        with pytest.raises(ServerPhaseError, match="EMPTY"):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        bed.client().seed(manifest, filled(manifest))
        with pytest.raises(SequenceGap, match=r"lost updates\. Restore the last checkpoint"):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)


def restart(bed: Cluster) -> None:
    """Replace the only server by an empty one at the same endpoint."""
    (old,) = bed.servers
    old.close()
    new = PSServer(old.settings, bed.credentials, generation=1)
    new.bind_inproc(old.endpoint.inproc)
    new.start()
    bed.servers[:] = [new]


def test_a_refused_push_that_still_stands_at_the_barrier_is_overdue():
    """Its worker would push again, beside what still waits there."""
    manifest = make_manifest(60, consistency="sync")
    with cluster(num_workers=2) as bed:
        client, _ = bed.workers(manifest, filled(manifest))
        client.timeout_s = 1.0
        with pytest.raises(RequestTimeout, match="clock 0 still waits for worker 1"):
            client.push(filled(manifest, np.nan), hyper=Hyper(0.1), rows=1)
