"""Connections cut anywhere: every push is applied once, every request may be sent again."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.errors import NonFiniteUpdate, RequestTimeout
from ps.manifest.manifest import Adam, Hyper
from ps.server import receive, shard
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint
from tests.support.channel_proxy import Direction, Fault
from tests.support.proxied_cluster import proxied
from tests.support.ps_cluster import (
    ADD,
    WAIT_S,
    cluster,
    filled,
    make_manifest,
    random_arrays,
    run_all,
    succeeded,
)

pytestmark = pytest.mark.socket

__all__ = ["proxied"]

HYPER = Hyper(0.1)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and answer bucket by bucket, so that small pushes are cut half applied."""
    monkeypatch.setattr(receive, "READ_BYTES", 512)
    monkeypatch.setattr(shard, "SEND_BYTES", 1024)


def offsets(total_bytes: int, count: int) -> list[int]:
    """The first and last bytes and evenly spread ones between."""
    spread = {round(i * total_bytes / count) for i in range(count)}
    return sorted(spread | {0, 1, 47, 48, 49, total_bytes - 1})


@pytest.mark.slow
@pytest.mark.fault("F28")
@pytest.mark.parametrize("with_pull", [False, True])
def test_a_push_cut_at_any_offset_is_applied_once(proxied, with_pull: bool):
    parts = proxied()
    manifest = make_manifest(1000, rule=ADD, bucket_bytes=512)
    (client,) = parts.workers(manifest)
    ones, into = filled(manifest, 1.0), filled(manifest)
    cuts = offsets(4000, 40)
    for number, offset in enumerate(cuts, 1):
        (cut,) = parts.proxy.plan(("up", offset))
        if with_pull:
            client.push_pull(ones, into, hyper=HYPER, rows=1)
            assert set(into["trainable"]) == {number}, f"cut after {offset} bytes"
        else:
            client.push(ones, hyper=HYPER, rows=1)
        assert cut.fired.is_set()
    assert set(parts.bed.pulled(client)["trainable"]) == {len(cuts)}
    assert client.stats()[0].workers[0].pushes == len(cuts)


@pytest.mark.slow
@pytest.mark.fault("F24")
@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_a_reply_lost_at_any_offset_repeats_nothing(proxied, consistency: str):
    parts = proxied()
    manifest = make_manifest(1000, rule=ADD, consistency=consistency)
    (client,) = parts.workers(manifest)
    ones, into = filled(manifest, 1.0), filled(manifest)
    cuts = offsets(4000, 30)
    for number, offset in enumerate(cuts, 1):
        (cut,) = parts.proxy.plan(("down", offset))
        ack = client.push_pull(ones, into, hyper=HYPER, rows=1)
        assert (ack.clock, ack.applied) == (number, True)
        assert set(into["trainable"]) == {number}
        assert cut.fired.is_set()
    stats = client.stats()[0].workers[0]
    assert stats.pushes == len(cuts)
    # async answers while it applies: an early cut may leave a half applied push, which is resumed.
    assert stats.repeated == len(cuts) if consistency == "sync" else stats.repeated > 0


@pytest.mark.slow
@pytest.mark.fault("F27")
def test_a_push_cut_again_and_again_is_applied_once(proxied):
    parts = proxied(num_servers=2)
    manifest = make_manifest(4000, rule=ADD)
    (client,) = parts.workers(manifest)
    for number in range(1, 6):
        plan: list[tuple[Direction, int]] = [
            ("up", 3000), ("up", 100), ("down", 10), ("up", 7000), ("down", 0),
        ]  # fmt: skip
        armed = [cut for proxy in parts.proxies for cut in proxy.plan(*plan)]
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        assert sum(cut.fired.is_set() for cut in armed) >= 8
        assert set(parts.bed.pulled(client)["trainable"]) == {number}


@pytest.mark.slow
@pytest.mark.fault("F27")
@pytest.mark.parametrize("seed", range(4))
def test_many_workers_over_a_bad_network_count_exactly(proxied, seed: int):
    parts = proxied(num_servers=2, num_workers=4)
    manifest = make_manifest(3000, rule=ADD)
    clients = parts.workers(manifest)
    choose = random.Random(seed)
    armed = []
    for proxy in parts.proxies:
        plan = [(choose.choice(("up", "down")), choose.randrange(30_000)) for _ in range(25)]
        armed += proxy.plan(*plan)

    def work(client: PSClient) -> None:
        into = filled(manifest)
        for _ in range(20):
            client.push_pull(filled(manifest, 1.0), into, hyper=HYPER, rows=2)

    succeeded(run_all(*(partial(work, client) for client in clients), timeout_s=60))
    fired = sum(cut.fired.is_set() for cut in armed)
    assert fired >= 10, f"seed {seed}: only {fired} cuts fired"
    assert set(parts.bed.pulled(clients[0])["trainable"]) == {80.0}
    for stats in clients[0].stats():
        assert [(w.pushes, w.rows) for w in stats.workers] == [(20, 40)] * 4


@pytest.mark.slow
@pytest.mark.fault("F28")
def test_sync_with_cut_connections_equals_sync_without(proxied):
    manifest = make_manifest(1000, rule=Adam(), consistency="sync", statistics=8)

    def train(clients: list[PSClient], before_step: Callable[[int], None]) -> dict:
        into = [filled(manifest) for _ in clients]
        for step in range(12):
            before_step(step)
            works = [
                partial(
                    client.push_pull,
                    random_arrays(manifest, 2 * step + rank),
                    into[rank],
                    hyper=HYPER,
                    rows=8 + rank,
                )
                for rank, client in enumerate(clients)
            ]
            assert [ack.clock for ack in succeeded(run_all(*works))] == [step + 1] * 2
        assert all(np.array_equal(into[0][name], into[1][name]) for name in into[0])
        return into[0]

    with cluster("tcp", num_workers=2) as bed:
        expected = train(bed.workers(manifest, filled(manifest)), lambda _: None)
    parts = proxied(num_workers=2)
    armed = []

    def arm(step: int) -> None:
        direction: Direction = "up" if step % 2 else "down"
        armed.extend(parts.proxy.plan((direction, 350 * step)))

    got = train(parts.workers(manifest), arm)
    assert all(cut.fired.is_set() for cut in armed)
    assert all(np.array_equal(got[name], expected[name]) for name in got)


@pytest.mark.slow
@pytest.mark.fault("F24")
@pytest.mark.parametrize("consistency", ["sync", "ssp"])
def test_a_cut_push_is_sent_again_while_another_server_holds_its_answer(proxied, consistency):
    """Each worker is cut from another server: each holds what the other one waits for."""
    parts = proxied(num_servers=2, num_workers=2)
    bed, proxies = parts.bed, parts.proxies
    manifest = make_manifest(1000, rule=ADD, consistency=consistency, reduction="sum")
    bed.client().seed(manifest, filled(manifest))
    places = [
        [proxies[0].endpoint, bed.endpoints[1]],
        [bed.endpoints[0], proxies[1].endpoint],
    ]
    clients = [bed.client(rank, endpoints=places[rank], timeout_s=12.0) for rank in range(2)]
    for client in clients:
        client.attach()
    cuts = [proxy.plan(("up", 60))[0] for proxy in proxies]
    ones = filled(manifest, 1.0)
    succeeded(run_all(*(partial(c.push, ones, hyper=HYPER, rows=1) for c in clients)))
    assert all(cut.fired.is_set() for cut in cuts)
    assert set(bed.pulled(clients[0])["trainable"]) == {2.0}


@pytest.mark.slow
@pytest.mark.fault("F23")
def test_a_network_that_never_heals_ends_in_a_typed_timeout(proxied):
    parts = proxied()
    manifest = make_manifest(1000, rule=ADD)
    (client,) = parts.workers(manifest, timeout_s=2.0)
    parts.proxy.plan(*[("up", 400)] * 1000)
    with pytest.raises(RequestTimeout, match=r"ps:0 at 127\.0\.0\.1:\d+"):
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)


@pytest.mark.slow
@pytest.mark.fault("F23")
def test_a_timeout_after_a_cut_says_how_the_earlier_try_ended(proxied):
    parts = proxied()
    manifest = make_manifest(1000, rule=ADD)
    (client,) = parts.workers(manifest, timeout_s=2.0)
    parts.proxy.arm(Fault("up", 400, "cut"), Fault("up", 2000, "drop", lasts_s=WAIT_S))
    with pytest.raises(RequestTimeout, match=r"frozen.*the network loses packets: an earlier"):
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)


@pytest.mark.slow
@pytest.mark.fault("F11")
@pytest.mark.fault("F23")
def test_several_servers_that_accept_and_say_nothing_share_one_deadline():
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(12)]
        client = PSClient(
            [Endpoint(*sock.getsockname()) for sock in silent],
            Credentials("silent", b"s" * 32),
            Identity(Role.WORKER, 0),
            num_workers=1,
            timeout_s=1.5,
        )
        stack.callback(client.close)
        began_s = time.monotonic()
        with pytest.raises(RequestTimeout, match="ps:11 at"):
            client.describe()
        assert time.monotonic() - began_s < 12.0  # one after the other they take 18 s


@pytest.mark.fault("F28")
@pytest.mark.fault("F48")
@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_an_overflow_before_a_cut_is_told_by_the_copy_of_the_push(proxied, mode: str):
    """The copy does not change the bucket again whose elements were left out."""
    parts = proxied()
    manifest = make_manifest(consistency=mode)
    (client,) = parts.workers(manifest)
    grads = filled(manifest, 1.0)
    grads["trainable"][0] = 3e38
    (cut,) = parts.proxy.plan(("up", 2500))
    with pytest.raises(NonFiniteUpdate, match="1 of 128 values of bucket 0"):
        client.push(grads, hyper=Hyper(2.0), rows=1)
    assert cut.fired.is_set()
    expected = np.full(1000, -2.0, np.float32)
    expected[0] = 0.0
    np.testing.assert_array_equal(parts.bed.pulled(client)["trainable"], expected)
    assert client.push(filled(manifest, 1.0), hyper=Hyper(2.0), rows=1).applied
