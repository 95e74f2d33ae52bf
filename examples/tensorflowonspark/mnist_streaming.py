r"""Streaming: a DStream of lines from files that arrive feeds the cluster until one has enough.

    mkdir arriving
    spark-submit --master local-cluster[2,1,1024] examples/tensorflowonspark/mnist_streaming.py \
        --images_labels arriving --stop_after 4000
    cp data/csv/train/part-00000 arriving/.tmp && mv arriving/.tmp arriving/a      # then b, c, ...

mnist_data_setup.py writes data/csv. The last line goes into another terminal.

Spark counts DStreams as legacy: cluster.stream of Structured Streaming (examples/mnist/
mnist_streaming.py) trains each row once over restarts, a DStream does not.
"""

from __future__ import annotations

import sys

import shared


def main_fun(args, ctx):
    import numpy as np
    from shared import build_model
    from tensorflowonspark import TFNode, compat

    model = build_model()
    ctx.distribute(model)
    feed = TFNode.DataFeed(ctx.mgr)
    seen = 0
    while not feed.should_stop() and seen < args.stop_after:
        batch = feed.next_batch(args.batch_size)
        if batch:
            images, labels = map(np.array, zip(*batch, strict=True))
            model.fit(images, labels, batch_size=args.batch_size, verbose=0)
            seen += len(batch)
    feed.terminate()  # the stream stops for every worker
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")
    return seen


def main():
    parser = shared.arguments(__doc__)
    parser.add_argument("--stop_after", type=int, default=4000, help="rows of one worker")
    parser.add_argument("--seconds", type=float, default=2, help="length of a batch of the stream")
    args = parser.parse_args()
    from pyspark.streaming import StreamingContext
    from tensorflowonspark import TFCluster

    sc = shared.spark_context()
    ssc = StreamingContext(sc, args.seconds)
    rows = ssc.textFileStream(args.images_labels).map(shared.parse_line)
    cluster = TFCluster.run(
        sc,
        main_fun,
        args,
        args.cluster_size,
        args.num_ps,
        tensorboard=args.tensorboard,
        input_mode=TFCluster.InputMode.SPARK,
        master_node="chief",
    )
    cluster.train(rows, feed_timeout=86400)
    ssc.start()
    cluster.shutdown(ssc)
    print(f"rows trained: {sum(cluster.results())}")


if __name__ == "__main__":
    sys.exit(main())
