"""Checkpoints that somebody wrote on purpose: refused by name, nothing outside the root touched."""

import os

import msgspec
import numpy as np
import pytest

from ps.checkpoint import choice
from ps.checkpoint import format as form
from ps.checkpoint import reader as reading
from ps.checkpoint import restore as restoring
from ps.checkpoint import writer as saving
from ps.checkpoint.digest import digest
from ps.checkpoint.format import ShardIndex, ShardRecord
from ps.checkpoint.lease import Lease
from ps.checkpoint.storage import storage_at
from ps.config import ServerSettings
from ps.dense.shard import DenseShard
from ps.errors import CheckpointError
from ps.exactly_once import SessionRecord
from ps.manifest.manifest import Adam, GroupSpec, Hyper, Manifest, ParamSpec
from ps.server.save_restore import ShardExtra, restore_into

PLACE = ServerSettings(rank=0, num_servers=2, num_workers=1)


def manifest():
    params = (ParamSpec("dense/kernel", (37, 11)), ParamSpec("dense/bias", (11,)))
    return Manifest(groups=(GroupSpec("trainable", "float32", Adam(), params),), bucket_bytes=256)


@pytest.fixture
def trained():
    shards = [DenseShard(manifest(), rank=rank, num_servers=2, num_workers=1) for rank in (0, 1)]
    rng = np.random.default_rng(0)
    for shard in shards:
        for bucket in shard.buckets:
            gradient = rng.standard_normal(bucket.num_elements, np.float32)
            shard.apply(bucket.id, gradient, Hyper(0.01))
    return shards


@pytest.fixture
def two_steps(tmp_path, trained):
    """A root with the complete steps 800 and 900, three buckets on ps-0 and four on ps-1."""
    for step in (800, 900):
        records = [
            saving.write_shard(tmp_path, str(step), rank=rank, shard=shard, extra=b"records")
            for rank, shard in enumerate(trained)
        ]
        saving.commit(tmp_path, str(step), step=step, manifest=manifest(), shards=records)
    return tmp_path


@pytest.mark.fault("F42")
@pytest.mark.parametrize("without", [(), ("score", "shards")])
def test_a_later_format_is_refused_with_both_versions(two_steps, without: tuple[str, ...]):
    def change(data: dict[str, object]) -> None:
        data["format"] = 2
        for name in without:
            del data[name]

    rewrite(two_steps, change)
    with pytest.raises(CheckpointError, match=r"has format 2; this version reads 1\. Restore"):
        choice.read_manifest(two_steps, 900)


def rewrite(root, change):
    """Change the manifest of step 900 and give it a right digest, as an attacker could."""
    path = root / "step-900" / "manifest.json"
    data = msgspec.json.decode(path.read_bytes().partition(b"\n")[2])
    change(data)
    body = msgspec.json.encode(data)
    path.write_bytes(digest(body).encode() + b"\n" + body)


def set_shard(index, **fields):
    return lambda data: data["shards"][index].update(fields)


@pytest.mark.attack("A19")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_shard(0, rank="../../etc/passwd"), "Expected `int`"),
        (set_shard(1, rank=0), r"lists the shards \[0, 0\], expected 0..1"),
        (set_shard(1, rank=7), r"lists the shards \[0, 7\]"),
        (set_shard(0, nbytes=1 << 40), r"bytes, the manifest says 1099511627776"),
        (set_shard(0, nbytes=-1), "Expected `int` >= 0"),
        (set_shard(0, index_nbytes=1 << 40), "Expected `int` <= "),
        (set_shard(0, index_nbytes=100_000), "an index of 100000 bytes in a file of"),
        (set_shard(0, index_digest="0" * 32), "the digest of its index is"),
        (set_shard(0, index_digest="zz"), "matching regex"),
        (lambda data: data.update(step=float("nan")), "Expected `int`"),
        (lambda data: data.update(step=1), "says step 1, its directory step 900"),
        (lambda data: data["shards"].pop(), r"lacks \d+ of \d+ buckets"),
        (lambda data: data["manifest"].update(bucket_bytes=8), "bucket_bytes"),
        (
            lambda data: data["manifest"]["groups"][0]["params"][0].update(shape=[1 << 40]),
            "its parts make|lacks|buckets are above",
        ),
        (
            lambda data: data["manifest"]["groups"][0]["params"][0].update(shape=[4096, 11]),
            "its parts make|lacks",
        ),
    ],
)
def test_a_hostile_manifest_is_refused_by_name(two_steps, change, message):
    rewrite(two_steps, change)
    with pytest.raises(CheckpointError, match=message):
        restoring.verify(two_steps, choice.read_manifest(two_steps, 900))


@pytest.mark.attack("A19")
def test_a_manifest_above_the_limit_is_refused_before_it_is_read(two_steps, monkeypatch):
    size = (two_steps / "step-900" / "manifest.json").stat().st_size
    monkeypatch.setattr(reading, "MAX_MANIFEST_BYTES", size)
    assert choice.read_manifest(two_steps, 900).step == 900
    monkeypatch.setattr(reading, "MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(CheckpointError, match=f"has {size} bytes, the limit is {size - 1}"):
        choice.read_manifest(two_steps, 900)


def forge(root, change):
    """Change the index of ps-0 in step 900 and make all digests and sizes fit."""
    path = root / "step-900" / "ps-0.data"
    manifest_path = root / "step-900" / "manifest.json"
    checkpoint = form.decode_manifest(manifest_path.read_bytes(), str(manifest_path))
    shard = checkpoint.shards[0]
    data = path.read_bytes()
    body, encoded = data[: -shard.index_nbytes], data[-shard.index_nbytes :]
    index = change(msgspec.msgpack.decode(encoded, type=ShardIndex))
    encoded = msgspec.msgpack.encode(index)
    path.write_bytes(body + encoded)
    record = ShardRecord(0, len(body + encoded), len(encoded), digest(encoded))
    forged = msgspec.structs.replace(checkpoint, shards=(record, *checkpoint.shards[1:]))
    manifest_path.write_bytes(form.encode_manifest(forged))


@pytest.mark.attack("A19")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bucket_ids": (0, 1, 999)}, "bucket 999, the manifest has"),
        ({"bucket_ids": (0, 1, 1)}, "bucket 1 is in ps-0.data and in ps-0.data"),
        ({"bucket_ids": (0, 1, 3)}, "bucket 3 is in ps-0.data and in ps-1.data"),
        ({"steps": (1,)}, "3 buckets, 1 steps, 3 digests"),
        ({"extra_nbytes": 1 << 50}, "its parts make"),
        ({"digests": ("0" * 32,) * 3}, "the digest of bucket 0"),
        ({"extra_digest": "0" * 32}, "the digest of its records"),
    ],
)
def test_a_hostile_index_is_refused_by_name(two_steps, fields, message):
    forge(two_steps, lambda index: msgspec.structs.replace(index, **fields))
    with pytest.raises(CheckpointError, match=message):
        restoring.verify(two_steps, choice.read_manifest(two_steps, 900))


@pytest.mark.attack("A18")
@pytest.mark.parametrize(
    "save_id",
    ["", "..", "../x", "a/b", "a\\b", "a\0b", "A", "%2e%2e", ".hidden", "a" * 65, "\uff41"],
)
def test_a_save_id_cannot_leave_the_root(tmp_path, trained, save_id):
    root = tmp_path / "root"
    for call in (
        lambda: saving.write_shard(root, save_id, rank=0, shard=trained[0]),
        lambda: saving.abort(root, save_id),
        lambda: saving.commit(root, save_id, step=1, manifest=manifest(), shards=[]),
    ):
        with pytest.raises(CheckpointError, match="a save id has 1 to 64 of the characters"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.attack("A18")
@pytest.mark.parametrize("root", ["", "hdfs://nn/x", "a\0b"])
def test_a_root_that_is_no_local_directory_is_refused(trained, root):
    with pytest.raises(CheckpointError, match="need a local directory"):
        saving.write_shard(root, "ab", rank=0, shard=trained[0])


@pytest.mark.attack("A18")
def test_links_and_devices_are_not_followed(two_steps, tmp_path_factory, trained):
    outside = tmp_path_factory.mktemp("outside")
    shard = two_steps / "step-900" / "ps-0.data"
    shard.rename(outside / "ps-0.data")
    shard.symlink_to(outside / "ps-0.data")
    with pytest.raises(CheckpointError, match=r"ps-0.data is not a regular file"):
        choice.read_manifest(two_steps, 900)
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match=r"ps-0.data is not a regular file"):
        choice.read_manifest(two_steps, 900)
    (two_steps / "step-901").symlink_to(two_steps / "step-800")
    with pytest.raises(CheckpointError, match="step-901 is a link"):
        choice.read_manifest(two_steps, 901)
    (two_steps / ".tmp-ab").mkdir()
    (two_steps / ".tmp-ab" / "ps-0.data").symlink_to(outside / "victim")
    with pytest.raises(CheckpointError, match="cannot write"):
        saving.write_shard(two_steps, "ab", rank=0, shard=trained[0])
    assert not (outside / "victim").exists()


@pytest.mark.attack("A18")
def test_a_link_in_the_place_of_a_staging_directory_or_lease_is_not_followed(
    tmp_path, tmp_path_factory, trained
):
    outside = tmp_path_factory.mktemp("outside")
    (tmp_path / ".tmp-ab").symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"cannot write .*\.tmp-ab/ps-0.data"):
        saving.write_shard(tmp_path, "ab", rank=0, shard=trained[0])
    (tmp_path / "lease.json").symlink_to(outside / "lease")
    with pytest.raises(CheckpointError, match=r"lease.json is not a regular file"):
        Lease(storage_at(tmp_path), "job").take()
    assert list(outside.iterdir()) == []


@pytest.mark.attack("A19")
@pytest.mark.parametrize(
    "records",
    [
        b"\x81\xa1x" + b"\x91" * 5000,
        msgspec.msgpack.encode(
            ShardExtra(1, (SessionRecord(0, 0, 1, (2**63,) * 7, 0, 0, 0),), 0.0, {}, -1)
        ),
    ],
    ids=["nested", "a number above 63 bits"],
)
def test_hostile_records_are_refused_by_name(tmp_path, trained, records):
    shards = [
        saving.write_shard(tmp_path, "s", rank=rank, shard=shard, extra=records)
        for rank, shard in enumerate(trained)
    ]
    saving.commit(tmp_path, "s", step=1, manifest=manifest(), shards=shards)
    chain = reading.open_chain(tmp_path, choice.read_manifest(tmp_path, 1), PLACE)
    with pytest.raises(CheckpointError, match="records of ps:0 cannot be read"):
        restore_into(trained[0], (), chain, reset_optimizer=False, is_alone=False)
