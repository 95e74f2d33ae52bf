"""Stale synchronous parallel over real servers: the bound, who waits, and for whom nobody does."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.errors import (
    NonFiniteGradient,
    PSSettingsError,
    RequestTimeout,
    ServerPhaseError,
    StaleGeneration,
)
from ps.manifest.manifest import Hyper
from ps.protocol import messages
from ps.protocol.messages import Number
from tests.support.ps_cluster import (
    ADD,
    WAIT_S,
    Cluster,
    cluster,
    filled,
    make_manifest,
    raw_call,
    run_all,
    succeeded,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

HYPER = Hyper(0.5)


def ssp(bound: int, size: int = 1000, **options):
    return make_manifest(
        size, rule=ADD, consistency="ssp", staleness_bound=bound, bucket_bytes=64, **options
    )


def add(client: PSClient, amount: float = 1.0) -> int:
    return client.push(filled(client.manifest, amount), hyper=HYPER, rows=1).clock


def until_waits_for(bed: Cluster, *ranks: int) -> None:
    wait_until(
        lambda: all(server.stats().missing == ranks for server in bed.servers),
        f"somebody to wait for {ranks}",
    )


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_every_read_holds_everybodys_updates_up_to_the_bound(bound: int):
    """Each worker adds 1 to its own slot each clock, then reads all: slot >= clock - s.

    The slots stand on several servers. The workers run at the speeds that the machine gives them,
    and each stands still now and then until another has had the time to run away.
    """
    num_workers, num_clocks = 4, 30
    manifest = ssp(bound, size=num_workers * 16)
    with cluster(num_servers=2, num_workers=num_workers) as bed:
        clients = bed.workers(manifest, filled(manifest))
        leads: list[int] = []

        def work(rank: int) -> None:
            own, into = filled(manifest), filled(manifest)
            own["trainable"][rank * 16 : (rank + 1) * 16] = 1.0
            pause = threading.Event()
            for clock in range(1, num_clocks + 1):
                if clock % num_workers == rank:
                    pause.wait(0.002)
                if clock % 2:
                    clients[rank].push_pull(own, into, hyper=HYPER, rows=1)
                else:
                    clients[rank].push(own, hyper=HYPER, rows=1)
                    clients[rank].pull(into)
                slots = into["trainable"].reshape(num_workers, 16)
                assert (slots >= clock - bound).all(), f"worker {rank} at {clock} read {slots}"
                assert (slots[rank] == clock).all()
                leads.append(clock - int(slots.min()))
            clients[rank].leave()

        succeeded(run_all(*(partial(work, rank) for rank in range(num_workers))))
        assert max(leads) <= bound
        assert set(bed.pulled(clients[0])["trainable"]) == {float(num_clocks)}
        assert {stats.clock for stats in clients[0].stats()} == {num_workers * num_clocks}


def test_the_push_waits_and_the_pull_does_not():
    manifest = ssp(1)
    with cluster(num_servers=2, num_workers=2) as bed:
        fast, slow = bed.workers(manifest, filled(manifest))
        add(fast)

        def let_go() -> float:
            until_waits_for(bed, 1)
            seen = float(bed.pulled(slow)["trainable"][0])
            add(slow)
            return seen

        clock, seen = succeeded(run_all(partial(add, fast), let_go))
        assert seen == 2.0, "applied as it arrived, though its sender waits"
        assert clock == 3


def test_the_values_of_a_held_push_are_those_after_its_release():
    """More than one part of a reply: nothing may be sent before the slowest has caught up."""
    manifest = make_manifest(
        2_500_000, rule=ADD, consistency="ssp", staleness_bound=0, bucket_bytes=262_144
    )
    with cluster(num_workers=2) as bed:
        fast, slow = bed.workers(manifest, filled(manifest))
        into = filled(manifest)

        def catch_up() -> None:
            until_waits_for(bed, 1)
            add(slow)

        pushed = partial(fast.push_pull, filled(manifest, 1.0), into, hyper=HYPER, rows=1)
        succeeded(run_all(pushed, catch_up))
        assert set(into["trainable"]) == {2.0}


def test_one_worker_is_async():
    manifest = ssp(0)
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        assert [add(client) for _ in range(5)] == [1, 2, 3, 4, 5]


@pytest.mark.fault("F34")
@pytest.mark.parametrize("how", ["leave", "finish", "lost"])
def test_a_worker_that_is_gone_lets_the_others_go(how: str):
    manifest = ssp(0)
    with cluster(num_servers=2, num_workers=2) as bed:
        staying, going = bed.workers(manifest, filled(manifest))

        def go() -> None:
            until_waits_for(bed, 1)
            if how == "lost":
                bed.driver().worker_lost(1)
            else:
                getattr(going, how)()

        assert succeeded(run_all(partial(add, staying), go))[0] == 1
        assert [add(staying), add(staying)] == [2, 3]


@pytest.mark.fault("F06")
def test_a_frozen_worker_that_waited_is_fenced_and_its_update_stays():
    manifest = ssp(0)
    with cluster(num_workers=2) as bed:
        other, frozen = bed.workers(manifest, filled(manifest))

        def lose() -> None:
            until_waits_for(bed, 0)
            bed.driver().worker_lost(1)

        pushed, _ = run_all(partial(add, frozen), lose)
        assert isinstance(pushed, StaleGeneration)
        assert add(other) == 2
        assert set(bed.pulled(other)["trainable"]) == {2.0}
        assert [worker.pushes for worker in other.stats()[0].workers] == [1, 1]


def test_a_worker_joins_all_servers_at_the_same_clock():
    """Two that did not might wait for each other: each ahead of the other at one server."""
    manifest = ssp(1, size=100)
    with cluster(num_servers=2, num_workers=2) as bed:
        staying, joining = bed.workers(manifest, filled(manifest))
        joining.leave()
        add(staying)
        on_its_way = messages.Push(manifest.hash(), Number(9, 1), 0, null=True)
        raw_call(bed, 1, on_its_way, rank=0)  # what ps:0 does not know of yet
        joining.join()
        seen = [
            raw_call(bed, at, messages.Join(Number(9, 1)), rank=1).worker_clock for at in (0, 1)
        ]
        assert seen == [2, 2]


def test_a_replaced_worker_joins_at_the_slowest_clock():
    manifest = ssp(1)
    with cluster(num_servers=2, num_workers=2) as bed:
        staying, lost = bed.workers(manifest, filled(manifest))
        bed.driver().worker_lost(1)
        for _ in range(10):
            add(staying)
        newer = bed.client(1, generation=1)
        newer.attach()  # which joins
        assert [add(newer), add(staying)] == [11, 12]
        with pytest.raises(StaleGeneration):
            add(lost)
        newer.leave()
        with pytest.raises(ServerPhaseError, match=r"join\(\)"):
            add(newer)


@pytest.mark.fault("F48")
def test_a_refused_gradient_still_counts_as_a_clock():
    """Else the servers' clocks would drift apart, one refusal on one server at a time."""
    manifest = ssp(0, size=100)
    with cluster(num_servers=2, num_workers=2) as bed:
        bad, good = bed.workers(manifest, filled(manifest))
        gradient = filled(manifest, 1.0)
        gradient["trainable"][0] = np.nan

        def refused() -> None:
            for _ in range(5):
                with pytest.raises(NonFiniteGradient, match="dense/kernel"):
                    bad.push(gradient, hyper=HYPER, rows=1)

        def steady() -> list[int]:
            return [add(good) for _ in range(5)]

        succeeded(run_all(refused, steady))
        values = bed.pulled(good)["trainable"]
        assert values[0] == 5.0
        assert values[-1] == 10.0
        assert succeeded(run_all(partial(add, bad), partial(add, good)))


def test_null_pushes_keep_a_worker_in_step():
    manifest = ssp(0)
    with cluster(num_workers=2) as bed:
        one, other = bed.workers(manifest, filled(manifest))
        works = (partial(one.push_null, into=filled(manifest)), partial(add, other))
        null, clock = succeeded(run_all(*works))
        assert (null.applied, clock) == (False, 1)


def test_a_wait_that_is_too_long_names_the_slowest():
    manifest = ssp(0)
    with cluster(num_workers=2) as bed:
        bed.workers(manifest, filled(manifest))
        hasty = bed.client(1, timeout_s=4.0)
        hasty.attach(timeout_s=WAIT_S)
        with pytest.raises(RequestTimeout, match="waits for worker 0"):
            add(hasty)


def test_stopping_servers_answer_a_push_that_is_applied():
    manifest = ssp(0)
    with cluster(num_workers=2) as bed:
        one, _ = bed.workers(manifest, filled(manifest))

        def stop() -> None:
            until_waits_for(bed, 1)
            bed.driver().stop_servers("enough")

        assert succeeded(run_all(partial(add, one), stop))[0] == 1
        assert bed.pulled(one)["trainable"][0] == 1.0


@pytest.mark.parametrize("consistency", ["async", "ssp"])
def test_a_stale_gradient_moves_the_values_less(consistency: str):
    manifest = make_manifest(
        consistency=consistency,
        staleness_bound=9 if consistency == "ssp" else 0,
        staleness_aware=True,
    )
    with cluster(num_workers=2) as bed:
        one, other = bed.workers(manifest, filled(manifest))
        into = filled(manifest)
        ones = filled(manifest, 1.0)
        other.pull(into)
        for _ in range(3):
            one.push(ones, hyper=HYPER, rows=1)
        assert other.push_pull(ones, into, hyper=HYPER, rows=1).staleness == 3
        assert set(into["trainable"]) == {-1.5 - 0.5 / 4}
        other.push_pull(ones, into, hyper=HYPER, rows=1)
        assert set(into["trainable"]) == {-2.0 - 0.5 / 4}, "it has seen the others' updates now"


def test_a_push_that_was_computed_before_the_last_answer_is_as_old_as_its_parameters():
    manifest = make_manifest(staleness_aware=True)
    with cluster(num_workers=2) as bed:
        one, other = bed.workers(manifest, filled(manifest))
        into, ones = filled(manifest), filled(manifest, 1.0)
        one.pull(into)
        other.push(ones, hyper=HYPER, rows=1)
        acks = [one.push_pull(ones, into, hyper=HYPER, rows=1, lag=lag) for lag in (0, 1, 2, 2)]
        assert [ack.staleness for ack in acks] == [1, 1, 1, 0], (
            "three of them with the values of the pull"
        )
        assert set(into["trainable"]) == {-0.5 * (1 + 3 / 2 + 1)}


def test_scalars_of_a_step_are_refused_where_the_server_scales_the_rate():
    manifest = make_manifest(staleness_aware=True)
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        hyper = Hyper(0.5, {"trainable": ()})
        with pytest.raises(PSSettingsError, match="send the learning rate alone"):
            client.push(filled(manifest, 1.0), hyper=hyper, rows=1)
        assert set(bed.pulled(client)["trainable"]) == {0.0}
