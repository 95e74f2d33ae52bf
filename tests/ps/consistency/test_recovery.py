"""One server of several is started again from a checkpoint; the workers and the others live on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.client import retry
from ps.client.channel import OutgoingCall
from ps.client.client import PSClient
from ps.errors import NonFiniteGradient, StaleGeneration
from ps.manifest.manifest import SGD, Hyper, WorkerRank
from ps.protocol.messages import Ack
from rpc.client.connection import Reply
from rpc.errors import PeerGone, RemoteError
from tests.support.ps_cluster import (
    ADD,
    WAIT_S,
    Arrays,
    Cluster,
    cluster,
    filled,
    is_second_round,
    make_manifest,
    random_arrays,
    run_all,
    succeeded,
)
from tests.support.tables import table, with_tables
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

HYPER = Hyper(0.1)


def step_of_all(clients: list[PSClient], grads: Arrays) -> list[int]:
    pushes = [partial(client.push, grads, hyper=HYPER, rows=4) for client in clients]
    return [ack.clock for ack in succeeded(run_all(*pushes))]


@contextmanager
def saved_after_a_step(
    root: Path, mode: str = "sync", *, bound: int = 0, num_servers: int = 2
) -> Iterator[tuple[Cluster, list[PSClient], Arrays]]:
    """Servers with two workers and a gradient, saved after one step of both."""
    manifest = make_manifest(600, rule=SGD(), consistency=mode, staleness_bound=bound)
    with cluster(num_servers=num_servers, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        grads = random_arrays(manifest, 1)
        step_of_all(clients, grads)
        clients[0].save(root, 1)
        yield bed, clients, grads


def halves(bed: Cluster, client: PSClient) -> list[np.ndarray]:
    """What each of two servers holds."""
    values = bed.pulled(client)["trainable"]
    return np.split(values, [client._dense.pieces[0][-1].stop])


def before_the_second_round(clients, act):
    """Call `act` once all clients have their first answers, and let them go on after it."""
    barrier = threading.Barrier(len(clients), action=act)
    for client in clients:
        change = client._servers.change

        def held(request, *, client=client, change=change, **options):
            if is_second_round(request):
                client._servers.change = change
                barrier.wait(WAIT_S)
            return change(request, **options)

        client._servers.change = held


@pytest.mark.fault("F08")
@pytest.mark.parametrize(
    "rule", [SGD(global_clipnorm=1.0), SGD(clipnorm=0.5)], ids=["global_clipnorm", "clipnorm"]
)
def test_a_server_restarted_between_the_rounds_of_a_clipped_push_trains_on(tmp_path: Path, rule):
    manifest = make_manifest(600, rule=rule, consistency="sync")
    with cluster(num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        grads = random_arrays(manifest, 1)
        for _ in range(3):
            step_of_all(clients, grads)
        clients[0].save(tmp_path, 3)
        for _ in range(3):
            step_of_all(clients, grads)
        before_the_second_round(clients, lambda: bed.restart(1, tmp_path))
        assert step_of_all(clients, grads) == [7, 7]
        for clock in (8, 9):
            before = halves(bed, clients[0])
            assert step_of_all(clients, grads) == [clock, clock]
            assert [server.stats().clock for server in bed.servers] == [clock, clock]
            for old, new in zip(before, halves(bed, clients[0]), strict=True):
                assert (old != new).any()
        clients[0].save(tmp_path, 9, timeout_s=WAIT_S)


def moved(bed: Cluster, client: PSClient, before: list[np.ndarray]) -> list[np.ndarray]:
    """By how much each of two servers has changed what it held before."""
    return [new - old for old, new in zip(before, halves(bed, client), strict=True)]


@pytest.mark.fault("F08")
def test_a_worker_that_a_restarted_server_has_forgotten_drops_no_step_at_the_others(tmp_path: Path):
    """Worker 0 settles at the new server first, and at the other once worker 1 is answered."""
    manifest = make_manifest(600, rule=SGD(global_clipnorm=1e9), consistency="sync")
    with cluster(num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        grads = random_arrays(manifest, 1)
        step_of_all(clients, grads)
        clients[0].save(tmp_path, 1)
        before = halves(bed, clients[0])
        gate = bed.servers[1]._service.life.loaded().gate
        wait, change = gate.wait, clients[0]._servers.change
        restarted, is_answered = threading.Event(), threading.Event()

        def answers_worker_0(push, *args):
            clock = wait(push, *args)
            assert push.id.worker == 0 or restarted.wait(WAIT_S)  # too late: it is cut by then
            return clock

        def settles_one_by_one(request, **options):
            if not is_second_round(request):
                return change(request, **options)
            kept, gone = clients[0]._servers.links
            bed.restart(1, tmp_path)
            restarted.set()
            change(request, **{**options, "links": [gone]})
            assert is_answered.wait(WAIT_S)
            return change(request, **{**options, "links": [kept]})

        gate.wait = answers_worker_0  # type: ignore[method-assign]
        clients[0]._servers.change = settles_one_by_one  # type: ignore[method-assign]
        into = filled(manifest, np.nan)

        def worker_0() -> None:
            wait_until(lambda: bool(gate.waiting), "worker 1's push waits")
            clients[0].push(grads, hyper=HYPER, rows=4)

        def worker_1() -> None:
            clients[1].push_pull(grads, into, hyper=HYPER, rows=4)
            is_answered.set()

        succeeded(run_all(worker_0, worker_1))
        kept, gone = moved(bed, clients[0], before)
        np.testing.assert_allclose(kept, -0.1 * grads["trainable"][: len(kept)], rtol=1e-4)
        assert not gone.any()
        np.testing.assert_array_equal(into["trainable"], bed.pulled(clients[0])["trainable"])
        assert bed.servers[1].stats().lost_updates == 2


@pytest.mark.fault("F08")
def test_a_step_whose_norm_nobody_has_is_clipped_by_what_is_left_of_it(tmp_path: Path):
    """A server has answered no worker before it is started again, and one that is away told it."""
    manifest = make_manifest(600, rule=SGD(global_clipnorm=1.0), consistency="sync")
    with cluster(num_servers=2, num_workers=3) as bed:
        away, *clients = bed.workers(manifest, filled(manifest))
        away.leave()
        grads = random_arrays(manifest, 1)
        step_of_all(clients, grads)
        away.save(tmp_path, 1)
        before = halves(bed, away)
        shard = bed.servers[1]._service.life.loaded()
        restarted = threading.Event()

        def answers_nobody(ack, *_args, **_options):
            assert restarted.wait(WAIT_S)
            return ack, ()

        shard._squares = answers_nobody  # type: ignore[method-assign]

        def others() -> None:
            wait_until(lambda: shard.gate.clock == 2, "the step is complete")
            away.leave()
            bed.restart(1, tmp_path)
            restarted.set()
            away.leave()

        pushes = [partial(each.push, grads, hyper=HYPER, rows=4) for each in clients]
        succeeded(run_all(others, *pushes))
        kept, gone = moved(bed, away, before)
        part = grads["trainable"][: len(kept)]
        np.testing.assert_allclose(kept, -0.1 * part / np.linalg.norm(part), rtol=1e-4, atol=1e-7)
        assert not gone.any()
        assert bed.servers[1].stats().lost_updates == 2
        assert step_of_all(clients, grads) == [3, 3]
        assert [server.stats().clock for server in bed.servers] == [3, 3]


def test_a_worker_that_comes_too_late_settles_no_later_step():
    """Its push is for clock 2; the servers have reduced clock 3 and wait for worker 0 alone."""
    manifest = make_manifest(600, rule=SGD(global_clipnorm=1e9), consistency="sync")
    with cluster(num_servers=2, num_workers=2, on_lost="continue") as bed:
        first, lost = bed.workers(manifest, filled(manifest))
        grads = random_arrays(manifest, 1)
        step_of_all([first, lost], grads)
        for server in bed.servers:
            server.worker_lost(lost.identity.rank, 0)
        late = bed.client(lost.identity.rank, 100)
        late.attach()
        step_of_all([first], grads)
        before = bed.pulled(first)["trainable"]
        into = filled(manifest, np.nan)

        def comes_late() -> None:
            late._joins_first = False  # as if it had joined, which both servers have forgotten
            for link in late._servers.links:
                link.acked_clock = 1
            assert late.push_pull(grads, into, hyper=HYPER, rows=4).clock == 3

        before_the_second_round([first], comes_late)
        step_of_all([first], grads)
        np.testing.assert_array_equal(into["trainable"], before)
        after = bed.pulled(first)["trainable"]
        np.testing.assert_allclose(after - before, -0.1 * grads["trainable"], rtol=1e-4, atol=1e-7)


@pytest.mark.fault("F08")
def test_a_server_that_caught_up_still_does_what_an_idle_worker_asks(tmp_path: Path):
    """A clock that is past undoes pushes that were meant for it, and nothing else."""
    with saved_after_a_step(tmp_path) as (bed, clients, grads):
        chief, other = clients
        step_of_all(clients, grads)
        chief.leave()
        step_of_all([other], grads)
        other.leave()
        bed.restart(1, tmp_path)
        other.join()
        chief.assign({"trainable": np.full(600, 7.0, np.float32)})
        np.testing.assert_array_equal(bed.pulled(chief)["trainable"], 7.0)
        chief.finish()
        assert step_of_all([other], grads) == [4]


@pytest.mark.fault("F08")
def test_a_push_that_a_restore_has_undone_is_not_counted_as_applied(tmp_path: Path):
    """Worker 1 sends a push again whose answer was lost with the server; worker 0 got its own."""
    with saved_after_a_step(tmp_path, num_servers=1) as (bed, clients, grads):
        step_of_all(clients, grads)
        (link,) = clients[1]._servers.links
        link.sequence, link.acknowledged, link.acked_clock = 1, 1, 1  # as before its last answer
        server = bed.restart(0, tmp_path)
        again = partial(clients[1].push, grads, hyper=HYPER, rows=4)

        def worker_1() -> None:
            assert again().clock == 2  # the push that was undone
            assert again().clock == 3

        def worker_0() -> None:
            gate = server._service.life.loaded().gate
            wait_until(lambda: bool(gate.waiting), "worker 1's push waits")
            clients[0].push(grads, hyper=HYPER, rows=4)

        succeeded(run_all(worker_1, worker_0))
        assert sum(each.pushes for each in server.stats().workers) == 2
        np.testing.assert_allclose(
            bed.pulled(clients[0])["trainable"], -0.2 * grads["trainable"], rtol=1e-6
        )


@pytest.mark.fault("F08")
@pytest.mark.parametrize("mode", ["sync", "ssp"])
@pytest.mark.parametrize(
    ("restarted", "meets"), [(0, True), (1, True), (1, False)], ids=["0", "1", "1-asks nothing"]
)
def test_nobody_waits_at_a_restarted_server_for_a_worker_that_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, restarted: int, meets: bool
):
    """It meets the others already, or validates: the restored server learns that it is away."""
    monkeypatch.setattr("ps.client.client.PROBE_PERIOD_S", 0.2)
    monkeypatch.setattr("ps.client.rendezvous.PROBE_PERIOD_S", 0.2)
    bound = 0 if mode == "sync" else 1
    with saved_after_a_step(tmp_path, mode, bound=bound) as (bed, clients, grads):
        idle, busy = clients
        step_of_all(clients, grads)
        has_trained = threading.Event()

        def ends_early() -> None:
            idle.leave()
            if not meets:
                assert has_trained.wait(WAIT_S)
            idle.rendezvous("epoch", b"", timeout_s=WAIT_S)

        def trains_on() -> None:
            wait_until(lambda: idle._servers.is_inactive, "worker 0 has left")
            for _ in range(3):
                busy.push(grads, hyper=HYPER, rows=4)
            bed.restart(restarted, tmp_path)
            for _ in range(4):
                busy.push(grads, hyper=HYPER, rows=4)
            assert not has_trained.is_set()
            has_trained.set()
            busy.rendezvous("epoch", b"", timeout_s=WAIT_S)

        succeeded(run_all(ends_early, trains_on, timeout_s=2 * WAIT_S))
        idle.join()
        step_of_all(clients, grads)
        clocks = {server.stats().clock for server in bed.servers}
        assert len(clocks) == 1 or mode == "ssp"


@pytest.mark.fault("F08")
@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_nobody_waits_at_a_restarted_server_for_a_worker_that_has_ended(tmp_path: Path, mode: str):
    """Its process is gone: whoever started the server again says so, at any time."""
    bound = 0 if mode == "sync" else 1
    begun = saved_after_a_step(tmp_path, mode, bound=bound, num_servers=1)
    with begun as (bed, (chief, other), grads):
        other.finish()
        other.close()
        server = bed.restart(0, tmp_path)

        def trains_on() -> None:
            for _ in range(4):
                chief.push(grads, hyper=HYPER, rows=4)
            chief.rendezvous("end", b"", timeout_s=WAIT_S)

        def tells() -> None:
            gate = server._service.life.loaded().gate
            wait_until(lambda: gate.clock_of(WorkerRank(0)) > 1 or bool(gate.waiting), "a push")
            server.worker_done(1)

        succeeded(run_all(trains_on, tells))
        server.close()
        server.worker_done(0)


@pytest.mark.fault("F08")
def test_workers_stand_at_a_restarted_server_where_others_know_them_to_stand(tmp_path: Path):
    """Counting anew, it would hold the one that joins back for clocks that the other one has."""
    with saved_after_a_step(tmp_path, "ssp") as (bed, clients, grads):
        chief, other = clients
        other.leave()
        chief.push(grads, hyper=HYPER, rows=4)
        bed.restart(1, tmp_path)
        other.join()
        for _ in range(2):
            step_of_all(clients, grads)
        gates = [server._service.life.loaded().gate for server in bed.servers]
        stand = [[gate.clock_of(WorkerRank(rank)) for rank in (0, 1)] for gate in gates]
        assert stand == [[4, 4], [4, 4]]


@pytest.mark.fault("F06")
def test_a_replaced_attempt_stays_refused_by_a_restarted_server(tmp_path: Path):
    manifest = make_manifest(600, rule=SGD())
    with cluster(num_workers=1) as bed:
        frozen = bed.client(0)
        frozen.seed(manifest, filled(manifest))
        grads = random_arrays(manifest, 1)
        frozen.push(grads, hyper=HYPER, rows=4)
        newer = bed.client(0, generation=1)
        newer.attach()
        newer.push(grads, hyper=HYPER, rows=4)
        newer.save(tmp_path, 2)
        bed.restart(0, tmp_path)
        with pytest.raises(StaleGeneration, match="accepts 1 and newer"):
            frozen.push(grads, hyper=HYPER, rows=4)
        newer.push(grads, hyper=HYPER, rows=4)
        np.testing.assert_allclose(
            bed.pulled(newer)["trainable"], -0.3 * grads["trainable"], rtol=1e-6
        )


ASKS: dict[str, Callable[[PSClient, Path], object]] = {
    "attaches": lambda client, _root: client.attach(),
    "pulls": lambda client, _root: client.pull(filled(client.manifest)),
    "saves": lambda client, root: client.save(root, 3),
    "pushes": lambda client, _root: client.push(filled(client.manifest), hyper=HYPER, rows=4),
    "assigns": lambda client, _root: client.assign(filled(client.manifest)),
    "joins": lambda client, _root: client.join(),
    "leaves": lambda client, _root: client.leave(),
}


@pytest.mark.fault("F06", "F20")
@pytest.mark.parametrize("asks", ASKS)
def test_a_server_restarted_by_hand_refuses_an_attempt_once_a_newer_one_changes_something(
    tmp_path: Path, asks: str
):
    """It cannot tell a later run, whose attempts count from 0 again, from the same one."""
    manifest = make_manifest(600, rule=SGD())
    with cluster(num_workers=1) as bed:
        older, newer = bed.client(0), bed.client(0, generation=1)
        older.seed(manifest, filled(manifest))
        newer.attach()
        newer.push(filled(manifest), hyper=HYPER, rows=4)
        newer.save(tmp_path, 2)
        bed.restart(0, tmp_path, by_hand=True)
        older.push(filled(manifest), hyper=HYPER, rows=4)
        ASKS[asks](newer, tmp_path)
        if asks in ("attaches", "pulls"):
            older.push(filled(manifest), hyper=HYPER, rows=4)
        else:
            with pytest.raises(StaleGeneration, match="accepts 1 and newer"):
                older.push(filled(manifest), hyper=HYPER, rows=4)


@pytest.mark.fault("F08")
@pytest.mark.parametrize("how", ["join", "attempt"])
def test_what_is_new_is_not_undone_with_what_a_server_has_forgotten(tmp_path: Path, how: str):
    """Worker 1 comes to the restarted server before the one that knows how far it was."""
    with saved_after_a_step(tmp_path) as (bed, clients, grads):
        ahead, other = clients
        step_of_all(clients, grads)
        other.leave()
        for _ in range(2):
            ahead.push(grads, hyper=HYPER, rows=4)
        server = bed.restart(1, tmp_path)
        comes = other
        if how == "attempt":
            comes = bed.client(1, generation=1)
            comes.attach()
        gate = server._service.life.loaded().gate

        def worker_1() -> None:
            assert comes.join().clock == 4
            for _ in range(3):
                comes.push(grads, hyper=HYPER, rows=4)

        def worker_0() -> None:
            wait_until(lambda: bool(gate.waiting), "the null push that lines worker 1 up")
            for _ in range(3):
                ahead.push(grads, hyper=HYPER, rows=4)

        succeeded(run_all(worker_1, worker_0))
        assert [each.stats().clock for each in bed.servers] == [7, 7]


def step_with_a_bad_one(clients: list[PSClient], good: Arrays, bad: Arrays) -> None:
    """One push of each; the last worker's, `bad`, has the whole step refused or is left out."""
    last = len(clients) - 1
    pushed = [good] * last + [bad]
    pushes = zip(clients, pushed, strict=True)
    results = run_all(*(partial(client.push, g, hyper=HYPER, rows=4) for client, g in pushes))
    assert isinstance(results[last], NonFiniteGradient)


@pytest.mark.fault("F08")
@pytest.mark.parametrize("is_saved", [True, False], ids=["saved after it", "saved before it"])
@pytest.mark.parametrize("refused", ["a gradient", "a sum"])
def test_a_new_push_after_a_refused_one_is_not_taken_for_an_undone_one(
    tmp_path: Path, refused: str, *, is_saved: bool
):
    """A refused push is part of its clock: its worker's next one is for the clock after it."""
    manifest = make_manifest(600, rule=SGD(), consistency="sync", reduction="sum")
    with cluster(num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        largest = float(np.finfo(np.float32).max)
        good, bad = random_arrays(manifest, 1), filled(manifest, np.inf)
        if refused == "a sum":
            good, bad = filled(manifest, largest), filled(manifest, largest)
        step_of_all(clients, random_arrays(manifest, 1))
        if not is_saved:
            clients[0].save(tmp_path, 1)
        step_with_a_bad_one(clients, good, bad)
        if is_saved:
            clients[0].save(tmp_path, 2)
        bed.restart(1, tmp_path)
        for clock in (3, 4):
            assert step_of_all(clients, random_arrays(manifest, 1)) == [clock, clock]
            assert [each.stats().clock for each in bed.servers] == [clock, clock]


@pytest.mark.fault("F08")
def test_a_restarted_ssp_server_counts_the_refused_pushes_of_its_workers(tmp_path: Path):
    with saved_after_a_step(tmp_path, "ssp", bound=1) as (bed, clients, grads):
        bad = {name: np.full_like(values, np.inf) for name, values in grads.items()}
        step_with_a_bad_one(clients, grads, bad)
        bed.restart(1, tmp_path)
        step_of_all(clients, grads)
        gates = [server._service.life.loaded().gate for server in bed.servers]
        stand = [[gate.clock_of(WorkerRank(rank)) for rank in (0, 1)] for gate in gates]
        assert stand == [[3, 3], [3, 3]]


def test_a_rendezvous_goes_on_while_another_server_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ps.client.rendezvous.PROBE_PERIOD_S", 0.1)
    monkeypatch.setattr("ps.client.rendezvous.PROBE_TIMEOUT_S", 0.1)
    manifest = make_manifest(600, rule=SGD(), consistency="sync")
    with cluster(num_servers=2, num_workers=2) as bed:
        idle, other = clients = bed.workers(manifest, filled(manifest))
        step_of_all(clients, random_arrays(manifest, 1))
        idle.leave()
        idle.save(tmp_path, 1)
        bed.servers[1].close(0.5)
        away = idle._servers.links[1]

        def comes_late() -> None:
            wait_until(lambda: away.last_failure is not None, "worker 0 has looked")
            other.rendezvous("epoch", b"", timeout_s=WAIT_S)

        meet = partial(idle.rendezvous, "epoch", b"", timeout_s=WAIT_S)
        succeeded(run_all(meet, comes_late))
        bed.restart(1, tmp_path)
        idle.join()


@pytest.mark.fault("F01", "F08")
@pytest.mark.parametrize("mode", ["ssp", "sync"])
def test_a_newer_attempt_meets_a_server_that_was_restarted_before_it(tmp_path: Path, mode: str):
    """That server knows no clock of it: its pushes and the others' would wait crosswise."""
    with saved_after_a_step(tmp_path, mode, bound=int(mode == "ssp")) as (bed, clients, grads):
        for _ in range(3):
            step_of_all(clients, grads)
        clients[1].close()
        bed.restart(1, tmp_path)
        newer = bed.client(1, generation=1)
        newer.attach()

        def train(client: PSClient) -> None:
            for _ in range(4):
                client.push(grads, hyper=HYPER, rows=4)

        succeeded(run_all(partial(train, clients[0]), partial(train, newer)))
        if mode != "ssp":
            assert [server.stats().clock for server in bed.servers] == [8, 8]


@pytest.mark.fault("F01")
@pytest.mark.parametrize("mode", ["ssp", "sync", "hybrid"])
def test_a_newer_attempt_is_a_member_again_with_its_first_push_or_batch(mode: str):
    """Nobody waits for the lost one; a client that only reads or saves changes nothing."""
    bound = int(mode != "sync")
    manifest = with_tables(table("rows"), rule=SGD(), consistency=mode, staleness_bound=bound)
    with cluster(num_servers=2, num_workers=2, on_lost="continue") as bed:
        clients = bed.workers(manifest, filled(manifest))
        grads = random_arrays(manifest, 1)
        step_of_all(clients, grads)
        clients[1].close()
        bed.driver().worker_lost(1)
        reader, newer = bed.client(1, generation=1), bed.client(1, generation=1)
        reader.attach()
        bed.pulled(reader)
        step_of_all(clients[:1], grads)
        newer.attach()

        def train() -> None:
            for _ in range(2):
                with newer.tables.batch({"rows": np.arange(4)}) as batch:
                    newer.push(grads, hyper=HYPER, rows=4)
                    batch.push({"rows": np.ones((4, 4), np.float32)}, hyper=HYPER)

        def others() -> None:
            newer_is_member.wait(WAIT_S)
            for _ in range(2):
                clients[0].push(grads, hyper=HYPER, rows=4)

        newer_is_member = threading.Event()
        join = newer.join

        def joined() -> Ack:
            ack = join()
            newer_is_member.set()
            return ack

        newer.join = joined  # type: ignore[method-assign]
        succeeded(run_all(train, others))
        clocks = {server.stats().clock for server in bed.servers}
        assert clocks == ({4} if mode != "ssp" else {2 + 1 + 4})


@pytest.mark.fault("F08")
@pytest.mark.fault("F12")
@pytest.mark.parametrize("is_refused", [False, True], ids=["answered", "refused"])
@pytest.mark.parametrize("consistency", ["ssp", "sync"])
def test_two_servers_that_each_forget_whom_they_have_answered_hold_up_nobody(  # noqa: C901 - two workers, two servers
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, consistency: str, is_refused: bool
):
    """ps:0 has answered worker 0 alone, ps:1 worker 1 alone; both are started again from a save.

    Each worker then waits at the server that has not answered it, for the other one's clock. The
    answer may be that the server's part of the gradient is infinite.
    """
    manifest = make_manifest(rule=ADD, consistency=consistency, reduction="sum")
    restarted = threading.Barrier(2)
    settle = retry._settle
    is_armed = threading.Event()
    with cluster("tcp", num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        rank_of = {
            link: client.identity.rank for client in clients for link in client._servers.links
        }

        def restart_both() -> None:
            if restarted.wait(WAIT_S) == 0:
                is_armed.clear()
                for rank in range(2):
                    bed.restart(rank, tmp_path)
            restarted.wait(WAIT_S)

        def lose(call: OutgoingCall, outcome: Any) -> None:
            """Lose the answer of the other server, once the own one's is here."""
            is_other = call.link.server != rank_of[call.link]
            is_answer = isinstance(outcome, Reply | RemoteError)
            if is_armed.is_set() and is_other and is_answer:
                outcome = PeerGone("the answer is lost")
                if answered[rank_of[call.link]].is_set():
                    restart_both()
            elif is_answer:
                answered[rank_of[call.link]].set()
            settle(call, outcome)

        def push(client: PSClient, times: int = 1) -> None:
            for _ in range(times):
                grads = filled(manifest, 1.0)
                if is_armed.is_set() and is_refused:
                    (part,) = client._dense.pieces[client.identity.rank]
                    grads["trainable"][part.start : part.stop] = np.inf
                    with pytest.raises(NonFiniteGradient):
                        client.push(grads, hyper=HYPER, rows=1)
                else:
                    client.push(grads, hyper=HYPER, rows=1)

        succeeded(run_all(*(partial(push, client) for client in clients)))
        clients[0].save(tmp_path, 1)
        answered = [threading.Event() for _ in clients]
        monkeypatch.setattr(retry, "_settle", lose)
        is_armed.set()
        twice = [partial(push, client, 2) for client in clients]
        succeeded(run_all(*twice, timeout_s=WAIT_S / 3))
        assert not is_armed.is_set()
        told = [stats.lost_updates for stats in clients[0].stats()]
        values = bed.pulled(clients[0])["trainable"]
        for (cut,), lost in zip(clients[0]._dense.pieces, told, strict=True):
            assert set(values[cut.start : cut.stop]) == {np.float32(6 - is_refused - lost)}
