"""A process is killed while it saves: the previous checkpoint stays the newest, whole one."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ps.checkpoint import choice
from ps.checkpoint import reader as reading
from ps.checkpoint import restore as restoring
from ps.checkpoint import writer as saving
from ps.checkpoint.snapshot import SegmentSnapshot
from ps.checkpoint.tables.restore import restore_tables
from ps.config import ServerSettings
from ps.dense.shard import DenseShard
from ps.manifest.manifest import Adagrad, Adam, GroupSpec, Manifest, ParamSpec, TableSpec
from ps.tables.table import make_tables

PARAMS = (ParamSpec("w", (1000,)),)
MANIFEST = Manifest(
    groups=(GroupSpec("g", "float32", Adam(), PARAMS),),
    tables=(TableSpec(name="t", dim=4, rule=Adagrad(), segments=2),),
    bucket_bytes=1024,
)

SAVER = """
import os, pathlib, signal, sys
import numpy as np
from ps.checkpoint import storage, writer as saving
from ps.exactly_once import CompletionLog
from ps.dense.shard import DenseShard
from ps.manifest.manifest import Hyper, Manifest
from ps.checkpoint.snapshot import CopyOnWrite, ShardSnapshot
from ps.tables.table import make_tables

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def save(root, point):
    if point == "opened":
        saving._write = die
    elif point == "middle":
        dump, cut.dump = cut.dump, lambda i, out: die() if i == 2 else dump(i, out)
    elif point == "while a push copies aside":
        shard.dump = lambda i, out: die() if i == 3 else dump_live(i, out)
    elif point == "between segments":
        cut.segments[1].batches = die
    elif point == "unsynced":
        os.fsync = die
    push()
    portion = saving.Portion(segments=cut.segments)
    record = saving.write_shard(root, "ab", rank=0, shard=cut, portion=portion)
    if point == "before manifest":
        storage.LocalStorage.create = die
    elif point == "half a manifest":
        encode = saving.encode_manifest
        def half(checkpoint):
            (pathlib.Path(root) / ".tmp-ab" / "manifest.json").write_bytes(encode(checkpoint)[:100])
            die()
        saving.encode_manifest = half
    elif point == "before rename":
        pathlib.Path.rename = die
    elif point == "after rename":
        sync = storage._sync_directory
        storage._sync_directory = lambda path: die() if path.name != ".tmp-ab" else sync(path)
    saving.commit(root, "ab", step=900, manifest=manifest, shards=[record])

manifest = Manifest.decode(sys.stdin.buffer.read())
shard = DenseShard(manifest, rank=0, num_servers=1, num_workers=1)
dump_live = shard.dump
(table,) = make_tables(manifest, rank=0, num_servers=1)
units = len(shard.buckets)
guard = CopyOnWrite(shard, [table], CompletionLog(units + 2))
ids = np.arange(100)

def push():
    for bucket in shard.buckets:
        guard.before(bucket.id)
        shard.apply(bucket.id, np.ones(bucket.num_elements, np.float32), Hyper(0.1))
    for at in (0, 1):
        guard.before(units + at)
        own = ids[table.parts_of(ids) == at]
        table.push(at, own, np.ones((own.size, 4), np.float32), Hyper(0.1))

push()
guard.open(ShardSnapshot(guard, 900, "ab"))
cut = guard.snapshot
for point in sys.argv[2:]:
    child = os.fork()  # importing everything takes longer than all of these saves
    if not child:
        try:
            save(os.path.join(sys.argv[1], point), point)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), point)
"""

POINTS = (
    "opened",
    "middle",
    "while a push copies aside",
    "between segments",
    "unsynced",
    "before manifest",
    "half a manifest",
    "before rename",
    "after rename",
)


def empty_table() -> saving.Portion:
    (table,) = make_tables(MANIFEST, rank=0, num_servers=1)
    segments = [SegmentSnapshot(table, (0, at), None, lambda: None) for at in (0, 1)]
    return saving.Portion(segments=segments)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By point a root with the complete step 800, all zeros, in which a save of 900 was killed."""
    roots = tmp_path_factory.mktemp("roots")
    for point in POINTS:
        shard = DenseShard(MANIFEST, rank=0, num_servers=1, num_workers=1)
        record = saving.write_shard(roots / point, "aa", rank=0, shard=shard, portion=empty_table())
        saving.commit(roots / point, "aa", step=800, manifest=MANIFEST, shards=[record])
    done = subprocess.run(
        [sys.executable, "-c", SAVER, str(roots), *POINTS],
        input=MANIFEST.encode(),
        capture_output=True,
        timeout=60,
    )
    killed = [f"{-signal.SIGKILL} {point}" for point in POINTS]
    assert done.stdout.decode().splitlines() == killed, done.stderr
    return roots


@pytest.mark.slow
@pytest.mark.fault("F10")
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_while_saving_leaves_one_whole_newest_checkpoint(roots: Path, point: str):
    root = roots / point
    newest = choice.read_manifest(root)
    restoring.verify(root, newest)
    assert newest.step == (900 if point == "after rename" else 800)
    shard = DenseShard(MANIFEST, rank=0, num_servers=1, num_workers=1)
    restoring.restore_shard(reading.open_chain(root, newest), shard)
    assert (np.concatenate([shard.values(i) for i in shard.bucket_ids]) != 0).all() == (
        newest.step == 900
    )
    assert {shard.step(i) for i in shard.bucket_ids} == {1 if newest.step == 900 else 0}
    (table,) = make_tables(MANIFEST, rank=0, num_servers=1)
    place = ServerSettings(rank=0, num_servers=1, num_workers=1)
    restore_tables(reading.open_chain(root, newest, place), [table])
    assert table.num_rows == (100 if newest.step == 900 else 0)
    save_id = "ab" if newest.step == 800 else "ac"
    again = saving.write_shard(root, save_id, rank=0, shard=shard, portion=empty_table())
    saving.commit(root, save_id, step=901, manifest=MANIFEST, shards=[again])
    assert choice.latest(root) == 901
