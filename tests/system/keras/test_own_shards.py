"""Training on shards inside the workers: the numbers of servers of their own, bit for bit."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest

from ps.checkpoint.storage import storage_at
from ps.client.client import PSClient
from rpc.auth.handshake import Identity, Role
from tests.support.keras_training import DEADLINE_S, blobs, serving, together
from tests.support.rank_threads import CREDENTIALS, Ranks
from tfos.keras.fit.distribute import distribute
from tfos.worker.own_shard import OwnShard

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


def test_shards_inside_the_workers_train_as_servers_of_their_own_do(tmp_path):
    with serving(num_workers=2, num_servers=1) as servers:
        models = [make_model() for _ in range(4)]  # one after the other: of one seed
        expected = together(lambda rank: trained(models[rank], servers.contexts[rank]), 2)
        ranks = Ranks(2, str(tmp_path))

        def work(rank):
            group = ranks.groups[rank]
            shard = OwnShard(group, CREDENTIALS, generation=0, open_storage=storage_at)
            endpoints = shard.serve("127.0.0.1", str(tmp_path))
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
