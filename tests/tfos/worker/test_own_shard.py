"""Shards inside the workers: one each, for all of them, until the last has finished."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ps.checkpoint.storage import storage_at
from ps.client.client import PSClient
from ps.errors import PSError
from ps.manifest.manifest import SGD, GroupSpec, Hyper, Manifest, ParamSpec
from rpc.auth.handshake import Identity, Role
from rpc.errors import RpcError
from tests.support.rank_threads import CREDENTIALS, Ranks
from tfos.errors import CollectiveError
from tfos.worker.own_shard import OwnShard

pytestmark = pytest.mark.socket
SIZE = 200_000
GROUPS = (GroupSpec("all", "float32", SGD(), (ParamSpec("w", (SIZE,)),)),)
MANIFEST = Manifest(groups=GROUPS, consistency="sync")


@pytest.fixture
def ranks(tmp_path):
    found = Ranks(2, str(tmp_path))
    yield found
    found.close()


def shard_of(group, tmp_path):
    shard = OwnShard(group, CREDENTIALS, generation=0, open_storage=storage_at)
    return shard, shard.serve("127.0.0.1", str(tmp_path), timeout_s=60.0)


def test_each_worker_serves_a_part_until_the_last_has_finished(ranks, tmp_path, monkeypatch):
    waits, may_finish = threading.Event(), threading.Event()
    barrier = ranks.groups[1].barrier

    def noted_barrier(*, timeout_s):
        waits.set()
        barrier(timeout_s=timeout_s)

    monkeypatch.setattr(ranks.groups[1], "barrier", noted_barrier)

    def work(group):
        shard, endpoints = shard_of(group, tmp_path)
        who = Identity(Role.WORKER, group.rank)
        values = {"all": np.zeros(SIZE, np.float32)}
        with PSClient(endpoints, CREDENTIALS, who, num_workers=2) as client:
            if group.rank == 0:
                client.seed(MANIFEST, {"all": np.ones(SIZE, np.float32)})
            client.attach(timeout_s=10.0)
            gradient = {"all": np.full(SIZE, group.rank + 1.0, np.float32)}
            client.push_pull(gradient, values, hyper=Hyper(0.5), rows=1)
            if group.rank == 1:
                client.finish()
            else:
                assert waits.wait(10.0)
                client.pull(values)  # of both shards: the other worker waits with its own
                client.finish()
                may_finish.set()
        shard.end()
        assert may_finish.is_set()
        with pytest.raises((PSError, RpcError)):
            PSClient(endpoints, CREDENTIALS, who, num_workers=2, reconnect_s=0.2).describe()
        return len(endpoints), values["all"]

    for count, values in ranks.run(work):
        assert count == 2
        np.testing.assert_array_equal(values, np.full(SIZE, 1 - 0.5 * 1.5, np.float32))


def test_a_worker_that_ends_before_the_others_serve_is_said(ranks, tmp_path):
    ranks.groups[1].close()
    with pytest.raises(CollectiveError, match="rank 1"):
        shard_of(ranks.groups[0], tmp_path)
