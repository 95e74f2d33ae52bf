"""TensorFlow's ParameterServerStrategy as it is, on Spark executors.

    spark-submit --master local-cluster[4,1,1024] examples/native/parameter_server.py

One node is TensorFlow's parameter server, two are its workers, and the chief coordinates: main_fun
runs only there. --fed lets Spark feed the rows; without it each worker makes its own dataset.
"""

from __future__ import annotations

import argparse

from tfos import InputMode, TFCluster

TRUE_WEIGHTS = (3.0, -2.0)


def main_fun(args, ctx):
    import numpy as np
    import tensorflow as tf

    # From here on it is a program of TensorFlow's documentation; TF_CONFIG has the cluster.
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([2]))

    def dataset_fn():
        def labelled(number):
            x = tf.random.stateless_uniform([args.batch_size, 2], seed=[0, number], minval=-1.0)
            return x, tf.linalg.matvec(x, TRUE_WEIGHTS)

        return tf.data.Dataset.range(1 << 20).map(labelled)

    def descend(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)
        weights.assign_sub(args.learning_rate * tape.gradient(loss, weights))
        return loss

    @tf.function
    def step(iterator):
        return strategy.run(descend, args=next(iterator))

    @tf.function(reduce_retracing=True)
    def step_on(x, y):
        return strategy.run(descend, args=(x, y))

    if args.fed:
        feed = ctx.get_data_feed()
        while not feed.should_stop():
            rows = feed.next_arrays(args.batch_size)
            if rows is not None:
                x, y = (np.asarray(part, np.float32) for part in rows)
                coordinator.schedule(step_on, args=(tf.constant(x), tf.constant(y)))
    else:
        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        for _ in range(args.steps):
            coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    return [float(each) for each in weights.numpy()]


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster_size", type=int, default=4)
    parser.add_argument("--num_ps", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning_rate", type=float, default=0.2)
    parser.add_argument("--fed", action="store_true")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    import numpy as np
    from pyspark import SparkContext

    with SparkContext.getOrCreate() as sc:
        mode = InputMode.SPARK if args.fed else InputMode.TENSORFLOW
        with TFCluster.reserve(
            sc, args.cluster_size, args.num_ps, ps="tensorflow", input_mode=mode
        ) as cluster:
            cluster.start(main_fun, args)
            if args.fed:
                rows = np.random.default_rng(0).uniform(-1, 1, (args.steps * args.batch_size, 2))
                pairs = [(row.astype("f4"), np.float32(row @ TRUE_WEIGHTS)) for row in rows]
                cluster.train(sc.parallelize(pairs, 4), num_epochs=1)
        print(f"weights: {cluster.results()[0]}, true: {list(TRUE_WEIGHTS)}")


if __name__ == "__main__":
    main()
