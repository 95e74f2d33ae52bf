"""TensorFlow's MultiWorkerMirroredStrategy as it is, on Spark executors.

    spark-submit --master local-cluster[2,1,1024] examples/native/multi_worker.py

Every node is a worker and runs main_fun; the workers sum their gradients among themselves. There is
no parameter server: num_ps=0.
"""

from __future__ import annotations

import argparse

from tfos import TFCluster

TRUE_WEIGHTS = (3.0, -2.0)


def main_fun(args, ctx):  # noqa: ARG001 - TF_CONFIG tells TensorFlow all it needs
    import tensorflow as tf

    # From here on it is a program of TensorFlow's documentation; TF_CONFIG has the cluster.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = tf.Variable(tf.zeros([2]))

    def labelled(number):
        x = tf.random.stateless_uniform([args.batch_size, 2], seed=[0, number], minval=-1.0)
        return x, tf.linalg.matvec(x, TRUE_WEIGHTS)

    def descend(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)
        gradient = tape.gradient(loss, weights)
        everywhere = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.MEAN, gradient
        )
        weights.assign_sub(args.learning_rate * everywhere)

    def dataset_fn(context):
        numbers = tf.data.Dataset.range(args.steps * context.num_input_pipelines)
        own = numbers.shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.map(labelled)

    @tf.function
    def step(iterator):
        strategy.run(descend, args=next(iterator))

    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
    for _ in range(args.steps):
        step(iterator)
    return [float(each) for each in weights.numpy()]


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster_size", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=0.2)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    from pyspark import SparkContext

    with SparkContext.getOrCreate() as sc:
        with TFCluster.reserve(sc, args.cluster_size, num_ps=0, ps="tensorflow") as cluster:
            cluster.start(main_fun, args)
        for rank, weights in enumerate(cluster.results()):
            print(f"weights of worker {rank}: {weights}, true: {list(TRUE_WEIGHTS)}")


if __name__ == "__main__":
    main()
