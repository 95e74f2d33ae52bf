"""Any order of saves, crashes, retention, damage, take-overs and restores, beside a simple model.

What is restored is one commit, whole: bit for bit the state of the servers at that save. Retention,
whole or cut short, takes none of the newest checkpoints nor what they are made of.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps.checkpoint import reader, restore, writer
from ps.checkpoint.format import MANIFEST_NAME, step_name
from ps.checkpoint.lease import LEASE_NAME, Lease, this_holder
from ps.dense.shard import DenseShard
from ps.errors import CheckpointError
from ps.manifest.manifest import SGD, GroupSpec, Hyper, Manifest, ParamSpec
from tests.support.crashing_storage import Crash, CrashingStorage

NUM = 40
MANIFEST = Manifest(
    groups=(GroupSpec("g", "float32", SGD(momentum=0.9), (ParamSpec("w", (NUM,)),)),),
    bucket_bytes=64,
)
NUM_BUCKETS = 3
SAVE_CHANGES = 20
"""The most changes to the disk that one save makes, or a little more."""
State = dict[int, tuple[bytes, ...]]


def servers(count: int) -> list[DenseShard]:
    return [DenseShard(MANIFEST, rank=i, num_servers=count, num_workers=1) for i in range(count)]


def state_of(shards: list[DenseShard]) -> State:
    """Return of each bucket the bytes of values and slots, and its step."""
    return {
        i: (
            shard.values(i).tobytes(),
            *(slot.tobytes() for slot in shard.slots(i).values()),
            b"%d" % shard.step(i),
        )
        for shard in shards
        for i in shard.bucket_ids
    }


@dataclass(eq=False)
class Saved:
    """One commit as the model knows it."""

    step: int
    save_id: str
    base: Saved | None
    state: State
    passed_over: tuple[int, ...]
    has_manifest: bool = True
    has_all_bytes: bool = True
    """Its files have their sizes."""
    is_sound: bool = True
    """No byte of its files is another one."""


class CheckpointMachine(RuleBasedStateMachine):
    """Servers that train, the saver of their job, its directory, and those who disturb it."""

    def __init__(self) -> None:
        super().__init__()
        self.quick_disk = mock.patch("os.fsync")
        self.quick_disk.start()
        self.root = Path(tempfile.mkdtemp(prefix="checkpoint-machine-"))
        self.storage = CrashingStorage(self.root)
        self.lease = Lease(self.storage, "job")
        self.is_taken_over: bool = False
        self.saved: dict[int, Saved] = {}
        self.num_saves = 0
        self.step = 0
        self.base: Saved | None = None
        self.passed_over: tuple[int, ...] = ()

    def teardown(self) -> None:
        self.lease.release()
        shutil.rmtree(self.root)
        self.quick_disk.stop()

    # What the model says.

    def is_complete(self, save: Saved) -> bool:
        """Whether it and all that it adds to are there, with their sizes."""
        is_there = self.saved.get(save.step) is save and save.has_manifest and save.has_all_bytes
        return is_there and (save.base is None or self.is_complete(save.base))

    def is_sound(self, save: Saved) -> bool:
        below = save.base is None or self.is_sound(save.base)
        return self.is_complete(save) and save.is_sound and below

    def skipped(self) -> set[int]:
        """Steps that a run went past when it resumed from an older one."""
        return {s for each in self.saved.values() if each.has_manifest for s in each.passed_over}

    def newest_first(self) -> list[Saved]:
        skipped = self.skipped()
        return sorted(self.saved.values(), key=lambda each: (each.step in skipped, -each.step))

    # What happens.

    @initialize(num_servers=st.integers(1, 3))
    def start(self, num_servers: int) -> None:
        self.shards = servers(num_servers)

    @rule(seed=st.integers(0, 99), bucket=st.none() | st.integers(0, NUM_BUCKETS - 1))
    def train(self, seed: int, bucket: int | None) -> None:
        """Push to all buckets, or to one, so that a delta has something to leave out."""
        gradient = np.random.default_rng(seed).standard_normal(NUM).astype(np.float32)
        for shard in self.shards:
            for each in shard.buckets:
                if bucket in (None, each.id):
                    shard.apply(each.id, gradient[each.start : each.stop], Hyper(0.1))

    @rule(
        is_delta=st.booleans(),
        crashes=st.lists(st.integers(0, SAVE_CHANGES), max_size=2),
        gives_up=st.booleans(),
        takes_next_number=st.booleans(),
    )
    def save(
        self, is_delta: bool, crashes: list[int], gives_up: bool, takes_next_number: bool
    ) -> None:
        """Save, and again under the same name after each crash of the saver, or not again."""
        self.num_saves += 1
        step = self.step + 1 if takes_next_number else max([self.step, *self.saved]) + 1
        base = self.base if is_delta else None
        new = Saved(step, f"save-{self.num_saves}", base, state_of(self.shards), self.passed_over)
        is_refused = (
            self.is_taken_over
            or self.on_disk(step)
            or step in self.passed_over
            or (base is not None and not self.is_complete(base))
        )
        for changes in [*crashes] if gives_up and crashes else [*crashes, None]:
            self.storage.crash_after(changes)
            try:
                self.write(new)
            except Crash:
                continue
            except CheckpointError:
                assert is_refused
                break
            assert not is_refused
            break
        self.storage.crash_after(None)
        if is_refused or not self.on_disk(step):
            return
        self.saved[step] = self.base = new
        self.step = step
        writer.abort(self.storage, new.save_id)  # a commit stays

    def write(self, new: Saved) -> None:
        unchanged = {} if new.base is None else new.base.state
        portion = writer.Portion(lambda i: unchanged.get(i) == new.state[i])
        records = [
            writer.write_shard(
                self.storage, new.save_id, rank=rank, shard=shard, extra=b"x", portion=portion
            )
            for rank, shard in enumerate(self.shards)
        ]
        base = None if new.base is None else writer.Base(new.base.step, new.base.save_id)
        with self.lease.held():
            writer.commit(
                self.storage,
                new.save_id,
                step=new.step,
                manifest=MANIFEST,
                shards=records,
                origin=writer.Origin(base=base, passed_over=new.passed_over),
            )

    def on_disk(self, step: int) -> bool:
        return (self.root / step_name(step)).exists()

    @rule(num_servers=st.integers(1, 4))
    def restart(self, num_servers: int) -> None:
        """The job goes on from the newest sound checkpoint with another number of servers."""
        expected = next(filter(self.is_sound, self.newest_first()), None)
        if expected is None:
            with pytest.raises(CheckpointError, match="no complete checkpoint"):
                restore.newest_sound(self.storage)
            return
        found = restore.newest_sound(self.storage)
        assert (found.step, found.save_id) == (expected.step, expected.save_id)
        self.shards = servers(num_servers)
        for shard in self.shards:
            restore.restore_shard(self.storage, found, shard)
        assert state_of(self.shards) == expected.state
        self.step, self.base = found.step, expected
        self.passed_over = reader.steps_after(self.storage, found)

    @rule(count=st.integers(1, 3), crash=st.none() | st.integers(0, 8))
    def keep(self, count: int, crash: int | None) -> None:
        """Remove old checkpoints, or only some of them before the end of the process."""
        newest = list(filter(self.is_complete, self.newest_first()))[:count]
        needed: set[int] = set()
        for save in newest:
            link: Saved | None = save
            while link is not None:
                needed.add(link.step)
                link = link.base
        skipped = self.skipped()
        may_go = {
            step
            for step in self.saved
            if newest and step not in needed and (step < newest[0].step or step in skipped)
        }
        self.storage.crash_after(crash)
        try:
            assert set(writer.keep_newest(self.storage, count)) == may_go
            assert not any(map(self.on_disk, may_go))
        except Crash:
            pass
        self.storage.crash_after(None)
        for step in list(self.saved):
            if not self.on_disk(step):
                assert self.saved.pop(step).step in may_go
            elif not (self.root / step_name(step) / MANIFEST_NAME).exists():
                assert step in may_go or not self.saved[step].has_manifest
                self.saved[step].has_manifest = False

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), how=st.sampled_from(["flip", "truncate", "remove", "manifest"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        """Change a file of a checkpoint behind everybody's back."""
        save = self.saved[data.draw(st.sampled_from(sorted(self.saved)))]
        directory = self.root / step_name(save.step)
        if how == "manifest":
            (directory / MANIFEST_NAME).unlink(missing_ok=True)
            save.has_manifest = False
            return
        files = sorted(directory.glob("ps-*.data"))
        if not files:
            return
        path = data.draw(st.sampled_from(files))
        content = bytearray(path.read_bytes())
        if how == "flip" and content and save.is_sound:
            content[data.draw(st.integers(0, len(content) - 1))] ^= 0xFF
            path.write_bytes(content)
            save.is_sound = False
        elif how == "truncate" and content:
            path.write_bytes(content[:-1])
            save.has_all_bytes = False
        else:
            path.unlink()
            save.has_all_bytes = False

    @rule()
    def take_over(self) -> None:
        """Another job has taken the directory, as after a long silence of this one."""
        (self.root / LEASE_NAME).write_bytes(msgspec.json.encode(this_holder("other")))
        self.is_taken_over = True

    @rule()
    def give_back(self) -> None:
        (self.root / LEASE_NAME).unlink(missing_ok=True)
        self.is_taken_over = False

    @invariant()
    def the_newest_is_one_that_was_committed(self) -> None:
        newest = next(filter(self.is_complete, self.newest_first()), None)
        assert reader.latest(self.storage) == (None if newest is None else newest.step)
        assert set(reader.steps_on_disk(self.storage)) == set(self.saved)


CheckpointMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestCheckpoints = pytest.mark.slow(CheckpointMachine.TestCase)
