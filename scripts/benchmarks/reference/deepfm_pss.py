"""DeepFM by ParameterServerStrategy: tf-keras, a ClusterCoordinator, two workers, a server.

As its guide has it: the model is made in the strategy's scope, each worker has its own dataset, and
a function of ten steps is scheduled again and again. A program with an argument is a worker or the
server; the one with a task on its standard input coordinates.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tensorflow as tf
import tf_keras

from scripts.benchmarks.deepfm_model import LEARNING_RATE, auc
from scripts.benchmarks.deepfm_turns import Task, read_task, say, turns
from scripts.benchmarks.reference.deepfm_fit import stock_model
from scripts.benchmarks.reference.deepfm_input import batches, labels_of

STEPS_PER_CALL = 10


def serve(cluster: dict[str, list[str]], job: str, index: int) -> None:
    """Run a worker or the server until killed.

    Args:
        cluster: addresses by job.
        job: "worker" or "ps".
        index: among those of its job.
    """
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job, index, protocol="grpc", config=config
    )
    server.join()


def compiled_model(task: Task) -> Any:
    """Return the model with stock embedding layers; call it in the strategy's scope."""
    model = stock_model(tf_keras, task)
    kind = getattr(tf_keras.optimizers.legacy, task.optimizer)
    model.compile(kind(LEARNING_RATE[task.optimizer]))
    return model


def coordinate(task: Task) -> None:
    """Train by turns, or for one pass; each leader's step is one step of each worker.

    Args:
        task: `more` has the cluster's addresses by job.
    """
    spec = tf.train.ClusterSpec(task.more["cluster"])
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = compiled_model(task)
        loss_of = tf_keras.losses.BinaryCrossentropy(
            from_logits=True, reduction=tf_keras.losses.Reduction.NONE
        )

    def step(iterator: Any) -> Any:
        features, labels = next(iterator)
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            loss = tf.reduce_mean(loss_of(labels[:, None], logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def steps(iterator: Any) -> Any:
        for _ in tf.range(STEPS_PER_CALL):
            strategy.run(step, args=(iterator,))

    data = coordinator.create_per_worker_dataset(
        lambda: batches(task.files, task.batch_size, shuffle_files=True).repeat()
    )
    iterator = iter(data)

    def train(num_steps: int) -> None:
        for _ in range(num_steps // STEPS_PER_CALL):
            coordinator.schedule(steps, args=(iterator,))
        coordinator.join()

    num_workers = len(task.more["cluster"]["worker"])
    say("ready")
    if task.turns:
        for num_steps in turns():
            train(num_steps * num_workers)
    train(task.more["steps"])
    alone = compiled_model(task)
    alone.set_weights(model.get_weights())
    held_out = batches([task.held_out], 4096)
    say(auc(labels_of(held_out), alone.predict(held_out, verbose=0)[:, 0]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(*json.loads(sys.argv[1]))
    else:
        coordinate(read_task())
