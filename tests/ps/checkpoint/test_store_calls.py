"""What one save asks of the store beyond its own files: each kept step a few questions, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps.checkpoint.format import step_name
from ps.checkpoint.writer import Base, Origin, Portion, commit, keep_newest, write_shard
from ps.dense.shard import DenseShard
from ps.manifest.manifest import SGD, GroupSpec, Manifest, ParamSpec
from tests.support.counting_storage import CountingStorage

NUM_SERVERS = 20
FULL_EVERY, NUM_CHAINS = 10, 3
PER_STEP = 6
"""Its listing, whether it is a directory, the manifest and its size (which a local open asks for
once more), its files and their sizes."""

MANIFEST = Manifest(
    groups=(GroupSpec("trainable", "float32", SGD(), (ParamSpec("kernel", (1000,)),)),),
    bucket_bytes=128,
)
NOTHING = Portion(is_unchanged=lambda _: True)


def write(root: Path | CountingStorage, step: int, base: Base | None) -> Base:
    save_id = f"save-{step}"
    shards = [
        write_shard(
            root,
            save_id,
            rank=rank,
            shard=DenseShard(MANIFEST, rank=rank, num_servers=NUM_SERVERS, num_workers=1),
            portion=NOTHING if base else Portion(),
        )
        for rank in range(NUM_SERVERS)
    ]
    commit(root, save_id, step=step, manifest=MANIFEST, shards=shards, origin=Origin("job", base))
    return Base(step, save_id)


@pytest.fixture
def last(tmp_path: Path) -> Base:
    """The last step of three chains of ten; the next one would add to it."""
    base: Base | None = None
    for step in range(FULL_EVERY * NUM_CHAINS):
        base = write(tmp_path, step, base if step % FULL_EVERY else None)
    assert base is not None
    return base


def test_retention_asks_for_each_step_once(tmp_path: Path, last: Base):
    storage = CountingStorage(tmp_path)
    assert keep_newest(storage, FULL_EVERY * NUM_CHAINS, committed=last.step) == []
    listings = 2  # of the root
    assert storage.num_calls <= PER_STEP * FULL_EVERY * NUM_CHAINS + listings
    assert storage.asked("sizes", step_name(last.step)) == 1
    assert storage.asked("size", "ps-") == 0


def test_a_commit_asks_for_each_step_of_its_base_once(tmp_path: Path, last: Base):
    storage = CountingStorage(tmp_path)
    write(storage, last.step + 1, last)
    its_own = 2 * NUM_SERVERS + 3  # the indexes with sizes, their listing, one of the root
    still_there = PER_STEP - 1  # the base's manifest once more
    assert storage.num_calls <= PER_STEP * FULL_EVERY + its_own + still_there


def test_a_file_that_the_listing_lacks_is_asked_for_itself(
    tmp_path: Path, last: Base, monkeypatch: pytest.MonkeyPatch
):
    """A store may list late what is there."""
    listed = CountingStorage.sizes

    def late(self: CountingStorage, directory: str) -> dict[str, int]:
        return {name: size for name, size in listed(self, directory).items() if "ps-7" not in name}

    monkeypatch.setattr(CountingStorage, "sizes", late)
    storage = CountingStorage(tmp_path)
    assert keep_newest(storage, 1, committed=last.step) == list(range(19, -1, -1))
    assert storage.asked("size", "ps-7.data") == storage.asked("size", "ps-") > 0
