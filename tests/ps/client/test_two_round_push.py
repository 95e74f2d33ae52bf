"""Clipping the mean of several workers by norm: no server has it whole, and nothing is lost."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from ps.errors import (
    NonFiniteGradient,
    NonFiniteUpdate,
    PSSettingsError,
    RequestTimeout,
    ServerError,
    WorkerLost,
    from_remote,
)
from ps.manifest.manifest import SGD, GroupSpec, Hyper, Manifest, ParamSpec
from ps.metadata import pushed
from ps.protocol import messages
from ps.protocol.messages import Ack, Number
from rpc.errors import RemoteError
from rpc.wire.frame import decode_error
from tests.support.ps_cluster import (
    cluster,
    filled,
    is_second_round,
    make_manifest,
    random_arrays,
    raw_call,
    run_all,
    succeeded,
)

pytestmark = pytest.mark.socket

HYPER = Hyper(0.5)
RULES = {"clipnorm": SGD(clipnorm=0.7), "global_clipnorm": SGD(global_clipnorm=0.9)}


def clipped_mean(manifest, grads, rows):
    """By the definition, in double precision."""
    (mean,) = (
        sum(g[group.name].astype(float) * n for g, n in zip(grads, rows, strict=True)) / sum(rows)
        for group in manifest.groups
        if group.name == "trainable"
    )
    spec = manifest.group("trainable")
    limit = spec.rule.clipnorm or spec.rule.global_clipnorm
    ends = np.cumsum([p.num_elements for p in spec.params])[:-1]
    cuts = list(ends) if spec.rule.clipnorm else []
    parts = np.split(mean, cuts)
    return np.concatenate([part * min(1.0, limit / np.linalg.norm(part)) for part in parts])


@pytest.mark.parametrize("num_servers", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_mean_is_clipped_as_if_it_lay_on_one_machine(num_servers, rule):
    manifest = make_manifest(5000, rule=rule, consistency="sync", statistics=9)
    rows = [32, 8]
    with cluster(num_servers=num_servers, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        expected, into = np.zeros(5000), [filled(manifest), filled(manifest)]
        for step in range(3):
            grads = [random_arrays(manifest, 10 * step + rank) for rank in (0, 1)]
            works = [
                partial(clients[r].push_pull, grads[r], into[r], hyper=HYPER, rows=rows[r])
                for r in (0, 1)
            ]
            acks = succeeded(run_all(*works))
            assert {ack.clock for ack in acks} == {step + 1}
            expected -= 0.5 * clipped_mean(manifest, grads, rows)
            means = [sum(g["statistics"] * n for g, n in zip(grads, rows, strict=True)) / 40]
            for values in into:
                np.testing.assert_allclose(values["trainable"], expected, rtol=1e-5, atol=1e-7)
                np.testing.assert_allclose(values["statistics"], means[0], rtol=1e-5, atol=1e-6)
        for server in bed.servers:
            assert [worker.pushes for worker in server.stats().workers] == [3, 3]


def test_null_pushes_and_pushes_without_pull_hold_the_rounds_together():
    manifest = make_manifest(600, rule=RULES["clipnorm"], consistency="sync")
    grads = random_arrays(manifest, 1)
    with cluster(num_servers=2, num_workers=2) as bed:
        first, second = bed.workers(manifest, filled(manifest))
        into = filled(manifest)
        push = partial(first.push, grads, hyper=HYPER, rows=4)
        succeeded(run_all(push, partial(second.push_null, into=into)))
        expected = -0.5 * clipped_mean(manifest, [grads], [4])
        np.testing.assert_allclose(into["trainable"], expected, rtol=1e-5, atol=1e-7)
        acks = succeeded(run_all(first.push_null, second.push_null))
        assert [ack.clock for ack in acks] == [2, 2]
        np.testing.assert_array_equal(bed.pulled(first)["trainable"], into["trainable"])


@pytest.mark.fault("F48")
def test_a_gradient_refused_by_one_server_moves_none():
    manifest = make_manifest(600, rule=RULES["global_clipnorm"], consistency="sync")
    poisoned = random_arrays(manifest, 1)
    poisoned["trainable"][-1] = np.nan
    with cluster(num_servers=2, num_workers=2) as bed:
        first, second = bed.workers(manifest, filled(manifest))
        results = run_all(
            partial(first.push, poisoned, hyper=HYPER, rows=4), partial(second.push_null)
        )
        assert isinstance(results[0], NonFiniteGradient)
        assert not isinstance(results[1], Exception)
        assert not bed.pulled(first)["trainable"].any(), "the other server's half is dropped, too"
        grads = random_arrays(manifest, 2)
        succeeded(run_all(*[partial(c.push, grads, hyper=HYPER, rows=4) for c in (first, second)]))
        expected = -0.5 * clipped_mean(manifest, [grads], [4])
        got = bed.pulled(second)["trainable"]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.fault("F48")
@pytest.mark.parametrize("at", [0, -1], ids=["ps:0", "ps:1"])
def test_a_sum_that_overflows_on_one_server_is_dropped_by_all_at_once(at, caplog):
    rule = RULES["clipnorm"]
    manifest = make_manifest(600, rule=rule, consistency="sync", reduction="sum")
    huge = filled(manifest, 1.0)
    huge["trainable"][at] = 3e38
    with cluster(num_servers=2, num_workers=3) as bed:
        clients = bed.workers(manifest, filled(manifest))
        pushing, third = clients[:2], clients[2]
        position = pushed("position", 1)
        push: dict[str, Any] = {"hyper": HYPER, "rows": 4, "metadata": position}
        results = run_all(*(partial(c.push, huge, **push) for c in pushing), third.push_null)
        assert [type(result) for result in results] == [NonFiniteGradient, NonFiniteGradient, Ack]
        assert {result.details["server"] for result in results[:2]} == {str(at % 2)}
        assert sum(stats.refused for stats in pushing[0].link_stats()) == 1
        assert all(server._service.life.loaded().reduction.is_settled for server in bed.servers)
        assert not bed.pulled(third)["trainable"].any()
        assert third.metadata() == {}, "it comes with the gradient, or not at all"
        ones = filled(manifest, 1.0)
        succeeded(run_all(*(partial(c.push, ones, **push) for c in pushing), third.push_null))
        assert bed.pulled(third)["trainable"].all()
        assert third.metadata() == {"position": 1}
    assert "is dropped" not in caplog.text


@pytest.mark.fault("F48")
def test_a_refusal_outlives_the_server_that_told_it():
    manifest = make_manifest(600, rule=RULES["clipnorm"], consistency="sync", reduction="sum")
    huge = filled(manifest, 1.0)
    huge["trainable"][-1] = 3e38
    with cluster(num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        for client in clients:
            meets_servers_started_again(client)
        results = run_all(*(partial(c.push, huge, hyper=HYPER, rows=4) for c in clients))
        assert [type(result) for result in results] == [NonFiniteGradient] * 2


def meets_servers_started_again(client):
    """Let the second round find servers that know nothing of the first."""
    change = client._servers.change

    def forgotten(request, **options):
        if is_second_round(request):
            made = [partial(of_no_clock, make) for make in request]
            return change(made, **{**options, "payloads": [()] * 2})
        return change(request, **options)

    def of_no_clock(make, number):
        return msgspec.structs.replace(make(number), clock=0)

    client._servers.change = forgotten


@pytest.mark.fault("F48")
def test_an_update_that_overflows_is_told_to_those_who_pushed_it():
    manifest = make_manifest(600, rule=RULES["clipnorm"], consistency="sync")
    ones = filled(manifest, 1.0)
    with cluster(num_servers=2, num_workers=2) as bed:
        first, second = bed.workers(manifest, filled(manifest, 3.4e38))
        push = partial(first.push, {**ones, "trainable": -ones["trainable"]}, rows=4)
        results = run_all(partial(push, hyper=Hyper(3e38)), second.push_null)
        assert [type(result) for result in results] == [NonFiniteUpdate, Ack]
        rounds = first._dense._clipped_push
        assert rounds is not None
        assert rounds.num_applied() == [1, 1], "but for some elements"


@pytest.mark.fault("F48")
def test_metadata_without_room_holds_back_no_clipped_gradient(monkeypatch):
    monkeypatch.setattr("ps.metadata.MAX_ENTRIES", 0)
    manifest = make_manifest(600, rule=RULES["clipnorm"], consistency="sync")
    with cluster(num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        push: dict[str, Any] = {"hyper": HYPER, "rows": 4, "metadata": pushed("position", 1)}
        grads = random_arrays(manifest, 1)
        results = run_all(*(partial(c.push, grads, **push) for c in clients))
        assert [type(result) for result in results] == [PSSettingsError] * 2
        expected = -0.5 * clipped_mean(manifest, [grads], [4])
        got = bed.pulled(clients[0])["trainable"]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


class Died(Exception):
    """Stands for the end of a worker's process."""


def dies_between_the_rounds(client):
    """Let the client's next second round never be sent."""
    change = client._servers.change

    def until_the_second(request, **options):
        if is_second_round(request):
            raise Died
        return change(request, **options)

    client._servers.change = until_the_second


@pytest.mark.fault("F02")
@pytest.mark.parametrize("on_lost", ["fail", "continue"])
def test_a_worker_that_dies_between_the_rounds_holds_nobody_up(on_lost):
    manifest = make_manifest(600, rule=RULES["clipnorm"], consistency="sync")
    grads = [random_arrays(manifest, rank) for rank in (0, 1)]
    with cluster(num_servers=2, num_workers=2, on_lost=on_lost) as bed:
        first, second = bed.workers(manifest, filled(manifest))
        dies_between_the_rounds(second)
        into = filled(manifest)
        results = run_all(
            partial(first.push_pull, grads[0], into, hyper=HYPER, rows=4),
            partial(second.push, grads[1], hyper=HYPER, rows=4),
        )
        assert isinstance(results[1], Died)
        succeeded(results[:1])
        expected = -0.5 * clipped_mean(manifest, grads, [4, 4])
        np.testing.assert_allclose(into["trainable"], expected, rtol=1e-5, atol=1e-7)
        bed.driver().worker_lost(1)
        push = partial(first.push_pull, grads[0], into, hyper=HYPER, rows=4)
        if on_lost == "fail":
            with pytest.raises(WorkerLost, match="worker 1"):
                push()
        else:
            push()
            expected += -0.5 * clipped_mean(manifest, grads[:1], [4])
            np.testing.assert_allclose(into["trainable"], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.fault("F02")
def test_a_gradient_whose_workers_all_died_between_the_rounds_is_dropped_everywhere(caplog):
    manifest = make_manifest(600, rule=RULES["clipnorm"], consistency="sync")
    grads = random_arrays(manifest, 1)
    with cluster(num_servers=2, num_workers=2, on_lost="continue") as bed:
        dying = bed.workers(manifest, filled(manifest))
        for client in dying:
            dies_between_the_rounds(client)
        results = run_all(*[partial(c.push, grads, hyper=HYPER, rows=4) for c in dying])
        assert all(isinstance(result, Died) for result in results)
        bed.driver().worker_lost(0)
        bed.driver().worker_lost(1)
        newer = bed.client(0, generation=1)
        newer.attach()
        newer.join()
        into = filled(manifest)
        newer.push_pull(grads, into, hyper=HYPER, rows=4)
        expected = -0.5 * clipped_mean(manifest, [grads], [4])
        np.testing.assert_allclose(into["trainable"], expected, rtol=1e-5, atol=1e-7)
        assert caplog.text.count("the gradient of clock 1 is dropped") == 2
        with pytest.raises(RemoteError, match="generation"):
            raw_call(bed, 0, messages.Settle(manifest.hash(), Number(9, 1), 1), rank=0)


def test_a_second_round_counts_once_however_often_and_by_whomever_it_is_brought():
    manifest = make_manifest(600, rule=RULES["clipnorm"], consistency="sync")
    grads = random_arrays(manifest, 1)
    digest = manifest.hash()
    with cluster(num_servers=2, num_workers=2) as bed:
        first, second = bed.workers(manifest, filled(manifest))
        succeeded(run_all(*[partial(c.push, grads, hyper=HYPER, rows=4) for c in (first, second)]))
        before = bed.pulled(first)["trainable"]
        squares = np.full(2, 1e-6)
        for number in (Number(9, 1), Number(9, 1), Number(9, 2)):
            for server in (0, 1):
                settle = messages.Settle(digest, number, 1)
                ack = raw_call(bed, server, settle, [squares], rank=1)
                assert ack.clock == 1
        np.testing.assert_array_equal(bed.pulled(first)["trainable"], before)
        settle = messages.Settle(digest, Number(9, 3), 1)
        for wrong, error in ((np.zeros(3), "24 bytes"), (np.full(2, np.nan), "2 sums of squares")):
            with pytest.raises(RemoteError, match=error):
                raw_call(bed, 0, settle, [wrong], rank=1)


def test_a_push_that_comes_again_is_told_its_squares_again():
    manifest = make_manifest(600, rule=RULES["clipnorm"], consistency="sync")
    with cluster(num_servers=2, num_workers=2) as bed:
        bed.workers(manifest, filled(manifest))
        gradient = np.ones(bed.servers[0]._service.life.loaded().dense.value_nbytes // 4, "f4")
        push = messages.Push(manifest.hash(), Number(9, 1), 4, HYPER, pull=True, wait_s=10.0)
        bring = [partial(raw_call, bed, 0, push, [gradient], rank=rank) for rank in (0, 1)]
        answers = succeeded(run_all(*bring))
        assert [ack.has_squares for ack in answers] == [True, True]
        assert bring[0]() == answers[0]
        settle = messages.Settle(manifest.hash(), Number(9, 2), 1)
        raw_call(bed, 0, settle, [np.full(2, 4.0)], rank=1)
        assert bring[0]() == answers[0], "also when another worker has settled it"
        bed.driver().worker_lost(0, 0)
        with pytest.raises(RemoteError, match="generation"):
            bring[0]()


@pytest.mark.fault("F48")
def test_a_refused_push_that_comes_again_is_told_its_refusal_again():
    manifest = make_manifest(600, rule=RULES["clipnorm"], consistency="sync")
    with cluster(num_servers=2, num_workers=2) as bed:
        bed.workers(manifest, filled(manifest))
        size = bed.servers[0]._service.life.loaded().dense.value_nbytes // 4
        bring = [
            partial(
                raw_call,
                bed,
                0,
                messages.Push(manifest.hash(), Number(9, 1), 4, HYPER, pull=True, wait_s=10.0),
                [np.full(size, value, "f4")],
                rank=rank,
            )
            for rank, value in enumerate((np.nan, 1.0))
        ]
        refused, taken = succeeded(run_all(*bring))
        assert (refused.applied, taken.applied) == (False, True)
        assert not taken.refusal
        assert refused.has_squares, "of what the other worker has brought"
        error = from_remote(decode_error(refused.refusal))
        assert isinstance(error, NonFiniteGradient)
        assert error.details["worker"] == "0"
        assert bring[0]() == refused


@pytest.mark.fault("F48")
def test_a_push_that_is_refused_but_for_its_gradient_has_it_applied_also_when_it_comes_again(
    monkeypatch,
):
    monkeypatch.setattr("ps.metadata.MAX_ENTRIES", 0)
    manifest = make_manifest(600, rule=RULES["clipnorm"], consistency="sync")
    with cluster(num_servers=2, num_workers=2) as bed:
        bed.workers(manifest, filled(manifest))
        size = bed.servers[0]._service.life.loaded().dense.value_nbytes // 4
        without = messages.Push(manifest.hash(), Number(9, 1), 4, HYPER, pull=True, wait_s=10.0)
        with_it = msgspec.structs.replace(without, metadata=pushed("position", 1))
        bring = [
            partial(raw_call, bed, 0, push, [np.ones(size, "f4")], rank=rank)
            for rank, push in enumerate((with_it, without))
        ]
        refused, taken = succeeded(run_all(*bring))
        assert refused.refusal
        assert not taken.refusal
        assert (refused.applied, refused.has_squares) == (True, True)
        assert bring[0]() == refused


def test_a_checkpoint_waits_for_the_second_round(tmp_path, monkeypatch):
    manifest = make_manifest(600, rule=RULES["clipnorm"], consistency="sync")
    grads = random_arrays(manifest, 1)
    with cluster(num_servers=2, num_workers=2) as bed:
        first, second = bed.workers(manifest, filled(manifest))
        reduced, goes_on = threading.Barrier(3), threading.Event()
        for client in (first, second):
            hold_the_second_round(client, reduced, goes_on)
        pushes = [
            threading.Thread(target=partial(client.push, grads, hyper=HYPER, rows=4), daemon=True)
            for client in (first, second)
        ]
        for thread in pushes:
            thread.start()
        reduced.wait(15)
        driver = bed.driver()
        driver.attach()
        monkeypatch.setattr("ps.client.saving.saver.SETTLE_WAIT_S", 0.05)
        with pytest.raises((RequestTimeout, ServerError), match="not settled within"):
            driver.save(tmp_path, 1)
        monkeypatch.setattr("ps.client.saving.saver.SETTLE_WAIT_S", 15.0)
        saving = threading.Thread(target=partial(driver.save, tmp_path, 1), daemon=True)
        saving.start()
        goes_on.set()
        for thread in (saving, *pushes):
            thread.join(15)
            assert not thread.is_alive()
        values = bed.pulled(first)["trainable"]
    with cluster(num_servers=1, num_workers=2) as bed:
        client = bed.client()
        client.restore(tmp_path)
        np.testing.assert_array_equal(bed.pulled(client)["trainable"], values)
        assert values.any()


def hold_the_second_round(client, reduced, goes_on):
    change = client._servers.change

    def held(request, **options):
        if is_second_round(request):
            reduced.wait(15)
            assert goes_on.wait(15)
        return change(request, **options)

    client._servers.change = held


def test_groups_of_both_precisions_share_the_global_norm():
    groups = (
        GroupSpec("trainable", "float32", SGD(global_clipnorm=1.0), (ParamSpec("a", (300,)),)),
        GroupSpec(
            "trainable.float64", "float64", SGD(global_clipnorm=1.0), (ParamSpec("b", (200,)),)
        ),
    )
    manifest = Manifest(groups=groups, consistency="sync", bucket_bytes=512)
    grads = filled(manifest, 2.0)
    with cluster(num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        succeeded(run_all(*[partial(c.push, grads, hyper=Hyper(1.0), rows=1) for c in clients]))
        pulled = bed.pulled(clients[0])
    expected = -2.0 / np.sqrt(500 * 4.0)
    for name, values in pulled.items():
        np.testing.assert_allclose(values, expected, rtol=1e-6, err_msg=name)


def test_settle_without_anything_to_settle_changes_nothing():
    manifest = make_manifest(600, rule=SGD(), consistency="sync")
    with cluster(num_servers=2, num_workers=2) as bed:
        bed.workers(manifest, filled(manifest, 1.0))
        digest = manifest.hash()
        assert raw_call(bed, 0, messages.Settle(digest, Number(9, 1), 5)).clock == 0
        with pytest.raises((RemoteError, PSSettingsError), match="8 bytes, this shard takes 0"):
            raw_call(bed, 0, messages.Settle(digest, Number(9, 2), 5), [np.zeros(1)])


def test_the_longest_push_has_a_restoring_server_in_each_of_its_rounds():
    rule = RULES["global_clipnorm"]
    one_round = make_manifest(5000, consistency="sync")
    two_rounds = make_manifest(5000, rule=rule, consistency="sync")
    for manifest, rounds in ((one_round, 1), (two_rounds, 2)):
        with cluster(num_servers=2, num_workers=2) as bed:
            client, _ = bed.workers(manifest, filled(manifest))
            times = client._servers.times
            client.timeout_s, times.restore_s = 20.0, 70.0
            assert client.longest_push_s == rounds * 70.0
            client.timeout_s = 300.0
            assert client.longest_push_s == rounds * 300.0
            again = bed.client(0, generation=1)
            again.attach()
            again._servers.times.restore_s = 70.0
            assert again.longest_push_s == (rounds + 2) * 70.0, "it joins first, in two exchanges"
