"""Checkpoints: other numbers of servers, every kind of damage, hostile files, full disks."""

import errno
import os
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ps.checkpoint import choice, storage
from ps.checkpoint import reader as reading
from ps.checkpoint import restore as restoring
from ps.checkpoint import writer as saving
from ps.checkpoint.digest import MAX_COUNT, digest
from ps.checkpoint.format import Checkpoint
from ps.checkpoint.storage import LocalStorage, storage_at
from ps.dense.shard import DenseShard
from ps.errors import CheckpointError
from ps.manifest.manifest import SGD, Adagrad, Adam, Average, GroupSpec, Hyper, Manifest, ParamSpec
from tests.support.snapshot_skew import records_of

PARAMS = (ParamSpec("dense/kernel", (37, 11)), ParamSpec("dense/bias", (11,)))
NUM = 37 * 11 + 11


def manifest(rule=None, params=PARAMS, dtype="float32", bucket_bytes=256):
    groups = (
        GroupSpec("trainable", dtype, rule or Adam(), params),
        GroupSpec("statistics", "float64", Average(), (ParamSpec("mean", (9,)),)),
    )
    return Manifest(groups=groups, bucket_bytes=bucket_bytes)


def servers(num_servers, whole=None):
    whole = whole or manifest()
    return [
        DenseShard(whole, rank=rank, num_servers=num_servers, num_workers=1)
        for rank in range(num_servers)
    ]


def train(shards, seed):
    rng = np.random.default_rng(seed)
    whole = {"trainable": rng.standard_normal(NUM), "statistics": rng.standard_normal(9)}
    for shard in shards:
        for bucket in shard.buckets:
            part = whole[bucket.group][bucket.start : bucket.stop]
            shard.apply(bucket.id, part.astype(shard.dtype(bucket.id)), Hyper(0.01))


def state(shards):
    return {
        i: (
            shard.values(i).tobytes(),
            *(slot.tobytes() for slot in shard.slots(i).values()),
            shard.step(i),
        )
        for shard in shards
        for i in shard.bucket_ids
    }


def save(root, step, shards, save_id=None, job=""):
    save_id = save_id or f"{step:08x}"
    records = [
        saving.write_shard(root, save_id, rank=rank, shard=shard, extra=b"record of %d" % rank)
        for rank, shard in enumerate(shards)
    ]
    return saving.commit(
        root,
        save_id,
        step=step,
        manifest=shards[0].manifest,
        shards=records[::-1],
        origin=saving.Origin(job=job),
    )


def restore(root, step, num_servers, whole=None):
    shards = servers(num_servers, whole)
    chain = reading.open_chain(root, choice.read_manifest(root, step))
    for shard in shards:
        restoring.restore_shard(chain, shard)
    return shards


@pytest.fixture
def trained():
    shards = servers(2)
    for seed in range(3):
        train(shards, seed)
    return shards


@pytest.fixture
def two_steps(tmp_path, trained):
    """A root with the complete steps 800 and 900."""
    save(tmp_path, 800, trained)
    train(trained, 9)
    save(tmp_path, 900, trained)
    return tmp_path


def test_averages_are_saved_with_the_slots_and_asked_for_by_name(tmp_path):
    whole = manifest(Adam(ema_momentum=0.9, ema_overwrite_frequency=2))
    trained = servers(2, whole)
    train(trained, 1)
    save(tmp_path, 5, trained)
    restored = restore(tmp_path, 5, 3, whole)
    assert list(restored[0].slots(0)) == ["momentum", "velocity", "average"]
    for shards in (restored, trained):
        train(shards, 2)
        train(shards, 3)
    assert state(restored) == state(trained)
    with pytest.raises(CheckpointError, match=r"velocity, average\).*reset_optimizer"):
        restore(tmp_path, 5, 1, manifest(Adam()))


@pytest.mark.fault("F42")
@pytest.mark.parametrize("num_servers", [1, 2, 3, 20])
def test_any_number_of_servers_restores_and_goes_on_bit_for_bit(tmp_path, trained, num_servers):
    save(tmp_path, 5, trained)
    restored = restore(tmp_path, 5, num_servers)
    assert state(restored) == state(trained)
    for shards in (restored, trained):
        train(shards, 77)
    assert state(restored) == state(trained)


def test_what_is_there_is_listed_and_the_records_come_back(two_steps):
    assert choice.latest(two_steps) == 900
    newest = choice.read_manifest(two_steps)
    assert (newest.step, len(newest.shards)) == (900, 2)
    assert [records_of(two_steps, newest, rank) for rank in (0, 1)] == [
        b"record of 0",
        b"record of 1",
    ]
    restoring.verify(two_steps, newest)
    with pytest.raises(CheckpointError, match="has 2 shards, asked for 2"):
        records_of(two_steps, newest, 2)
    assert sorted(path.name for path in two_steps.iterdir()) == ["step-800", "step-900"]


def test_a_run_skips_the_steps_above_its_own_the_greatest_if_they_are_many(two_steps, trained):
    for step in (3, 5):
        save(two_steps, step, trained)
    skipped = {
        at: choice.steps_after(two_steps, choice.read_manifest(two_steps, at))
        for at in (3, 5, 800, 900)
    }
    assert skipped == {3: (5, 800, 900), 5: (800, 900), 800: (900,), 900: ()}
    oldest = choice.read_manifest(two_steps, 3)
    oldest = msgspec.structs.replace(oldest, passed_over=(1, 7, 800))
    assert choice.steps_after(two_steps, oldest) == (1, 5, 7, 800, 900)
    with pytest.MonkeyPatch.context() as fewer:
        fewer.setattr(choice, "MAX_PASSED_OVER", 2)
        assert choice.steps_after(two_steps, oldest) == (800, 900)


def test_an_empty_root_has_no_checkpoint(tmp_path):
    assert choice.latest(tmp_path / "absent") is None
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*steps on disk: none"):
        choice.read_manifest(tmp_path / "absent")


@pytest.mark.fault("F41")
def test_a_missing_shard_is_named_with_the_newest_complete_step(two_steps):
    (two_steps / "step-900" / "ps-1.data").unlink()
    expected = (
        r"^step 900 lacks ps-1.data \(in manifest, not on disk\); newest complete step is 800$"
    )
    with pytest.raises(CheckpointError, match=expected):
        choice.read_manifest(two_steps, 900)
    assert choice.read_manifest(two_steps).step == 800


@pytest.mark.fault("F41")
def test_a_missing_manifest_or_step_is_named(two_steps):
    (two_steps / "step-900" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step 900 has no readable manifest.*step is 800"):
        choice.read_manifest(two_steps, 900)
    with pytest.raises(CheckpointError, match=r"step 850 has no readable manifest.*step is 800"):
        choice.read_manifest(two_steps, 850)


@pytest.mark.fault("F41")
@pytest.mark.parametrize("name", ["ps-0.data", "ps-1.data", "manifest.json"])
def test_a_truncated_or_longer_file_is_refused_before_it_is_read(two_steps, name):
    path = two_steps / "step-900" / name
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{name}.* (bytes|damaged).*step is 800"):
            choice.read_manifest(two_steps, 900)


@pytest.mark.fault("F41")
@pytest.mark.parametrize("name", ["ps-0.data", "ps-1.data", "manifest.json"])
def test_any_flipped_bit_is_found_and_the_older_step_is_used(two_steps, name):
    path = two_steps / "step-900" / name
    whole = path.read_bytes()
    rng = random.Random(4)
    positions = {0, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(40))}
    for position in positions:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name):
            restoring.verify(two_steps, choice.read_manifest(two_steps, 900))
    assert choice.newest_sound(two_steps).step == 800
    path.write_bytes(whole)
    assert choice.newest_sound(two_steps).step == 900


class FailingStorage(LocalStorage):
    """A mount whose reads fail: the first `times` of files with this in their name."""

    def __init__(self, root, part, times, code=errno.EIO):
        super().__init__(root)
        self.part, self.left, self.code = part, times, code

    def open(self, name):
        if self.part in name and self.left > 0:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code))
        return super().open(name)


UNREAD = [
    ("step-900/manifest.json", errno.EIO),
    ("step-900/ps-0.data", errno.ESTALE),
    ("step-900/ps-1.data", errno.EMFILE),
]


@pytest.mark.fault("F41")
@pytest.mark.parametrize(("part", "code"), UNREAD)
def test_a_read_that_fails_for_a_moment_costs_no_step(two_steps, monkeypatch, part, code):
    monkeypatch.setattr(storage, "_LOOK_AGAIN_S", 0.0)
    for look in (
        choice.newest_sound,
        lambda at: choice.find(at, None, choice.AS_SAVED)[0],
    ):
        try:
            found = look(FailingStorage(two_steps, part, 3, code)).step
        except CheckpointError as error:
            pytest.fail(f"step 900 was given up: {error}")
        assert found == 900


@pytest.mark.fault("F41")
@pytest.mark.parametrize(("part", "code"), UNREAD)
def test_what_stays_unreadable_is_an_error_and_no_older_step(two_steps, monkeypatch, part, code):
    monkeypatch.setattr(storage, "PATIENCE_S", 0.0)
    with pytest.raises(CheckpointError, match="may be whole, so no older one is taken") as raised:
        choice.newest_sound(FailingStorage(two_steps, part, 1 << 20, code))
    assert "step-900" in str(raised.value) or "step 900" in str(raised.value)
    if part.endswith("json"):
        with pytest.raises(CheckpointError, match="no older one is taken"):
            choice.latest(FailingStorage(two_steps, part, 1 << 20, code))


@pytest.mark.fault("F41")
def test_a_manifest_that_cannot_be_read_now_cannot_hide_what_its_run_has_skipped(
    two_steps, trained, monkeypatch
):
    """Step 850 resumed from 800, so 900 is of a run that was given up."""
    records = [
        saving.write_shard(two_steps, "f850", rank=rank, shard=shard)
        for rank, shard in enumerate(trained)
    ]
    saving.commit(
        two_steps,
        "f850",
        step=850,
        manifest=trained[0].manifest,
        shards=records,
        origin=saving.Origin(passed_over=(900,)),
    )
    assert choice.latest(two_steps) == 850
    monkeypatch.setattr(storage, "_LOOK_AGAIN_S", 0.0)
    assert choice.latest(FailingStorage(two_steps, "step-850/manifest", 1)) == 850
    monkeypatch.setattr(storage, "PATIENCE_S", 0.0)
    with pytest.raises(CheckpointError, match="step 850 has no readable manifest"):
        choice.latest(FailingStorage(two_steps, "step-850/manifest", 1 << 20))


@pytest.mark.fault("F41")
def test_a_step_that_cannot_be_read_while_all_are_listed_is_not_passed_over(two_steps, monkeypatch):
    class SizelessStorage(LocalStorage):
        def sizes(self, directory):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        def size(self, name):
            if name == "step-900/ps-1.data":
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return super().size(name)

    monkeypatch.setattr(storage, "PATIENCE_S", 0.0)
    with pytest.raises(CheckpointError, match=r"ps-1\.data cannot be read: .*Stale"):
        choice.latest(SizelessStorage(two_steps))
    assert choice.latest(two_steps) == 900


@pytest.mark.fault("F41")
def test_a_step_that_is_no_directory_of_files_is_skipped_at_once(two_steps):
    (two_steps / "step-950").write_text("not a directory")
    (two_steps / "step-960").mkdir()
    (two_steps / "step-960" / "manifest.json").mkdir()
    assert choice.newest_sound(two_steps).step == 900


@pytest.mark.fault("F41")
def test_nothing_sound_is_an_error_that_lists_the_steps(two_steps):
    for step in (800, 900):
        path = two_steps / f"step-{step}" / "ps-0.data"
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CheckpointError, match="steps on disk: 900, 800"):
        choice.newest_sound(two_steps)


def with_new_heads(monkeypatch: pytest.MonkeyPatch, *, harm: bool) -> list[int]:
    """Each look at the files finds a newer step afterwards; `harm`: and finds them removed."""
    heads, listed, verified = [900], choice.steps_on_disk, restoring.verified

    def steps(storage):
        return [*reversed(heads[1:]), *listed(storage)]

    def verify(storage, chain):
        assert len(heads) < 50, "it looks for ever"
        heads.append(heads[-1] + 1)
        if harm:
            raise CheckpointError("a save has removed it")
        return verified(storage, chain)

    monkeypatch.setattr(choice, "steps_on_disk", steps)
    monkeypatch.setattr(choice, "verified", verify)
    return heads


@pytest.mark.fault("F41")
def test_a_sound_step_is_taken_though_saves_are_faster_than_its_look(two_steps, monkeypatch):
    path = two_steps / "step-900" / "ps-0.data"
    path.write_bytes(bytes(path.stat().st_size))  # damaged, so the older one is verified as well
    heads = with_new_heads(monkeypatch, harm=False)
    assert choice.newest_sound(two_steps).step == 800
    assert len(heads) <= 12


@pytest.mark.fault("F41")
def test_saves_that_are_faster_than_each_look_end_it_with_both_heads(two_steps, monkeypatch):
    heads = with_new_heads(monkeypatch, harm=True)
    with pytest.raises(CheckpointError, match=r"newest step was 900 .* is 9\d\d now"):
        choice.newest_sound(two_steps)
    assert len(heads) <= 12


def newest_for(root, job=None):
    """Return the step that servers of this file's model begin with."""
    like = choice.RestoreOptions(manifest=manifest(), job=job)
    return choice.restore_newest(root, like, lambda chain: chain[0].step)


@pytest.mark.parametrize("job", [None, "job"])
def test_a_newest_step_of_another_model_is_an_error_unless_it_is_damaged(tmp_path, trained, job):
    save(tmp_path, 800, trained, job="job")
    other = servers(1, manifest(params=PARAMS[:1]))
    save(tmp_path, 900, other, job="job")
    with pytest.raises(CheckpointError, match=r"is of another model.*dense/bias"):
        newest_for(tmp_path, job)
    damage = tmp_path / "step-900" / "ps-0.data"
    damage.write_bytes(b"\xff" + damage.read_bytes()[1:])
    assert newest_for(tmp_path, job) == 800


def test_a_server_that_is_started_again_takes_the_newest_step_of_its_own_job(tmp_path, trained):
    save(tmp_path, 800, trained, job="job")
    save(tmp_path, 900, trained, job="another")
    assert (newest_for(tmp_path), newest_for(tmp_path, "job")) == (900, 800)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint.*900, 800"):
        newest_for(tmp_path, "a third one")


def test_servers_that_begin_together_read_all_files_and_one_alone_its_own(tmp_path, trained):
    save(tmp_path, 800, trained, job="job")
    save(tmp_path, 900, trained, job="job")
    damage = tmp_path / "step-900" / "ps-1.data"
    damage.write_bytes(b"\xff" + damage.read_bytes()[1:])
    # What a server reads of its own file `restore` finds damaged itself.
    assert (newest_for(tmp_path), newest_for(tmp_path, "job")) == (800, 900)


@pytest.mark.fault("F41")
def test_a_shard_of_another_step_is_refused(two_steps):
    other = (two_steps / "step-800" / "ps-0.data").read_bytes()
    target = two_steps / "step-900" / "ps-0.data"
    assert len(other) == target.stat().st_size
    target.write_bytes(other)
    with pytest.raises(CheckpointError, match=r"ps-0.data: the digest .* of another save"):
        restore(two_steps, 900, 1)


@pytest.mark.fault("F41")
def test_a_damaged_bucket_is_refused_only_by_the_server_that_needs_it(two_steps):
    path = two_steps / "step-900" / "ps-0.data"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    chain = reading.open_chain(two_steps, choice.read_manifest(two_steps, 900))
    first, second = servers(2)
    restoring.restore_shard(chain, second)
    with pytest.raises(CheckpointError, match=r"ps-0.data is damaged: the digest of bucket 0"):
        restoring.restore_shard(chain, first)


@pytest.mark.fault("F42")
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (manifest(SGD()), r"Only saved: group trainable adam.*Only asked: group trainable sgd"),
        (manifest(Adagrad()), r"adagrad\(accumulator\)"),
        (manifest(dtype="float64"), r"kernel float32\[37, 11\].*kernel float64\[37, 11\]"),
        (
            manifest(params=(ParamSpec("out/kernel", (37, 11)), PARAMS[1])),
            r"dense/kernel float32.*out/kernel float32",
        ),
        (
            manifest(params=(ParamSpec("dense/kernel", (11, 37)), PARAMS[1])),
            r"\[37, 11\].*\[11, 37\]",
        ),
        (manifest(params=PARAMS[::-1]), "The order of parameters differs"),
        (manifest(bucket_bytes=512), "saved with bucket_bytes=256, asked 512"),
    ],
    ids=["rule", "slots", "dtype", "renamed", "shape", "order", "buckets"],
)
def test_another_model_is_refused_with_both_sides(tmp_path, trained, asked, message):
    save(tmp_path, 5, trained)
    with pytest.raises(CheckpointError, match=message):
        restore(tmp_path, 5, 1, asked)


def test_other_settings_of_the_same_rule_may_continue(tmp_path, trained):
    save(tmp_path, 5, trained)
    restored = restore(tmp_path, 5, 1, manifest(Adam(beta_1=0.8, weight_decay=0.1)))
    assert state(restored) == state(trained)


@pytest.mark.parametrize(
    "name", ["step-", "step-01", "step--1", "step-1x", "step-\u096f", "tmp", "step-1.5"]
)
def test_other_names_are_no_steps(tmp_path, name):
    (tmp_path / name).mkdir()
    assert choice.steps_on_disk(storage_at(tmp_path)) == []


class FullDisk:
    """A file that takes some bytes and then fails as a full disk does."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)


@pytest.mark.fault("F39")
@pytest.mark.parametrize("room", [0, 800, 4000])
def test_a_full_disk_is_reported_and_leaves_nothing(two_steps, trained, monkeypatch, room):
    create = LocalStorage.create
    monkeypatch.setattr(
        LocalStorage, "create", lambda self, name: FullDisk(create(self, name), room)
    )
    message = (
        r"cannot write .*ps-0.data: No space left on device; [\d.]+ MB are free on the disk of"
    )
    with pytest.raises(CheckpointError, match=message):
        saving.write_shard(two_steps, "abcd", rank=0, shard=trained[0], extra=b"x" * 4000)
    assert sorted(path.name for path in two_steps.iterdir()) == ["step-800", "step-900"]
    restoring.verify(two_steps, choice.read_manifest(two_steps))


def test_a_server_that_cannot_write_leaves_the_files_of_the_others(tmp_path, trained):
    saving.write_shard(tmp_path, "ab", rank=0, shard=trained[0])
    last = trained[1].buckets[-1]
    nan = np.full(last.num_elements, np.nan, trained[1].dtype(last.id))
    trained[1].set_values(last.id, nan)
    with pytest.raises(CheckpointError, match="not saved: bucket"):
        saving.write_shard(tmp_path, "ab", rank=1, shard=trained[1])
    assert [path.name for path in tmp_path.rglob("*.data")] == ["ps-0.data"]


@pytest.mark.fault("F40")
def test_a_root_that_cannot_be_made_is_an_error_with_its_path(tmp_path, trained):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/root.*MB are free"):
        saving.write_shard(tmp_path / "file" / "root", "ab", rank=0, shard=trained[0])


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, trained, monkeypatch):
    synced: dict[str, int] = {}
    renamed = []
    fsync, rename = os.fsync, Path.rename

    def noting(descriptor):
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size
        fsync(descriptor)

    def named(self, target):
        files = {str(path): path.stat().st_size for path in self.iterdir()}
        assert {Path(name).name for name in files} == {"manifest.json", "ps-0.data", "ps-1.data"}
        assert {name: synced.get(name) for name in files} == files
        assert str(self) in synced
        synced.clear()
        renamed.append(Path(target).name)
        return rename(self, target)

    monkeypatch.setattr("os.fsync", noting)
    monkeypatch.setattr("pathlib.Path.rename", named)
    save(tmp_path, 5, trained)
    assert renamed == ["step-5"]
    assert list(synced) == [str(tmp_path)]


@pytest.mark.parametrize("step", [-1, MAX_COUNT + 1])
def test_a_step_outside_the_range_of_a_manifest_is_refused(tmp_path, trained, step):
    with pytest.raises(CheckpointError, match=rf"a number in 0\.\.{MAX_COUNT}, got {step}"):
        save(tmp_path, step, trained, save_id="ab")
    assert choice.steps_on_disk(storage_at(tmp_path)) == []


@pytest.mark.fault("F10")
def test_a_save_that_was_not_committed_is_never_read(two_steps, trained):
    record = saving.write_shard(two_steps, "dead", rank=0, shard=trained[0])
    assert choice.latest(two_steps) == 900
    with pytest.raises(CheckpointError, match=r"lacks \d+ of \d+ buckets"):
        saving.commit(two_steps, "dead", step=901, manifest=manifest(), shards=[record])
    (two_steps / ".tmp-dead" / "manifest.json").write_bytes(b"half")
    assert choice.latest(two_steps) == 900
    saving.abort(two_steps, "dead")
    saving.abort(two_steps, "dead")
    assert sorted(path.name for path in two_steps.iterdir()) == ["step-800", "step-900"]


def test_a_commit_needs_the_files_that_the_servers_wrote(tmp_path, trained):
    records = [
        saving.write_shard(tmp_path, "ab", rank=rank, shard=shard)
        for rank, shard in enumerate(trained)
    ]
    with (tmp_path / ".tmp-ab" / "ps-1.data").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"ps-1.data has \d+ bytes, its server wrote \d+"):
        saving.commit(tmp_path, "ab", step=1, manifest=manifest(), shards=records)
    (tmp_path / ".tmp-ab" / "ps-1.data").unlink()
    with pytest.raises(CheckpointError, match=r"ps-1.data, which ps:1 .* all hosts share"):
        saving.commit(tmp_path, "ab", step=1, manifest=manifest(), shards=records)
    assert choice.latest(tmp_path) is None


def test_at_least_the_newest_checkpoint_is_kept(two_steps):
    with pytest.raises(CheckpointError, match="at least 1 checkpoint is kept, asked for 0"):
        saving.keep_newest(two_steps, 0)
    assert saving.keep_newest(two_steps, 2) == []
    assert saving.keep_newest(two_steps, 1) == [800]
    assert saving.keep_newest(two_steps, 1) == []
    assert choice.steps_on_disk(storage_at(two_steps)) == [900]
    (two_steps / "step-900" / "manifest.json").unlink()
    assert saving.keep_newest(two_steps, 1) == []
    assert choice.steps_on_disk(storage_at(two_steps)) == [900]


def test_a_delta_to_another_model_is_refused(two_steps):
    other = servers(2, manifest(params=PARAMS[:1]))
    records = [
        saving.write_shard(two_steps, "ab", rank=rank, shard=shard)
        for rank, shard in enumerate(other)
    ]
    base = saving.Base(900, choice.read_manifest(two_steps).save_id)
    with pytest.raises(CheckpointError, match=r"step 901 cannot add to step 900, .* another model"):
        saving.commit(
            two_steps,
            "ab",
            step=901,
            manifest=other[0].manifest,
            shards=records,
            origin=saving.Origin(base=base),
        )
    assert choice.latest(two_steps) == 900


def test_writing_and_committing_may_be_repeated(tmp_path, trained):
    first = saving.write_shard(tmp_path, "ab", rank=0, shard=trained[0], extra=b"longer record")
    again = saving.write_shard(tmp_path, "ab", rank=0, shard=trained[0])
    assert first.nbytes > again.nbytes
    other = saving.write_shard(tmp_path, "ab", rank=1, shard=trained[1])
    settings = {"step": 1, "manifest": manifest(), "shards": [again, other]}
    assert saving.commit(tmp_path, "ab", **settings) == str(tmp_path / "step-1")
    assert saving.commit(tmp_path, "ab", **settings) == str(tmp_path / "step-1")
    assert state(restore(tmp_path, 1, 1)) == state(trained)


def test_a_step_is_never_replaced(two_steps, trained):
    with pytest.raises(CheckpointError, match=r"step 900 exists in .*\(save 00000384\); remove"):
        save(two_steps, 900, trained, "beef")


@pytest.mark.fault("F48")
def test_a_parameter_that_is_not_finite_is_not_saved(two_steps, trained):
    first = trained[0]
    first.set_values(0, np.full(64, np.inf, np.float32))
    with pytest.raises(CheckpointError, match=r"not saved: bucket 0 .* 64 of 64 values NaN or inf"):
        saving.write_shard(two_steps, "ab", rank=0, shard=first)
    assert sorted(path.name for path in two_steps.iterdir()) == ["step-800", "step-900"]


def test_the_manifest_is_readable_text_and_holds_no_code(two_steps):
    text = (two_steps / "step-900" / "manifest.json").read_text()
    line, _, body = text.partition("\n")
    assert line == digest(body.encode())
    assert msgspec.json.decode(body, type=Checkpoint).save_id == "00000384"
