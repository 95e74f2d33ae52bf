"""What a client's links do by themselves: connect, send again, count."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.checkpoint.choice import latest
from ps.client import channel, retry, server_group
from ps.client.channel_stats import LinkStats
from ps.client.client import PSClient
from ps.errors import (
    ClosedError,
    ManifestMismatch,
    NonFiniteGradient,
    PSSettingsError,
    RequestTimeout,
    ServerGone,
    ServerPhaseError,
)
from ps.manifest.manifest import Hyper
from ps.protocol.messages import MAX_WAIT_S, Ack
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.client.connection import Connection, PendingCall, connect, wait_any
from rpc.endpoint import Endpoint
from rpc.transport.memfd import cannot_share
from tests.support.channel_proxy import Fault
from tests.support.held_gil import holding_gil_before
from tests.support.proxied_cluster import proxied
from tests.support.ps_cluster import ADD, WAIT_S, Cluster, cluster, filled, make_manifest, run_all
from tests.support.tables import table, with_tables
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

__all__ = ["proxied"]

HYPER = Hyper(0.1)


def only(client: PSClient) -> LinkStats:
    (stats,) = client.link_stats()
    return stats


def trained(bed: Cluster) -> PSClient:
    """A client that has seeded, pushed twice and pulled once."""
    manifest = make_manifest(1000, rule=ADD)
    client = bed.client()
    client.seed(manifest, filled(manifest))
    for _ in range(2):
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
    client.pull(filled(manifest))
    return client


@pytest.mark.parametrize(
    ("transport", "path"),
    [
        ("inproc", "in process"),
        ("tcp", "tcp"),
        ("shm", "unix socket" if cannot_share() else "shared memory"),
    ],
)
def test_stats_say_which_way_is_taken_and_what_travelled(transport: str, path: str):
    with cluster(transport) as bed:
        client = bed.client()
        assert only(client) == LinkStats(server=0)
        client.close()
        stats = only(trained(bed))
    assert stats.path == path
    assert {name: each.count for name, each in stats.latencies.items()} == {
        "describe": 2,
        "compile": 1,
        "seed": 1,
        "push": 2,
        "pull": 1,
    }
    assert stats.requests == 7
    assert (stats.refused, stats.retries, stats.reconnects) == (0, 0, 0)
    assert 3 * 4000 < stats.bytes_out < 3 * 4000 + 4000  # values, two gradients
    assert 4000 < stats.bytes_in < 4000 + 2000
    for latency in stats.latencies.values():
        assert 0 < latency.p50_s <= latency.p99_s <= latency.max_s <= latency.total_s < WAIT_S


def test_a_closed_client_makes_no_lane():
    with cluster() as bed:
        client = bed.client()
        client.close()
        with pytest.raises(ClosedError, match="this client is closed"):
            client._servers.separate("lookups")


@pytest.mark.parametrize("left_s", [0.01, 0.3, 1.0, 5.0, 60.0])
def test_a_typed_answer_has_time_to_come(left_s: float):
    """On a busy machine 30 ms are not enough, and the caller would not hear what was waited for."""
    answer_s = left_s - channel.server_wait_s(left_s)
    assert min(0.5, left_s / 2) <= answer_s + 1e-9 <= 1.0 + 2e-9


@pytest.mark.parametrize("timeout_s", [2 * MAX_WAIT_S, math.inf])
def test_a_call_may_wait_for_longer_than_a_server_lets_it_at_once(tmp_path: Path, timeout_s: float):
    with cluster() as bed:
        client = trained(bed)
        assert bed.client().attach(timeout_s=timeout_s) == client.manifest
        client.save(tmp_path, 1, timeout_s=timeout_s)
    assert latest(tmp_path) == 1


def test_a_call_takes_no_nan_for_a_time(tmp_path: Path):
    with cluster() as bed:
        client = trained(bed)
        with pytest.raises(PSSettingsError, match="number of seconds, got nan"):
            client.attach(timeout_s=math.nan)
        with pytest.raises(PSSettingsError, match="number of seconds, got nan"):
            client.save(tmp_path, 1, timeout_s=math.nan)
        with pytest.raises(PSSettingsError, match="number of seconds, got nan"):
            client.rendezvous("k", b"", timeout_s=math.nan)


def test_refusals_are_counted_as_answers():
    with cluster() as bed:
        client = trained(bed)
        bad = filled(client.manifest, np.nan)
        with pytest.raises(NonFiniteGradient):
            client.push(bad, hyper=HYPER, rows=1)
        with pytest.raises(ManifestMismatch):
            client.seed(make_manifest(500), filled(make_manifest(500)))
        stats = only(client)
    assert stats.refused == 2
    assert stats.latencies["push"].count == 3


@pytest.mark.fault("F28")
def test_what_is_sent_again_and_connected_again_is_counted(proxied):
    parts = proxied()
    manifest = make_manifest(1000, rule=ADD)
    (client,) = parts.workers(manifest)
    before = only(client)
    for after_bytes in (2000, 3000):
        parts.proxy.plan(("up", after_bytes))
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
    stats = only(client)
    assert (stats.retries, stats.reconnects) == (2, 2)
    assert stats.latencies["push"].count == 2
    assert stats.bytes_out - before.bytes_out > 2 * 4000
    assert set(parts.bed.pulled(client)["trainable"]) == {2.0}


@pytest.mark.attack("A04")
def test_a_reply_whose_length_was_changed_is_asked_for_again(proxied):
    """The length of the meta is read before the MAC that covers it can be."""
    parts = proxied()
    manifest = make_manifest(1000, rule=ADD)
    (client,) = parts.workers(manifest)
    for byte_of_length in (18, 19):
        (flip,) = parts.proxy.arm(Fault("down", byte_of_length, "flip"))
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        assert flip.fired.is_set()
    assert only(client).retries == 2
    assert set(parts.bed.pulled(client)["trainable"]) == {2.0}


@pytest.mark.slow
@pytest.mark.attack("A04")
@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_length_that_grew_within_its_limit_ends_in_a_second_request(
    proxied, monkeypatch: pytest.MonkeyPatch, num_servers: int
):
    """The client waits for bytes that never come, but not until its own deadline."""
    patient = dataclasses.replace(channel._LIMITS, stall_timeout_s=0.6)
    monkeypatch.setattr(channel, "_LIMITS", patient)
    parts = proxied(num_servers=num_servers)
    manifest = make_manifest(1000, rule=ADD)
    (client,) = parts.workers(manifest)
    (flip,) = parts.proxy.arm(Fault("down", 17, "flip"))
    client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
    assert flip.fired.is_set()
    assert client.link_stats()[0].retries >= 1  # also an answer that a busy machine holds up
    assert set(parts.bed.pulled(client)["trainable"]) == {1.0}


@pytest.mark.fault("F23")
def test_servers_are_connected_to_at_the_same_time(monkeypatch: pytest.MonkeyPatch):
    """Each attempt waits for those to the other servers to begin."""
    together = threading.Barrier(3)

    def connect_with_others(*args: Any, **settings: Any) -> Connection:
        together.wait(WAIT_S)
        return connect(*args, **settings)

    with cluster(num_servers=3) as bed:
        client = bed.client()
        monkeypatch.setattr(channel, "connect", connect_with_others)
        assert [each.server for each in client.describe()] == [0, 1, 2]
        assert [each.path for each in client.link_stats()] == ["in process"] * 3


def test_servers_in_another_order_than_their_ranks_are_refused():
    with cluster(num_servers=2) as bed:
        first, second = bed.endpoints
        worker = Identity(Role.WORKER, 0)
        with (
            PSClient([second, first], bed.credentials, worker, num_workers=1) as client,
            pytest.raises(PSSettingsError, match=r"ps:0 at .* is ps:1; give the endpoints"),
        ):
            client.describe()


def test_a_client_that_was_never_attached_says_what_to_call_first():
    with cluster() as bed, bed.client() as client:
        with pytest.raises(ServerPhaseError, match=r"call seed\(\) or attach\(\) first"):
            client.pull({})
        with pytest.raises(ServerPhaseError, match=r"call seed\(\) or attach\(\) first"):
            client.tables.lookup({"user": [1]})


INTERRUPTED_PROGRAM = """
import signal, threading
from ps.client import channel
from ps.client.client import PSClient
from rpc import Credentials, Endpoint, Identity, Role

begun, told = threading.Barrier(3), threading.Event()

def connect(*_, **__):
    begun.wait()
    threading.Event().wait()

def interrupt():
    begun.wait()
    while not told.wait(0.01):  # Python misses a signal that comes just before a wait
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

def once(*_):
    if not told.is_set():
        told.set()
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, once)
channel.connect = connect
threading.Thread(target=interrupt, daemon=True).start()
endpoints = [Endpoint("127.0.0.1", port) for port in (1, 2)]
client = PSClient(endpoints, Credentials.generate(), Identity(Role.WORKER, 0), num_workers=1)
try:
    client.describe()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_process_that_is_interrupted_while_it_connects_can_end():
    command = [sys.executable, "-c", INTERRUPTED_PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "interrupted\n"


@pytest.mark.fault("F23")
def test_a_server_that_cannot_be_reached_is_named_with_the_reason(proxied):
    parts = proxied(num_servers=2)
    parts.bed.servers[1].close()
    client = parts.client(reconnect_s=0.2)
    with pytest.raises(ServerGone, match=r"ps:1 at .* could not be reached .*the last attempt: "):
        client.describe()


def test_a_client_that_is_closed_while_it_connects_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch,
):
    """Hybrid's lookups connect on a thread of theirs, and `close` does not wait for it."""
    made: list[Connection] = []
    with cluster() as bed:
        client = bed.client()
        (link,) = client._servers.links

        def connect_too_late(*args: Any, **settings: Any) -> Connection:
            link.retire()
            made.append(connect(*args, **settings))
            return made[0]

        monkeypatch.setattr(channel, "connect", connect_too_late)
        with pytest.raises(ClosedError, match="this client is closed"):
            client.describe()
        assert [each.closed for each in made] == [True]


def test_stats_wait_for_no_call_under_way():
    manifest = make_manifest(100, consistency="sync")
    with cluster(num_workers=2) as bed:
        one, other = bed.workers(manifest, filled(manifest))

        def push(client: PSClient) -> None:
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)

        def look_then_push() -> LinkStats:
            # The other one waits at the barrier, with its client's lock.
            wait_until(lambda: bool(bed.servers[0].stats().missing), "the barrier")
            stats = only(one)
            push(other)
            return stats

        _, stats = run_all(lambda: push(one), look_then_push)
        assert isinstance(stats, LinkStats)
        assert "push" not in stats.latencies
        assert only(one).latencies["push"].count == 1


@pytest.mark.parametrize("num_servers", [1, 2])
def test_an_interrupted_push_is_the_last_one(num_servers: int, monkeypatch: pytest.MonkeyPatch):
    """One server may have it and another not: the next push would stand in different clocks."""
    manifest = make_manifest(1000, rule=ADD, consistency="sync")
    with cluster("tcp", num_servers=num_servers) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)

        def interrupt(*arguments: Any, **named: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(PendingCall, "advance", interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        with pytest.raises(
            ServerPhaseError,
            match=r"no answer \(KeyboardInterrupt\): whether it was applied .* a new generation",
        ):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        assert np.isfinite(bed.pulled(client)["trainable"]).all(), "reading goes on"


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("transport", ["tcp", "inproc"])
def test_a_client_asks_again_after_an_interrupt_just_behind_its_request(
    transport: str, num_servers: int, monkeypatch: pytest.MonkeyPatch
):
    """Nobody takes that answer: it may not keep the connection for ever."""
    begin = Connection.begin

    def interrupted(*arguments: Any, **named: Any) -> Any:
        begin(*arguments, **named)
        raise KeyboardInterrupt

    with cluster(transport, num_servers=num_servers) as bed:
        client = bed.client()
        client.describe()
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "begin", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.describe()
        (outcome,) = run_all(client.describe)
        assert isinstance(outcome, list), outcome


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("num_servers", [1, 2])
def test_an_interrupted_push_to_servers_of_this_process_gets_its_answers(
    num_servers: int, place: int, monkeypatch: pytest.MonkeyPatch
):
    """A notebook's model with tables trains on after Ctrl-C, each gradient once."""
    manifest = make_manifest(1000, rule=ADD, consistency="sync")
    with cluster("inproc", num_servers=num_servers) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        advance, num_calls = PendingCall.advance, itertools.count()

        def interrupted(pending: PendingCall) -> bool:
            if next(num_calls) == place:
                raise KeyboardInterrupt
            return advance(pending)

        def push() -> Ack:
            return client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)

        with monkeypatch.context() as patched:
            patched.setattr(PendingCall, "advance", interrupted)
            with contextlib.suppress(KeyboardInterrupt):  # a fast answer needs fewer calls
                push()
        (outcome,) = run_all(push)
        assert isinstance(outcome, Ack), outcome
        assert set(bed.pulled(client)["trainable"]) == {np.float32(2)}


def test_an_interrupted_push_without_an_answer_is_the_last_one_in_this_process_too(
    monkeypatch: pytest.MonkeyPatch,
):
    """The server waits for another worker, and says so when the time of the interrupt is over."""
    manifest = make_manifest(1000, rule=ADD, consistency="sync")
    monkeypatch.setattr(server_group, "INTERRUPT_S", 0.2)
    with cluster("inproc", num_workers=2) as bed:
        client, _ = bed.workers(manifest, filled(manifest))
        client.timeout_s = 1.0

        def interrupt(_pending: Any, _timeout_s: float) -> Any:
            monkeypatch.setattr(retry, "wait_any", wait_any)
            raise KeyboardInterrupt

        monkeypatch.setattr(retry, "wait_any", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        with pytest.raises(
            ServerPhaseError, match="whether it was applied is unknown; build the model again"
        ):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)


@pytest.mark.fault("F07")
def test_a_push_that_its_own_process_held_up_gets_all_answers(monkeypatch: pytest.MonkeyPatch):
    """Nothing of it was sent when its time was over."""
    timeout_s = 0.5
    with cluster("tcp", num_servers=2) as bed:
        client = trained(bed)
        client.timeout_s = timeout_s
        held = holding_gil_before(PendingCall.advance, 2 * timeout_s)
        monkeypatch.setattr(PendingCall, "advance", held)
        push = partial(client.push, filled(client.manifest, 1.0), hyper=HYPER, rows=1)
        (outcome,) = run_all(push)
        assert isinstance(outcome, Ack), outcome
        assert set(bed.pulled(client)["trainable"]) == {np.float32(3)}


@pytest.mark.parametrize("call", ["push", "batch"])
def test_a_deadline_that_is_assigned_later_holds_for_every_call(call: str):
    """As a barrier's, which Keras assigns: workers may need minutes for a batch."""
    manifest = with_tables(table(), consistency="hybrid", staleness_bound=1)

    def push() -> None:
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)  # the other worker pushes none

    def batch() -> None:
        for _ in range(2):  # the first one stays under way
            client.tables.batch({"user": np.arange(3)})

    with cluster(num_servers=2, num_workers=2) as bed:
        client, _ = bed.workers(manifest, filled(manifest))
        client.timeout_s = 0.3
        begun_s = time.monotonic()
        with pytest.raises(RequestTimeout):
            {"push": push, "batch": batch}[call]()
        assert time.monotonic() - begun_s < WAIT_S / 2


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), 86_401.0])
def test_a_deadline_that_no_server_takes_is_refused_when_it_is_assigned(timeout_s: float):
    manifest = with_tables(table())
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        before_s = client.timeout_s
        with pytest.raises(PSSettingsError, match="timeout_s must be in"):
            client.timeout_s = timeout_s
        assert client.timeout_s == before_s
        client.describe()


def test_a_pause_draws_none_of_the_random_numbers_of_the_user():
    """All workers may read a generator by one seed: one that draws once more has another order."""
    secret = Credentials("c", b"s" * 32)
    link = channel.Channel(0, Endpoint("127.0.0.1", 1), secret, Identity(Role.WORKER, 0))
    random.seed(3)
    before = random.getstate()
    link.pause_after_disconnect()
    assert random.getstate() == before
