r"""spark.ml: TFEstimator trains from a DataFrame, TFModel adds the predicted digit to another one.

    spark-submit --master local-cluster[2,1,1024] examples/tensorflowonspark/mnist_pipeline.py \
        --images_labels data/tfr/train --test data/tfr/test --output labelled
"""

from __future__ import annotations

import sys

import shared


def train_fun(args, ctx):
    from shared import build_model, fed_dataset
    from tensorflowonspark import TFNode, compat

    model = build_model()
    ctx.distribute(model)
    feed = TFNode.DataFeed(ctx.mgr)  # columns in the order of their names: image, label
    model.fit(fed_dataset(feed, args.batch_size), verbose=0)
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")


def main():
    parser = shared.arguments(__doc__)
    parser.add_argument("--test", type=shared.absolute, help="TFRecord files to label")
    parser.add_argument("--output", type=shared.absolute, default="labelled")
    args = parser.parse_args()
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F
    from tensorflowonspark import dfutil
    from tensorflowonspark.pipeline import TFEstimator

    sc = shared.spark_context()
    SparkSession(sc)
    estimator = (
        TFEstimator(train_fun, args)
        .setInputMapping({"image": "image", "label": "label"})
        .setExportDir(args.export_dir)
        .setClusterSize(args.cluster_size)
        .setNumPS(args.num_ps)
        .setEpochs(args.epochs)
        .setBatchSize(args.batch_size)
        .setGraceSecs(0)
    )
    model = estimator.fit(dfutil.loadTFRecords(sc, args.images_labels))
    model.setInputMapping({"image": "image"}).setOutputMapping({"digit": "scores"})
    scores = model.transform(dfutil.loadTFRecords(sc, args.test))
    best = F.expr("array_position(scores, array_max(scores)) - 1")
    scores.select(best.alias("digit")).write.json(args.output)
    print(f"predictions: {SparkSession(sc).read.json(args.output).count()}")


if __name__ == "__main__":
    sys.exit(main())
