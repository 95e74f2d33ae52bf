"""A chief that attaches decides by what all servers have, not by what some of them have."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ps.manifest.sharding import bucket_bytes_for
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest, raw_seed
from tfos.config import Checkpoints
from tfos.keras.step.attach import with_buckets
from tfos.worker.saver import ChiefSaver

pytestmark = [pytest.mark.socket, pytest.mark.fault("F20")]

MANIFEST = make_manifest(1000, rule=ADD)


def test_a_chief_does_not_wait_for_the_seed_that_it_is_to_bring(tmp_path: Path):
    """Two attempts before it were lost, and each has brought one server its values."""
    fitting = bucket_bytes_for(sum(group.nbytes for group in MANIFEST.pushed_groups), 2)
    manifest = msgspec.structs.replace(MANIFEST, bucket_bytes=fitting)
    with cluster("inproc", num_servers=2) as bed:
        raw_seed(bed, 0, manifest, 7.0, seed_id=7)
        raw_seed(bed, 1, manifest, 8.0, seed_id=8, generation=1)
        chief = bed.client(0, generation=2, timeout_s=2.0)
        saver = ChiefSaver(
            Checkpoints(directory=str(tmp_path), resume=True), bed.client, joins=True
        )
        saver.start()
        assert with_buckets(MANIFEST, chief) == manifest
        chief.seed(manifest, filled(manifest, 1.0))
        assert set(bed.pulled(chief)["trainable"]) == {1.0}
        saver.close()


def test_the_buckets_of_servers_with_values_are_kept():
    manifest = msgspec.structs.replace(MANIFEST, bucket_bytes=1024)
    with cluster("inproc", num_servers=2) as bed:
        bed.client().seed(manifest, filled(manifest))
        chief = bed.client(0, generation=1)
        assert with_buckets(MANIFEST, chief) == manifest
