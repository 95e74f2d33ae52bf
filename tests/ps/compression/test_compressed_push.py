"""Compressed pushes over servers: the sums, the modes, exactly once, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from ps.checkpoint.choice import RestoreOptions
from ps.client.client import PSClient
from ps.client.error_feedback import ErrorFeedback
from ps.compression import format as packing
from ps.compression.format import Compression
from ps.compression.kernels import ALL_KINDS, unpack, warm_client, warm_server
from ps.errors import ManifestMismatch, NonFiniteGradient, StaleGeneration
from ps.manifest.manifest import (
    SGD,
    Adam,
    Consistency,
    GroupSpec,
    Hyper,
    Layout,
    Manifest,
    ParamSpec,
)
from ps.optim.clipping import Clipper
from ps.protocol import messages
from ps.protocol.messages import Number
from ps.server import receive
from rpc.auth.handshake import Role
from rpc.errors import RemoteError
from tests.support.proxied_cluster import proxied
from tests.support.ps_cluster import (
    ADD,
    cluster,
    filled,
    make_manifest,
    random_arrays,
    raw_call,
    run_all,
    succeeded,
    with_frozen,
)

__all__ = ["proxied"]

Arrays = dict[str, np.ndarray[Any, Any]]
pytestmark = pytest.mark.socket
HYPER = Hyper(0.1)
SIZE = 2000
BUCKET_BYTES = 1536
"""384 elements: one and a half blocks, so blocks end at buckets."""
each_kind = pytest.mark.parametrize("kind", ALL_KINDS)


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    warm_client(ALL_KINDS)
    warm_server(ALL_KINDS)


def compressed(kind: Compression, rule: Any = ADD, **settings: Any) -> Manifest:
    """A packed group between two that travel as they are."""
    plain = make_manifest(SIZE, rule=rule, statistics=7, bucket_bytes=BUCKET_BYTES, **settings)
    trainable, statistics = plain.groups
    packed = msgspec.structs.replace(trainable, compression=kind)
    wide = GroupSpec("wide", "float64", SGD(), (ParamSpec("w", (5,)),))
    return msgspec.structs.replace(plain, groups=(wide, packed, statistics))


def plain(manifest: Manifest) -> Manifest:
    groups = tuple(msgspec.structs.replace(spec, compression="none") for spec in manifest.groups)
    return msgspec.structs.replace(manifest, groups=groups)


def as_unpacked(packer: ErrorFeedback, manifest: Manifest, gradients: Arrays) -> Arrays:
    """What one server gets of a push, unpacked by hand; keeps what was left out."""
    packer.pack(gradients)
    (wide, data, statistics) = packer.payloads(gradients)[0]
    packer._keep([0])
    out, taken = np.empty(SIZE, np.float32), 0
    kind = manifest.group("trainable").compression
    for bucket in Layout.of(manifest).buckets:
        if bucket.group == "trainable":
            stop = taken + packing.packed_nbytes(kind, bucket.num_elements)
            piece = np.frombuffer(data[taken:stop], np.uint8)
            unpack(kind, piece, out[bucket.start : bucket.stop])
            taken = stop
    assert taken == data.nbytes
    assert bytes(wide) == gradients["wide"].tobytes()
    assert bytes(statistics) == gradients["statistics"].tobytes()
    return {**gradients, "trainable": out}


MODES: dict[str, dict[str, Any]] = {
    "async": {"rule": Adam()},
    "async clipped": {"rule": SGD(global_clipnorm=0.5)},
    "ssp": {"rule": Adam(), "consistency": "ssp", "staleness_bound": 1},
    "sync": {"rule": Adam(), "consistency": "sync"},
    "sync clipped": {"rule": SGD(clipnorm=0.5), "consistency": "sync"},
}


def trained(manifest: Manifest, num_servers: int, steps: list[list[Arrays]]) -> Arrays:
    with cluster("inproc", num_servers=num_servers, num_workers=len(steps[0])) as bed:
        clients = bed.workers(manifest, random_arrays(manifest, 99))
        for step in steps:
            pairs = enumerate(zip(clients, step, strict=True), 3)
            works = [partial(c.push, grads, hyper=HYPER, rows=rows) for rows, (c, grads) in pairs]
            succeeded(run_all(*works))
        return bed.pulled(clients[0])


@each_kind
@pytest.mark.parametrize("mode", MODES)
def test_servers_do_with_packed_gradients_what_they_do_with_the_unpacked(
    kind: Compression, mode: str
):
    """Bit for bit, on one server and on three; clipping comes before packing."""
    manifest = compressed(kind, **MODES[mode])
    waits = manifest.consistency == "sync"
    num_workers = 2 if waits else 1
    steps = [
        [random_arrays(manifest, 9 * step + rank) for rank in range(num_workers)]
        for step in range(4)
    ]
    packers = [ErrorFeedback(manifest, 1) for _ in range(num_workers)]
    clipper = Clipper(manifest, num_workers=num_workers)
    by_hand = [
        [
            as_unpacked(packer, manifest, clipper.clip(grads))
            for packer, grads in zip(packers, step, strict=True)
        ]
        for step in steps
    ]
    unclipped = {} if waits else {"rule": SGD()}
    is_clipped_here = "clipped" in mode and not waits
    oracle = plain(compressed(kind, **{**MODES[mode], **(unclipped if is_clipped_here else {})}))
    expected = trained(oracle, 1, by_hand)
    for num_servers in (1, 3):
        found = trained(manifest, num_servers, steps)
        assert all(np.array_equal(found[name], expected[name]) for name in expected), num_servers


def whole_numbers(manifest: Manifest, seed: int) -> Arrays:
    """Gradients whose sums, in fp16 and bf16, are exact in float32."""
    random = np.random.default_rng(seed)
    return {
        spec.name: random.integers(-3000, 3000, spec.num_elements).astype(spec.dtype)
        for spec in manifest.groups
    }


def left_of(client: PSClient) -> np.ndarray[Any, Any]:
    packer = client._dense._packer
    assert packer is not None
    return packer._left["trainable"]


def check_nothing_lost(bed: Any, clients: Any, pushed: np.ndarray[Any, Any]) -> None:
    """Add adds, so the values are the sum of what came through."""
    got = bed.pulled(clients[0])["trainable"]
    left = sum(left_of(client) for client in clients)
    assert np.abs(left).max() > 0
    assert np.array_equal(got + left, pushed)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_values_and_what_is_left_are_the_sum_of_all_gradients(kind: Compression, transport: str):
    manifest = compressed(kind)
    with cluster(transport, num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        pushed = np.zeros(SIZE, np.float32)
        for step in range(6):
            grads = [whole_numbers(manifest, 2 * step + rank) for rank in (0, 1)]
            pushed += grads[0]["trainable"] + grads[1]["trainable"]
            into = filled(manifest)
            for client, one in zip(clients, grads, strict=True):
                client.push_pull(one, into, hyper=HYPER, rows=1)
        check_nothing_lost(bed, clients, pushed)


def test_a_frozen_group_has_no_part_in_packed_pushes():
    manifest = with_frozen(compressed("bf16"), 40, "float64")
    gradients = filled(manifest, 1.0)
    with_it, without = (ErrorFeedback(each, 2) for each in (manifest, manifest.without_frozen()))
    for packer in (with_it, without):
        packer.pack(gradients)
    assert with_it.payloads(gradients) == without.payloads(gradients)


def test_who_pushes_nothing_has_nothing_to_pack_with():
    """A driver that saves or looks needs neither compiled loops nor memory for what is left."""
    manifest = compressed("int8")
    with cluster("inproc") as bed:
        bed.workers(manifest, filled(manifest))
        driver = bed.driver()
        assert driver.attach() == manifest
        assert driver._dense._packer is None
        assert np.array_equal(bed.pulled(driver)["trainable"], np.zeros(SIZE))


@each_kind
def test_the_counted_bytes_are_those_on_the_wire(kind: Compression):
    manifest = compressed(kind)
    with cluster("tcp", num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        before = sum(server.bytes_in for server in client.stats())
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        came = sum(server.bytes_in for server in client.stats()) - before
    buckets = [b for b in Layout.of(manifest).buckets if b.group == "trainable"]
    packed = sum(packing.packed_nbytes(kind, bucket.num_elements) for bucket in buckets)
    assert came == packed + 5 * 8 + 7 * 4
    assert packed < SIZE * (1.1 if kind == "int8" else 2.1)


@pytest.mark.fault("F28")
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_packed_push_cut_anywhere_is_applied_and_kept_once(
    kind: Compression, proxied, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(receive, "READ_BYTES", BUCKET_BYTES)
    parts = proxied()
    manifest = compressed(kind)
    (client,) = parts.workers(manifest)
    pushed = np.zeros(SIZE, np.float32)
    cuts = [("up", offset) for offset in range(0, 4000, 400)] + [("down", 0), ("down", 50)]
    for number, cut in enumerate(cuts):
        grads = whole_numbers(manifest, number)
        pushed += grads["trainable"]
        (planned,) = parts.proxy.plan(cut)
        client.push(grads, hyper=HYPER, rows=1)
        assert planned.fired.is_set()
    check_nothing_lost(parts.bed, [client], pushed)
    assert client.stats()[0].workers[0].pushes == len(cuts)


@pytest.mark.fault("F48")
@pytest.mark.parametrize("group", ["trainable", "wide", "statistics"])
@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_a_gradient_that_is_not_finite_is_refused_whole(consistency: str, group: str):
    """No server gets a part of it, what was left before stays, and barriers count a null push."""
    manifest = compressed("bf16", SGD(), consistency=consistency)
    with cluster("inproc", num_servers=3, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        good, bad = (whole_numbers(manifest, seed) for seed in (1, 2))
        works = [partial(client.push, good, hyper=HYPER, rows=1) for client in clients]
        succeeded(run_all(*works))
        left = left_of(clients[1]).copy()
        before = bed.pulled(clients[0])
        bad[group][-1] = np.nan
        works[1] = partial(clients[1].push, bad, hyper=HYPER, rows=1)
        ack, refusal = run_all(*works)
        assert isinstance(refusal, NonFiniteGradient)
        assert refusal.details["group"] == group
        assert np.array_equal(left_of(clients[1]), left)
        assert ack.clock == {"async": 3, "sync": 2}[consistency]
        alone = bed.pulled(clients[0])["wide"] - before["wide"]
        assert np.allclose(alone, -0.1 * good["wide"])
        works[1] = partial(clients[1].push, good, hyper=HYPER, rows=1)
        succeeded(run_all(*works))


@pytest.mark.fault("F06")
def test_what_is_left_counts_where_it_was_acknowledged():
    """One server has fenced the worker, the other has not heard of that yet."""
    manifest = compressed("fp16")
    with cluster("inproc", num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        raw_call(bed, 1, messages.Fence(0, 1), role=Role.DRIVER)
        grads = whole_numbers(manifest, 3)
        with pytest.raises(StaleGeneration):
            client.push(grads, hyper=HYPER, rows=1)
        newer = bed.client(0, generation=1)
        newer.attach()
        got = bed.pulled(newer)["trainable"]
        left = left_of(client)
        cut = next(p.stop for p in client._dense.pieces[0] if p.group == "trainable")
        assert np.abs(left[:cut]).max() > 0
        assert np.array_equal((got + left)[:cut], grads["trainable"][:cut])
        assert not got[cut:].any()
        assert not left[cut:].any()
        assert not left_of(newer).any()


def test_an_overflowing_sum_is_refused_and_the_next_push_counts():
    manifest = compressed("bf16")
    with cluster("inproc") as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        largest = float(np.finfo(np.float32).max)
        huge = filled(manifest, largest)
        client.push(huge, hyper=HYPER, rows=1)
        with pytest.raises(NonFiniteGradient, match="with what earlier packing has left out"):
            client.push(huge, hyper=HYPER, rows=1)
        lower = filled(manifest, -largest)
        client.push(lower, hyper=HYPER, rows=1)
        got = bed.pulled(client)["trainable"] + left_of(client)
        assert not got.any()


@pytest.mark.attack("A09")
@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_hostile_packing_is_refused_with_both_values(consistency: Consistency):
    """A group of 384 + 1 elements: each of its two buckets begins with its scales."""
    spec = GroupSpec("t", "float32", ADD, (ParamSpec("w", (385,)),), compression="int8")
    manifest = Manifest(groups=(spec,), bucket_bytes=BUCKET_BYTES, consistency=consistency)
    first, second = (packing.packed_nbytes("int8", size) for size in (384, 1))
    good = np.zeros(first + second, np.uint8)
    views = packing.views_of_packed("int8", good[first:], 1)
    views[0][:], views[1][:] = 0.5, 4
    with cluster("inproc", num_workers=2 if consistency == "sync" else 1) as bed:
        clients = bed.workers(manifest, filled(manifest))

        def push(data: np.ndarray[Any, Any], sequence: int) -> Any:
            number = Number(1, sequence)
            request = messages.Push(manifest.hash(), number, 1, HYPER, wait_s=10.0)
            return raw_call(bed, 0, request, [data])

        others = [partial(client.push_null, rows=1) for client in clients[1:]]
        for size in (first, 385 * 4, first + second + 4):
            with pytest.raises(RemoteError, match=f"brought {size} bytes.* take {first + second}"):
                push(np.zeros(size, np.uint8), 1)
        for sequence, bad in enumerate((np.nan, np.inf, -1.0), 1):
            hostile = good.copy()
            packing.views_of_packed("int8", hostile[first:], 1)[0][:] = bad
            refusal = run_all(partial(push, hostile, sequence), *others)[0]
            assert isinstance(refusal, RemoteError)
            assert refusal.code == "packing"
            assert f"scale 0 of 1 of a gradient packed as int8 is {bad}" in refusal.message
        succeeded(run_all(partial(push, good, 4), *others))
        assert bed.pulled(clients[0])["t"].tolist() == [0.0] * 384 + [2.0]


def test_a_checkpoint_restores_into_another_compression(tmp_path):
    manifest = compressed("int8", Adam())
    with cluster("inproc") as bed:
        (client,) = bed.workers(manifest, random_arrays(manifest, 1))
        client.push(random_arrays(manifest, 2), hyper=HYPER, rows=1)
        client.save(tmp_path, 1)
        saved = bed.pulled(client)
    with cluster("inproc", num_servers=2) as bed:
        client = bed.client()
        client.restore(tmp_path, like=RestoreOptions(manifest=plain(manifest)))
        found = bed.pulled(client)
    assert all(np.array_equal(found[name], saved[name]) for name in saved)


def test_another_compression_is_another_manifest():
    with cluster("inproc") as bed:
        bed.workers(compressed("int8"), filled(compressed("int8")))
        with pytest.raises(ManifestMismatch, match="expected compression int8, found fp16"):
            bed.client().seed(compressed("fp16"), filled(compressed("fp16")))


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("at", [slice(100), slice(-100, None)], ids=["ps:0", "ps:1"])
def test_a_clipped_gradient_that_all_drop_leaves_nothing_behind(kind: Compression, at: slice):
    rule = SGD(clipnorm=1.0)
    manifest = compressed(kind, rule=rule, consistency="sync", reduction="sum")
    grads, huge = random_arrays(manifest, 1), random_arrays(manifest, 1)
    huge["trainable"][at] = np.linspace(1e38, 3e38, 100)
    with cluster("inproc", num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        succeeded(run_all(*(partial(c.push, grads, hyper=HYPER, rows=4) for c in clients)))
        before = [left_of(client).copy() for client in clients]
        assert before[0].any()
        results = run_all(*(partial(c.push, huge, hyper=HYPER, rows=4) for c in clients))
        assert [type(result) for result in results] == [NonFiniteGradient] * 2
        for client, left in zip(clients, before, strict=True):
            np.testing.assert_array_equal(left_of(client), left)
        succeeded(run_all(*(partial(c.push, grads, hyper=HYPER, rows=4) for c in clients)))
        assert all((left_of(c) != left).any() for c, left in zip(clients, before, strict=True))
