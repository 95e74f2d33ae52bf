"""Any order of saves, crashes, retention, damage, take-overs and restores, beside a simple model.

What is restored is one commit, whole: bit for bit the state of the servers at that save. Retention,
whole or cut short, takes none of the newest checkpoints, nor the best ones, nor what they are made
of.
"""

from __future__ import annotations

import itertools
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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ps.checkpoint import choice, reader, restore, writer
from ps.checkpoint.format import MANIFEST_NAME, staging_name, step_name
from ps.checkpoint.lease import LEASE_NAME, Lease, this_holder
from ps.checkpoint.score import Score
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
    score: Score | None = None
    has_manifest: bool = True
    has_all_bytes: bool = True
    """Its files have their sizes."""
    is_sound: bool = True
    """No byte of its files is another one."""


def score_of(text: str | None) -> Score | None:
    metric, _, value = (text or "").partition(" ")
    return Score(metric, float(value), metric == "auc") if text else None


def seldom(*values: str) -> st.SearchStrategy[str | None]:
    return st.sampled_from([*[None] * 3 * len(values), *values])


class CheckpointMachine(RuleBasedStateMachine):
    """Servers that train, the saver of their job, its directory, and those who disturb it."""

    def __init__(self) -> None:
        super().__init__()
        self.quick_disk = mock.patch("os.fsync")
        self.quick_disk.start()
        self.root = Path(tempfile.mkdtemp(prefix="checkpoint-machine-"))
        self.storage = CrashingStorage(self.root)
        self.lease = Lease(self.storage, "job")
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

    def scored(self, metric: str) -> list[Saved]:
        """Steps with this score that no run went past, the best first."""
        skipped, sign = self.skipped(), -1 if metric == "auc" else 1
        found = [
            (sign * each.score.value, each.step, each)
            for each in self.saved.values()
            if each.has_manifest and each.score is not None and each.score.metric == metric
        ]
        return [each for *_, each in sorted(found) if each.step not in skipped]

    def best(self) -> list[Saved]:
        """Return the best complete step of each metric."""
        whole = (list(filter(self.is_complete, self.scored(each))) for each in ("loss", "auc"))
        return [each[0] for each in whole if each]

    def better_than_whole(self) -> list[Saved]:
        """Return steps that would be the best, if they were complete."""
        return [
            each
            for metric in ("loss", "auc")
            for each in itertools.takewhile(
                lambda each: not self.is_complete(each), self.scored(metric)
            )
        ]

    # What happens.

    @initialize(num_servers=st.integers(1, 3), first=st.lists(st.booleans(), max_size=4))
    def start(self, num_servers: int, first: list[bool]) -> None:
        """Begin with some saves, of which these are deltas."""
        self.shards = servers(num_servers)
        for is_delta in first:
            self.save({self.num_saves % NUM_BUCKETS}, is_delta, 2, [], None)

    @rule(
        pushed=st.sets(st.integers(0, NUM_BUCKETS - 1)),
        is_delta=st.booleans(),
        ahead=st.integers(-1, 3),
        crashes=st.just([]) | st.lists(st.integers(0, SAVE_CHANGES), max_size=2),
        trouble=seldom("gives up", "loses a file", "loses a byte", "is taken over"),
        score=seldom("loss 2", "loss 1", "auc 1", "auc 2"),
    )
    def save(
        self,
        pushed: set[int],
        is_delta: bool,
        ahead: int,
        crashes: list[int],
        trouble: str | None,
        score: str | None = None,
    ) -> None:
        """Push to some buckets, and save: again after each crash of the saver, or not again."""
        for shard in self.shards:
            for each in shard.buckets:
                if each.id in pushed:
                    gradient = np.full(each.num_elements, self.num_saves + 1, np.float32)
                    shard.apply(each.id, gradient, Hyper(0.1))
        self.num_saves += 1
        step = self.number(ahead)
        base = self.base if is_delta else None
        name, state = f"save-{self.num_saves}", state_of(self.shards)
        new = Saved(step, name, base, state, self.passed_over, score_of(score))
        is_refused = (
            trouble not in (None, "gives up")
            or self.on_disk(step)
            or step in self.passed_over
            or (base is not None and not self.is_complete(base))
        )
        for changes in crashes if trouble == "gives up" and crashes else [*crashes, None]:
            self.storage.crash_after(changes)
            try:
                self.write(new, trouble)
            except Crash:
                continue
            except CheckpointError:
                assert is_refused
                break
            assert not is_refused
            break
        self.storage.crash_after(None)
        if trouble == "is taken over":
            (self.root / LEASE_NAME).unlink(missing_ok=True)  # the other one has ended
        if is_refused or not self.on_disk(step):
            return
        self.saved[step] = self.base = new
        self.step = step
        writer.abort(self.storage, new.save_id)  # a commit stays

    def write(self, new: Saved, trouble: str | None) -> None:
        """Do what servers and the saver do, with trouble between them."""
        unchanged = {} if new.base is None else new.base.state
        portion = writer.Portion(lambda i: unchanged.get(i) == new.state[i])
        records = [
            writer.write_shard(
                self.storage, new.save_id, rank=rank, shard=shard, extra=b"x", portion=portion
            )
            for rank, shard in enumerate(self.shards)
        ]
        path = self.root / staging_name(new.save_id) / records[-1].file_name
        if trouble == "loses a byte":
            path.write_bytes(path.read_bytes()[:-1])
        elif trouble == "loses a file":
            path.unlink()
        elif trouble == "is taken over":
            (self.root / LEASE_NAME).write_bytes(msgspec.json.encode(this_holder("other")))
        base = None if new.base is None else writer.Base(new.base.step, new.base.save_id)
        with self.lease.held():
            writer.commit(
                self.storage,
                new.save_id,
                step=new.step,
                manifest=MANIFEST,
                shards=records,
                origin=writer.Origin(base=base, passed_over=new.passed_over, score=new.score),
            )

    def number(self, ahead: int) -> int:
        """Return so many steps ahead; 0: one that is new; -1: one that was passed over."""
        if ahead > 0:
            return self.step + ahead
        gone = [step for step in self.passed_over if not self.on_disk(step)]
        if ahead < 0 and self.passed_over:
            return (gone or self.passed_over)[0]
        return max([self.step, *self.saved]) + 1

    def on_disk(self, step: int) -> bool:
        return (self.root / step_name(step)).exists()

    @rule(num_servers=st.integers(1, 4), older=st.integers(0, 2))
    def restart(self, num_servers: int, older: int) -> None:
        """Go on with other servers from the newest sound checkpoint, or from an older one."""
        sound = list(filter(self.is_sound, self.newest_first()))
        if not sound:
            with pytest.raises(CheckpointError, match="no complete checkpoint"):
                choice.newest_sound(self.storage)
            return
        expected = sound[min(older, len(sound) - 1)]
        if expected is sound[0]:
            found = choice.newest_sound(self.storage)
        else:
            found = choice.read_manifest(self.storage, expected.step)
        assert (found.step, found.save_id) == (expected.step, expected.save_id)
        self.shards = servers(num_servers)
        chain = reader.open_chain(self.storage, found)
        for shard in self.shards:
            restore.restore_shard(chain, shard)
        assert state_of(self.shards) == expected.state
        self.step, self.base = found.step, expected
        self.passed_over = choice.steps_after(self.storage, found)

    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """Somebody removed a checkpoint, and another run saved one under its number."""
        if not self.saved:
            return
        step = data.draw(st.sampled_from(sorted(self.saved)))
        shutil.rmtree(self.root / step_name(step))
        self.num_saves += 1
        mine, self.shards = self.shards, servers(1)
        new = Saved(step, f"save-{self.num_saves}", None, state_of(self.shards), ())
        self.write(new, None)
        self.saved[step], self.shards = new, mine

    @rule(count=st.sampled_from([1, 1, 2, 3]), crash=st.sampled_from([None, 1, 2, 3, 6]))
    def keep(self, count: int, crash: int | None) -> None:
        """Remove old checkpoints, or only some of them before the end of the process."""
        newest = list(filter(self.is_complete, self.newest_first()))[:count]
        needed: set[int] = {each.step for each in self.better_than_whole()}
        for save in [*newest, *self.best()]:
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

    @rule(data=st.data(), how=st.sampled_from(["flip", "truncate", "remove", "manifest", "step"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        """Change a file of a checkpoint behind everybody's back."""
        if not self.saved:
            return
        save = self.saved[data.draw(st.sampled_from(sorted(self.saved)))]
        directory = self.root / step_name(save.step)
        if how == "step":
            shutil.rmtree(directory)
            del self.saved[save.step]
            return
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

    @invariant()
    def readers_see_what_was_committed_and_is_whole_the_newest_first(self) -> None:
        expected = [each.step for each in self.newest_first() if self.is_complete(each)]
        assert [chain[0].step for chain in choice.complete_chains(self.storage)] == expected
        assert set(choice.steps_on_disk(self.storage)) == set(self.saved)
        found = [
            choice.best(self.storage, metric, higher_is_better=metric == "auc")
            for metric in ("loss", "auc")
        ]
        assert [each.step for each in found if each] == [each.step for each in self.best()]


CheckpointMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=15)
TestCheckpoints = pytest.mark.slow(CheckpointMachine.TestCase)
