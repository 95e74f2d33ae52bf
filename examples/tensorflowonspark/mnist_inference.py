r"""Parallel inference: independent processes label TFRecord files with an exported model.

    spark-submit --master local-cluster[2,1,1024] examples/tensorflowonspark/mnist_inference.py \
        --images_labels data/tfr/test --export_dir mnist_export --output predictions

Every process writes one file of lines "label prediction".
"""

from __future__ import annotations

import sys

import shared


def inference(args, ctx):
    import tensorflow as tf

    predict = tf.saved_model.load(args.export_dir).signatures["serving_default"]
    features = {
        "image": tf.io.FixedLenFeature(784, tf.int64),
        "label": tf.io.FixedLenFeature((), tf.int64),
    }
    files = tf.data.Dataset.list_files(f"{args.images_labels}/part-*", shuffle=False)
    records = files.shard(ctx.num_workers, ctx.worker_num).interleave(tf.data.TFRecordDataset)
    tf.io.gfile.makedirs(args.output)
    with tf.io.gfile.GFile(f"{args.output}/part-{ctx.worker_num:05d}", "w") as output:
        for batch in records.batch(args.batch_size):
            row = tf.io.parse_example(batch, features)
            scores = predict(image=tf.cast(row["image"], tf.float32))["digit"]
            for pair in zip(row["label"].numpy(), scores.numpy().argmax(axis=1), strict=True):
                output.write("{} {}\n".format(*pair))


def main():
    parser = shared.arguments(__doc__)
    parser.add_argument("--output", type=shared.absolute, default="predictions")
    args = parser.parse_args()
    from tensorflowonspark import TFParallel

    sc = shared.spark_context()
    TFParallel.run(sc, inference, args, args.cluster_size)
    pairs = sc.textFile(args.output).map(str.split).collect()
    right = sum(label == predicted for label, predicted in pairs)
    print(f"predictions: {len(pairs)}, right: {right / len(pairs):.3f}")


if __name__ == "__main__":
    sys.exit(main())
