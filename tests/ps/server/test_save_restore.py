"""Saving while training goes on: values and the exactly-once record are one cut."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ps.checkpoint.choice import read_manifest
from ps.checkpoint.reader import open_chain
from ps.checkpoint.restore import restore_shard
from ps.client.client import PSClient
from ps.dense.shard import DenseShard
from ps.manifest.manifest import Hyper
from ps.server.save_restore import ShardExtra
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest, run_all, succeeded
from tests.support.snapshot_skew import last_applied, records_of

pytestmark = pytest.mark.socket

HYPER = Hyper(1.0)
NUM_SERVERS, NUM_WORKERS = 2, 3
MOST_SAVES = 100


@pytest.mark.fault("F10")
@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_a_save_in_the_middle_of_pushes_matches_its_record(tmp_path: Path, consistency: str):
    """Every push adds 1 everywhere, so a bucket's value is the number of pushes in its record."""
    manifest = make_manifest(
        # Several pieces of a push per server: between two of them it is in flight.
        1_200_000,
        rule=ADD,
        consistency=consistency,
        reduction="sum",
        bucket_bytes=32_768,
    )
    ended = threading.Event()
    with cluster("tcp", num_servers=NUM_SERVERS, num_workers=NUM_WORKERS) as bed:
        clients = bed.workers(manifest, filled(manifest))
        saver = bed.client(0)
        saver.attach()

        def train(client: PSClient) -> None:
            while not ended.is_set():
                client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
            client.finish()

        def save() -> None:
            is_sync, in_flight = consistency == "sync", 0
            try:
                for step in range(MOST_SAVES):
                    saver.save(tmp_path, step)
                    in_flight += _check_cut(tmp_path, step, manifest, is_sync=is_sync)
                    if step >= 3 and (is_sync or in_flight):
                        return
            finally:
                ended.set()
            raise AssertionError(f"none of {MOST_SAVES} saves has met a push in flight")

        succeeded(run_all(save, *(partial(train, client) for client in clients), timeout_s=60))


def _check_cut(root: Path, step: int, manifest, *, is_sync: bool) -> int:
    """Compare each bucket with its record; returns how many sessions were cut half applied."""
    checkpoint = read_manifest(root, step)
    half_applied = 0
    for rank in range(NUM_SERVERS):
        dense = DenseShard(manifest, rank=rank, num_servers=NUM_SERVERS, num_workers=NUM_WORKERS)
        restore_shard(open_chain(root, checkpoint), dense)
        extra = msgspec.msgpack.decode(records_of(root, checkpoint, rank), type=ShardExtra)
        for index, bucket_id in enumerate(dense.bucket_ids):
            pushes = sum(last_applied(session, index) for session in extra.sessions or ())
            assert np.all(dense.values(bucket_id) == np.float32(pushes)), f"step {step}"
        half_applied += sum(bool(session.applied) for session in extra.sessions or ())
        if is_sync:
            assert half_applied == 0
            assert {session.completed for session in extra.sessions or ()} <= {extra.clock}
    return half_applied


def test_a_failed_save_leaves_the_earlier_ones_and_no_rest(tmp_path: Path):
    manifest = make_manifest(rule=ADD)
    with cluster("inproc", num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        client.save(tmp_path, 1)
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        (damaged, *_) = bed.servers[1]._service.life.loaded().dense.owned
        damaged.values[0] = np.inf  # no push does this
        with pytest.raises(Exception, match=r"NaN or infinite") as failed:
            client.save(tmp_path, 2)
        assert type(failed.value).__name__ == "CheckpointError"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
