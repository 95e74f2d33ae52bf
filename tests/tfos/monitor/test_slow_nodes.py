"""Slow workers and servers, made so, and what their own counters tell of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from ps.client.client import PSClient
from ps.manifest.manifest import Hyper
from tests.support.channel_proxy import Fault
from tests.support.proxied_cluster import ProxiedCluster
from tests.support.proxied_cluster import proxied as proxied
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest, run_all, succeeded
from tfos.control.members import Member
from tfos.control.messages import Heartbeat
from tfos.keras.step.step_clock import StepClock
from tfos.monitor import stragglers
from tfos.topology import plan

pytestmark = pytest.mark.socket

HYPER = Hyper(0.5)
STEPS = 4
SLOW_STEP_S = 0.2


def member(name: str, progress: dict[str, float] | None = None, stats: bytes = b"") -> Member:
    """A node as the driver knows it, with a first and a last heartbeat."""
    planned = next(node for node in plan(4, 2).nodes if node.name == name)
    found = Member(planned)
    for seq, values, told in ((1, {}, b""), (2, progress or {}, stats)):
        found.take_heartbeat(Heartbeat(found.node, seq, "", progress=values, stats=told), 0.0)
    return found


def windows(client: PSClient) -> dict[str, stragglers.ServerWindow]:
    found = {}
    for stats in client.stats():
        server = member(f"ps:{stats.server}", stats=msgspec.msgpack.encode(stats))
        found[server.name] = stragglers.window_of(server)
    return {name: window for name, window in found.items() if window is not None}


@pytest.mark.slow
@pytest.mark.fault("F32")
@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_the_slow_worker_is_named(consistency: str):
    manifest = make_manifest(1000, rule=ADD, consistency=consistency)
    with cluster("tcp", num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))

        def train(rank: int, compute_s: float) -> Member:
            clock, values = StepClock(), filled(manifest, 1.0)
            for _ in range(STEPS):
                with clock.on("compute"):
                    threading.Event().wait(compute_s)
                with clock.on("push"):
                    clients[rank].push(values, hyper=HYPER, rows=1)
            return member(f"worker:{rank}", {"steps": STEPS, **clock.spent()})

        workers = succeeded(run_all(partial(train, 0, 0.002), partial(train, 1, SLOW_STEP_S)))
        waits = stragglers.waits_of(windows(clients[0]).values())
        times = {each.name: stragglers.step_times(each, waits) for each in workers}
        found = {name: each for name, each in times.items() if each is not None}
        assert stragglers.find_straggler(found).startswith("straggler: worker:1 takes")
        assert found["worker:1"].compute_s >= STEPS * SLOW_STEP_S
        if consistency == "sync":
            assert found["worker:0"].wait_s > found["worker:0"].push_s


@pytest.mark.slow
@pytest.mark.fault("F33")
def test_the_server_behind_a_slow_link_is_named(proxied: Callable[..., ProxiedCluster]):
    parts = proxied(num_servers=2)
    manifest = make_manifest(100_000, rule=ADD, bucket_bytes=4096)
    (client,) = parts.workers(manifest)
    (slow,) = parts.proxies[1].arm(Fault("up", 2000, "drip", num_bytes=1000))
    for _ in range(3):
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
    assert slow.fired.is_set()
    note = stragglers.hot_shard(
        {name: stragglers.server_load(each) for name, each in windows(client).items()}
    )
    assert note.startswith("hot shard: ps:1 takes")
    assert "receiving and sending" in note
