"""Frozen groups: seeded with the others, pulled once, in checkpoints, in no push."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ps.checkpoint.choice import RestoreOptions, read_manifest
from ps.checkpoint.inspect import export_npz, inspect
from ps.checkpoint.restore import verify
from ps.client.client import PSClient
from ps.client.saving.periodic_saver import Period, PeriodicSaver
from ps.client.saving.saver import SaveOptions
from ps.dense.frozen import FrozenValues
from ps.dense.shard import DenseShard
from ps.errors import (
    CheckpointError,
    ManifestMismatch,
    PSSettingsError,
    ServerPhaseError,
    ShapeError,
)
from ps.manifest.manifest import Adam, Frozen, GroupSpec, Hyper, Layout, Manifest, ParamSpec
from ps.manifest.table_spec import TableSpec
from ps.protocol import messages
from ps.protocol.messages import Number
from rpc.errors import RemoteError
from tests.support.ps_cluster import (
    Arrays,
    cluster,
    filled,
    frozen_arrays,
    make_manifest,
    random_arrays,
    raw_call,
    run_all,
    succeeded,
    with_frozen,
)

HYPER = Hyper(0.1)
PLAIN = make_manifest(60, rule=Adam())
MANIFEST = with_frozen(PLAIN, 400)


def frozen_of(client: PSClient, manifest: Manifest = MANIFEST, timeout_s: float = 20.0) -> Arrays:
    into = {name: np.full_like(array, np.nan) for name, array in frozen_arrays(manifest, 0).items()}
    client.pull_frozen(manifest, into, timeout_s=timeout_s)
    return into


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name], equal_nan=True) for name in one
    )


def values(seed: int = 1, manifest: Manifest = MANIFEST) -> Arrays:
    return random_arrays(manifest, seed) | frozen_arrays(manifest, seed)


def test_buckets_of_frozen_groups_come_after_all_others():
    first = msgspec.structs.replace(MANIFEST, groups=MANIFEST.groups[::-1])
    for manifest in (MANIFEST, first):
        pushed, frozen = Layout.of(manifest), Layout.frozen(manifest)
        whole = Layout.whole(manifest)
        assert pushed == Layout.of(PLAIN)
        assert [bucket.id for bucket in whole.buckets] == [*range(len(whole.buckets))]
        assert whole.buckets == pushed.buckets + frozen.buckets
        assert {bucket.group for bucket in frozen.buckets} == {"frozen"}
        assert frozen.groups[0].first_bucket == len(pushed.buckets)
    assert MANIFEST.hash() == PLAIN.hash()
    assert MANIFEST.frozen_hash() != with_frozen(PLAIN, 402).frozen_hash()


@pytest.mark.parametrize("num_servers", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_worker_pulls_what_the_chief_has_seeded(num_servers, dtype):
    manifest = with_frozen(PLAIN, 400, dtype)
    with cluster(num_servers=num_servers, num_workers=2) as bed:
        clients = bed.workers(manifest, values(1, manifest))
        for client in clients:
            assert same(frozen_of(client, manifest), frozen_arrays(manifest, 1))
        again = bed.client(1, 1)  # a worker that is started again
        assert again.attach() == manifest
        assert same(frozen_of(again, manifest), frozen_arrays(manifest, 1))
        bed.clients[0].seed(manifest, values(2, manifest))  # as a chief that is started again
        assert same(frozen_of(again, manifest), frozen_arrays(manifest, 1))


def test_a_push_carries_nothing_of_them():
    moved = []
    for manifest in (PLAIN, MANIFEST):
        with cluster() as bed:
            (client,) = bed.workers(manifest, values(1, manifest))
            before = client.link_stats()[0]
            client.push_pull(filled(manifest, 1.0), filled(manifest), hyper=HYPER, rows=1)
            after = client.link_stats()[0]
            moved.append((after.bytes_out - before.bytes_out, after.bytes_in - before.bytes_in))
    assert moved[0] == moved[1]


def test_a_push_to_them_is_refused():
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, values())
        with pytest.raises(ShapeError, match=r"grads must have the groups \['trainable'\]"):
            client.push(values(), hyper=HYPER, rows=1)
        push = messages.Push(MANIFEST.hash(), Number(1, 1), 1, HYPER)
        with pytest.raises(RemoteError, match="push brought"):
            raw_call(bed, 0, push, list(values().values()))
        with pytest.raises(ShapeError, match="values must have the groups"):
            client.assign(values())
        assert same(frozen_of(client), frozen_arrays(MANIFEST, 1))


def test_other_frozen_weights_are_refused_by_name():
    other = with_frozen(PLAIN, 402)
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, values())
        with pytest.raises(ManifestMismatch, match="'frozen' with 403 elements"):
            frozen_of(client, other)
        with pytest.raises(ManifestMismatch, match=r"'backbone/kernel' expected shape \(200, 2\)"):
            client.seed(other, values(1, other))
        with pytest.raises(ManifestMismatch, match="group 'frozen' is missing"):
            client.seed(PLAIN, values(1, PLAIN))


def test_a_frozen_weight_may_be_anything(tmp_path: Path):
    given = values()
    given["frozen"][:3] = [np.inf, -np.inf, np.nan]
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, given)
        client.save(tmp_path, 1)
    with cluster() as bed:
        client = bed.client()
        client.restore(tmp_path)
        assert same(frozen_of(client), {"frozen": given["frozen"]})


@pytest.mark.fault("F42")
@pytest.mark.parametrize("num_servers", [1, 2, 5])
def test_checkpoints_hold_them_once(tmp_path: Path, num_servers: int):
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(MANIFEST, values())
        options = SaveOptions(full_every=9)
        client.save(tmp_path, 1, options=options)
        client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
        client.save(tmp_path, 2, options=options)
        expected = bed.pulled(client)
        assert client.save(tmp_path, None) == f"{tmp_path}/step-2"
    sizes = [sum(shard.nbytes for shard in read_manifest(tmp_path, step).shards) for step in (1, 2)]
    assert sizes[0] - sizes[1] > MANIFEST.group("frozen").nbytes - 100
    verify(tmp_path, read_manifest(tmp_path, 2))
    with cluster(num_servers=num_servers) as bed:
        client = bed.client()
        assert client.restore(tmp_path) == 2
        assert same(bed.pulled(client), expected)
        assert same(frozen_of(client), frozen_arrays(MANIFEST, 1))
        client.seed(MANIFEST, values(7))  # the chief's own count no more
        assert same(frozen_of(client), frozen_arrays(MANIFEST, 1))
        assert all(server.saved_as for server in client.describe())
    out = tmp_path / "out.npz"
    export_npz(tmp_path, read_manifest(tmp_path, 2), out)
    with np.load(out) as arrays:
        found = np.concatenate(
            [arrays[f"frozen/backbone/{name}"].ravel() for name in ("kernel", "bias")]
        )
    assert np.array_equal(found, frozen_arrays(MANIFEST, 1)["frozen"])
    groups = {group.name: group for group in inspect(tmp_path).steps[0].groups}
    assert (groups["frozen"].rule, groups["frozen"].slots) == ("frozen", ())


@pytest.mark.fault("F41")
def test_a_changed_byte_of_a_frozen_bucket_is_found(tmp_path: Path):
    with cluster() as bed:
        (client,) = bed.workers(MANIFEST, values())
        client.save(tmp_path, 1)
    path = tmp_path / "step-1" / "ps-0.data"
    data = bytearray(path.read_bytes())
    place = data.index(frozen_arrays(MANIFEST, 1)["frozen"][:4].tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="the digest of bucket"):
        verify(tmp_path, read_manifest(tmp_path, 1))


@pytest.mark.fault("F42")
@pytest.mark.parametrize("asks", [False, True])
def test_a_checkpoint_without_them_gets_them_with_the_seed(tmp_path: Path, asks: bool):
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(PLAIN, random_arrays(PLAIN, 1))
        client.push(filled(PLAIN, 1.0), hyper=HYPER, rows=1)
        client.save(tmp_path, 1)
        trained = bed.pulled(client)
    with cluster(num_servers=3, num_workers=2) as bed:
        chief, other = bed.client(0), bed.client(1)
        chief.restore(
            tmp_path, like=RestoreOptions(manifest=MANIFEST) if asks else RestoreOptions()
        )
        other.attach()
        with pytest.raises(ServerPhaseError, match="has no frozen weights"):
            frozen_of(other, timeout_s=0.1)
        has_asked = threading.Event()

        def wait_for_it() -> Arrays:
            has_asked.set()
            return frozen_of(other)

        def seed() -> None:
            assert has_asked.wait(20)
            chief.seed(MANIFEST, values(5))

        pulled, _ = succeeded(run_all(wait_for_it, seed))
        assert same(pulled, frozen_arrays(MANIFEST, 5))
        assert same(bed.pulled(chief), trained)
        other.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)  # attached before they came
        assert chief.save(tmp_path, None).endswith("step-2")
    with cluster() as bed:
        client = bed.client()
        assert client.restore(tmp_path) == 2
        assert same(frozen_of(client), frozen_arrays(MANIFEST, 5))


def test_frozen_weights_that_came_late_are_something_to_save(tmp_path: Path):
    with cluster() as bed:
        (client,) = bed.workers(PLAIN, random_arrays(PLAIN, 1))
        client.save(tmp_path, None)
    with cluster() as bed:
        client = bed.client()
        client.restore(tmp_path)
        assert client.describe()[0].saved_as
        client.seed(MANIFEST, values())
        assert not client.describe()[0].saved_as
        assert client.save(tmp_path, None).endswith("step-1")
        assert client.save(tmp_path, None).endswith("step-1")
    assert read_manifest(tmp_path).manifest == MANIFEST


def test_a_pull_does_not_move_them():
    shards = [
        DenseShard(manifest, rank=0, num_servers=1, num_workers=1) for manifest in (PLAIN, MANIFEST)
    ]
    assert shards[1].frozen.nbytes == MANIFEST.group("frozen").nbytes
    assert shards[1].value_nbytes == shards[0].value_nbytes


def test_nothing_is_packed_and_no_row_is_frozen():
    with pytest.raises(PSSettingsError, match="is for gradients, frozen weights have none"):
        GroupSpec("frozen", "float32", Frozen(), (ParamSpec("a", (2,)),), "fp16")
    with pytest.raises(PSSettingsError, match="Frozen is for groups"):
        TableSpec(name="t", dim=2, rule=Frozen())


@pytest.mark.fault("F42")
@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_saver_saves_what_another_client_has_seeded_since(tmp_path: Path, num_servers: int):
    with cluster() as bed:
        (client,) = bed.workers(PLAIN, random_arrays(PLAIN, 1))
        client.save(tmp_path, 1)
    with cluster(num_servers=num_servers) as bed:
        chief, own = bed.client(), bed.client()
        own.restore(tmp_path)
        options = SaveOptions(full_every=10)
        period = Period(directory=str(tmp_path), every_s=3600.0, options=options)
        saver = PeriodicSaver(period, lambda: own)
        try:
            saver.start(saved_step=1)
            assert saver.save_now() == ""
            chief.seed(MANIFEST, values(5))
            for _ in range(2):
                chief.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
                assert saver.save_now() == ""
                assert saver._num_failed == 0
            expected, step = bed.pulled(chief), saver.saved_step
        finally:
            saver.close()
    assert read_manifest(tmp_path, step).is_delta, "to a base of the same model"
    with cluster() as bed:
        client = bed.client()
        assert client.restore(tmp_path) == step
        assert same(bed.pulled(client), expected)
        assert same(frozen_of(client), frozen_arrays(MANIFEST, 5))


@pytest.mark.fault("F42")
def test_a_delta_never_adds_to_a_save_of_another_model(tmp_path: Path):
    with cluster() as bed:
        (client,) = bed.workers(PLAIN, random_arrays(PLAIN, 1))
        client.save(tmp_path, 1)
    with cluster() as bed:
        client = bed.client()
        client.restore(tmp_path)
        options = SaveOptions(full_every=10)
        client.save(tmp_path, 5, options=options)
        client.seed(MANIFEST, values())
        client.save(tmp_path, 6, options=options)
        client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
        client.save(tmp_path, 7, options=options)
        expected = bed.pulled(client)
    assert [read_manifest(tmp_path, step).is_delta for step in (6, 7)] == [False, True]
    with cluster() as bed:
        client = bed.client()
        assert client.restore(tmp_path, step=7) == 7
        assert same(bed.pulled(client), expected)
        assert same(frozen_of(client), frozen_arrays(MANIFEST, 1))


def test_a_save_that_only_some_servers_have_them_in_is_not_committed(tmp_path: Path):
    with cluster() as bed:
        (client,) = bed.workers(PLAIN, random_arrays(PLAIN, 1))
        client.save(tmp_path, 1)
    with cluster(num_servers=2) as bed:
        client = bed.client()
        client.restore(tmp_path)
        first = bed.servers[0]._service.life.loaded()
        first.take(MANIFEST, FrozenValues(MANIFEST, rank=0, num_servers=2))
        with pytest.raises(CheckpointError, match=r"some shards lack them\. The save is not"):
            client.save(tmp_path, 2)
        client.seed(MANIFEST, values(5))
        client.save(tmp_path, 2)
    assert read_manifest(tmp_path, 2).manifest == MANIFEST
