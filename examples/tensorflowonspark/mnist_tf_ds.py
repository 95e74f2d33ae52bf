r"""tf.data: every worker reads its share of TFRecord files with TensorFlow's own datasets.

    spark-submit --master local-cluster[2,1,1024] examples/tensorflowonspark/mnist_tf_ds.py \
        --images_labels data/tfr/train

tf.distribute shared files out by itself; here `shard` does. tf.data cannot read hdfs:// without
Hadoop's native library: `ctx.read.tfrecord` can (examples/mnist/mnist_tf_ds.py).
"""

from __future__ import annotations

import sys

import shared


def records(pattern, args, ctx):
    """This worker's records as batches of (pixels, label)."""
    import tensorflow as tf

    features = {
        "image": tf.io.FixedLenFeature(784, tf.int64),
        "label": tf.io.FixedLenFeature((), tf.int64),
    }

    def parse(batch):
        found = tf.io.parse_example(batch, features)
        return found["image"], found["label"]

    files = tf.data.Dataset.list_files(pattern, shuffle=False)
    mine = files.interleave(tf.data.TFRecordDataset).shard(ctx.num_workers, ctx.worker_num)
    return mine.shuffle(4096).batch(args.batch_size).map(parse).prefetch(2)


def main_fun(args, ctx):
    from shared import build_model
    from tensorflowonspark import compat

    pattern = ctx.absolute_path(f"{args.images_labels}/part-*").removeprefix("file://")
    model = build_model()
    ctx.distribute(model)
    history = model.fit(records(pattern, args, ctx), epochs=args.epochs, verbose=0)
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")
    return history.history["accuracy"][-1]


def main():
    args = shared.arguments(__doc__).parse_args()
    from tensorflowonspark import TFCluster

    cluster = TFCluster.run(
        shared.spark_context(),
        main_fun,
        args,
        args.cluster_size,
        args.num_ps,
        tensorboard=args.tensorboard,
        input_mode=TFCluster.InputMode.TENSORFLOW,
        master_node="chief",
    )
    cluster.shutdown()
    print(f"accuracy while training: {cluster.results()[0]:.3f}")


if __name__ == "__main__":
    sys.exit(main())
