"""What a server reads that is started again alone: its own part of a checkpoint, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ps.checkpoint.choice import read_manifest
from ps.checkpoint.format import step_name
from ps.checkpoint.reader import open_chain
from ps.checkpoint.restore import restore_shard
from ps.checkpoint.storage import Storage
from ps.client.saving.saver import SaveOptions
from ps.dense.shard import DenseShard
from ps.errors import CheckpointError
from ps.manifest.manifest import Hyper
from tests.support.counting_storage import CountingStorage
from tests.support.ps_cluster import ADD, Cluster, cluster, filled
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.1)
MANIFEST = with_tables(table(), size=600, rule=ADD)
NUM_SERVERS = 4
STEPS = (1, 2, 3)
IDS = np.arange(40)


class Bed:
    """Servers that open their checkpoints through storages that count."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.opened: list[CountingStorage] = []

    def storage(self, root: Path | str) -> Storage:
        self.opened.append(CountingStorage(Path(root)))
        return self.opened[-1]

    def asked(self, kind: str, part: str) -> int:
        return sum(each.asked(kind, part) for each in self.opened)


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


@pytest.fixture
def saved(bed: Bed) -> Iterator[Cluster]:
    """Servers whose directory has a full step and two that add to it."""
    with cluster("tcp", num_servers=NUM_SERVERS, open_storage=bed.storage) as made:
        (client,) = made.workers(MANIFEST, filled(MANIFEST))
        for step in STEPS:
            client.push(filled(MANIFEST, 1.0), hyper=HYPER, rows=1)
            client.tables.push({"user": (IDS, ones(IDS))}, hyper=HYPER)
            client.save(bed.root, step, options=SaveOptions(full_every=10))
        bed.opened.clear()
        yield made


def values(made: Cluster) -> tuple[set[float], set[float]]:
    (client,) = made.clients
    rows = client.tables.lookup({"user": IDS})["user"]
    return set(made.pulled(client)["trainable"].tolist()), set(rows.ravel().tolist())


def damage(root: Path, step: int, rank: int) -> None:
    path = root / step_name(step) / f"ps-{rank}.data"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


@pytest.mark.fault("F08")
def test_a_server_that_is_started_again_reads_no_other_servers_file(bed: Bed, saved: Cluster):
    before = values(saved)
    saved.restart(1, bed.root)
    assert saved.servers[1].skipped_step == -1
    assert values(saved) == before
    assert bed.asked("open", "ps-1.data") > 0
    for other in (0, 2, 3):
        assert bed.asked("open", f"ps-{other}.data") == 0


@pytest.mark.fault("F08")
def test_a_server_that_is_started_again_reads_its_own_part_once(bed: Bed, saved: Cluster):
    saved.restart(1, bed.root)
    index_buckets_rows_records = 4
    assert bed.asked("open", f"{step_name(STEPS[-1])}/ps-1.data") <= index_buckets_rows_records


@pytest.mark.fault("F41")
def test_damage_of_another_servers_file_costs_no_step(bed: Bed, saved: Cluster):
    before = values(saved)
    for step in STEPS:
        damage(bed.root, step, 0)
    saved.restart(1, bed.root)
    assert values(saved) == before
    assert saved.servers[1].stats().restored_step == STEPS[-1]


@pytest.mark.fault("F41")
def test_damage_of_its_own_file_makes_it_take_the_step_before(
    bed: Bed, saved: Cluster, caplog: pytest.LogCaptureFixture
):
    damage(bed.root, STEPS[-1], 1)
    saved.restart(1, bed.root)
    assert saved.servers[1].stats().restored_step == STEPS[-2]
    assert saved.servers[1].skipped_step == STEPS[-1]
    texts = [each.getMessage() for each in caplog.records]
    assert sum(text.startswith("checkpoint step 3 in ") for text in texts) == 1
    assert any("step 2 is restored, not step 3, which has a higher" in text for text in texts)


@pytest.mark.fault("F41")
def test_servers_that_are_started_by_hand_read_all_files_and_take_the_same_step(
    bed: Bed, saved: Cluster
):
    damage(bed.root, STEPS[-1], 0)
    saved.restart(1, bed.root, by_hand=True)
    assert saved.servers[1].stats().restored_step == STEPS[-2]


@pytest.mark.fault("F41")
def test_nothing_sound_of_its_own_ends_it(bed: Bed, saved: Cluster):
    for step in STEPS:
        damage(bed.root, step, 1)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*: 3, 2, 1"):
        saved.restart(1, bed.root)


@pytest.mark.fault("F42")
@pytest.mark.usefixtures("saved")
def test_another_number_of_servers_opens_no_step_that_has_nothing_left_to_tell(bed: Bed):
    storage = CountingStorage(bed.root)
    chain = open_chain(storage, read_manifest(storage))
    opened_before = storage.asked("open", step_name(STEPS[0]))
    restore_shard(chain, DenseShard(MANIFEST, rank=0, num_servers=2, num_workers=1))
    assert storage.asked("open", step_name(STEPS[0])) == opened_before
    assert storage.asked("open", f"{step_name(STEPS[-1])}/ps-3.data") > 0
