"""Training on shards inside the workers: the numbers of servers of their own, bit for bit."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest

from ps.checkpoint.storage import storage_at
from ps.client.client import PSClient
from rpc.auth.handshake import Identity, Role
from rpc.endpoint import Endpoint
from tests.support.keras_training import DEADLINE_S, blobs, serving, together
from tests.support.nodes import node_settings
from tests.support.rank_threads import CREDENTIALS, Ranks
from tfos.control.messages import RosterEntry
from tfos.errors import CollectiveTimeout
from tfos.failure import NodeId
from tfos.files.checkpoint_storage import Storages
from tfos.keras.fit.distribute import distribute
from tfos.keras.step import attach
from tfos.node.spec import NO_KEYS, ChildSpec, Executor, NodeBundle
from tfos.topology import PlannedNode
from tfos.worker.own_shard import OwnShard
from tfos.worker.server_access import ServerAccess

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]
X, Y = blobs(256)


def make_model():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((20,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    return model


def trained(model, context):
    distribute(model, context, consistency="sync")
    own = slice(context.rank, None, context.num_workers)
    model.fit(X[own], Y[own], batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def test_a_worker_that_does_not_come_is_named_with_the_call_that_it_owes(tmp_path, monkeypatch):
    monkeypatch.setattr(attach, "ATTACH_TIMEOUT_S", 0.2)
    settings = node_settings(num_workers=2, num_ps=0)
    node = PlannedNode("worker", 1, 1)
    spec = ChildSpec(
        attempt=0,
        bundle=NodeBundle(node=node, control_keys=NO_KEYS, rpc_secret=b"S" * 32, settings=settings),
        executor=Executor("7", "127.0.0.1", 0, 1, "/work", "", "/tmp", ""),
        link_fd=-1,
        socket_dir=str(tmp_path),
        log_dir="",
    )
    roster = [RosterEntry(NodeId("worker", rank), rank, "h", Endpoint("h", 1)) for rank in range(2)]
    ranks = Ranks(2, str(tmp_path))
    access = ServerAccess(
        spec,
        roster,
        identity=Identity(Role.WORKER, 1),
        credentials=CREDENTIALS,
        storages=Storages(),
        rank_group=lambda: ranks.groups[1],
        on_own_shard=lambda: None,
    )
    text = r"worker:1 has waited 0.2 s for worker:0 to call ctx.distribute\(model, .*sync"
    try:
        with pytest.raises(CollectiveTimeout, match=text):
            access.serve_where_none_are(make_model(), "sync")
    finally:
        ranks.close()


def test_shards_inside_the_workers_train_as_servers_of_their_own_do(tmp_path):
    with serving(num_workers=2, num_servers=1) as servers:
        models = [make_model() for _ in range(4)]  # one after the other: of one seed
        expected = together(lambda rank: trained(models[rank], servers.contexts[rank]), 2)
        ranks = Ranks(2, str(tmp_path))

        def work(rank):
            group = ranks.groups[rank]
            shard = OwnShard(group, CREDENTIALS, generation=0, open_storage=storage_at)
            endpoints = shard.serve("127.0.0.1", str(tmp_path), timeout_s=DEADLINE_S)
            who = Identity(Role.WORKER, rank)
            with PSClient(
                endpoints, CREDENTIALS, who, num_workers=2, timeout_s=DEADLINE_S
            ) as client:
                context = dataclasses.replace(servers.contexts[rank], client=client)
                found = trained(models[2 + rank], context)
                client.finish()
            shard.end()
            return found

        try:
            found = together(work, 2)
        finally:
            ranks.close()
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
