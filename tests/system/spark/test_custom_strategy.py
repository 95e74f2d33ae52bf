"""MirroredStrategyRunner(use_custom_strategy=True): train_fn builds TensorFlow's own strategy."""

from __future__ import annotations

import numpy as np
import pytest

import tfos

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]
TRUE_WEIGHTS = (3.0, -2.0)


def descend_together(steps, rate):
    """Fit a line whose rows are shared by the strategy's workers; returns who took part."""
    import json
    import os

    import numpy
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rows = numpy.random.default_rng(0).uniform(-1, 1, (64, 2)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((rows, rows @ numpy.array([3, -2], "float32")))
    batches = strategy.experimental_distribute_dataset(dataset.batch(64).repeat())
    with strategy.scope():
        weights = tf.Variable(tf.zeros([2]))

    def descend(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.linalg.matvec(x, weights) - y) ** 2) / 64
        gradient = tape.gradient(loss, weights)
        replica = tf.distribute.get_replica_context()
        weights.assign_sub(rate * replica.all_reduce(tf.distribute.ReduceOp.SUM, gradient))
        return tf.shape(x)[0]

    @tf.function
    def step(iterator):
        seen = strategy.run(descend, args=next(iterator))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, seen, axis=None)

    iterator = iter(batches)
    seen = [int(step(iterator)) for _ in range(steps)]
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    return weights.numpy().tolist(), set(seen), strategy.num_replicas_in_sync, list(cluster)


def test_slots_train_by_a_strategy_of_train_fn(spark, capfd):
    runner = tfos.MirroredStrategyRunner(
        num_slots=2, use_gpu=False, use_custom_strategy=True, sc=spark
    )
    weights, seen, replicas, jobs = runner.run(descend_together, steps=60, rate=0.8)
    np.testing.assert_allclose(weights, TRUE_WEIGHTS, atol=1e-3)
    assert (seen, replicas, jobs) == ({64}, 2, ["worker"])
    runner.run(int)
    told = [
        each for each in capfd.readouterr().err.splitlines() if "has not built a strategy" in each
    ]
    assert len(told) == 1, "of the run that trains nothing, by its chief"


def test_a_slot_that_dies_ends_the_run_of_all(spark):
    runner = tfos.MirroredStrategyRunner(
        num_slots=2, use_gpu=False, use_custom_strategy=True, sc=spark
    )
    with pytest.raises(tfos.NodeFailedError, match="SIGKILL"):
        runner.run(dies_in_training)


def dies_in_training():
    import os
    import signal

    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function
    def step():
        def one():
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([]))

        return strategy.run(one)

    step()
    if tfos.runner.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        step()
