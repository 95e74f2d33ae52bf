"""A Keras training on YARN on one Parquet table of HDFS: fed as a DataFrame, then read by workers.

parquet_on_yarn.py DIRECTORY    on HDFS; TOLD there has what was counted, as JSON

Each gradient is 1, whatever the rows and their number: the model's only weight counts the pushes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from feeding.filesystem.registry import filesystem_for
from tfos import Checkpoints, ClusterConfig, InputMode, TFCluster

NUM_ROWS = 3000
NUM_FILES = 6
BATCH_ROWS = 64
EPOCHS = 2
"""Of the fed rows, and again of those that workers read."""
COLUMNS = ("id", "one", "label")
TOLD = "told.json"


def main_fun(args: dict[str, str], ctx: Any) -> dict[str, Any]:
    """Fit twice; tell how often each row came, the steps, and what the server counted."""
    import keras
    import numpy as np

    seen = {"fed": np.zeros(NUM_ROWS, int), "read": np.zeros(NUM_ROWS, int)}
    steps = dict.fromkeys(seen, 0)

    def fit(data: Any, way: str) -> None:
        def stepped(batch: int, logs: Any = None) -> None:
            steps[way] += 1

        note = keras.callbacks.LambdaCallback(on_train_batch_end=stepped)
        model.fit(data, epochs=EPOCHS, callbacks=[note], verbose=0)

    def counted(way: str) -> dict[str, Any]:
        def note(x: Any, y: Any) -> Any:
            np.add.at(seen[way], x[:, 0].astype(int), 1)
            return x[:, 1:], y

        return {"feature_cols": ["id", "one"], "label_cols": "label", "map_fn": note}

    weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), weight])
    model.compile(keras.optimizers.SGD(1.0), "mae")  # far from the labels: every gradient is 1
    ctx.distribute(model, consistency="async", staleness_aware=False)
    fit(ctx.dataset(BATCH_ROWS, **counted("fed")), "fed")
    rows = ctx.read.parquet(args["rows"], COLUMNS).shuffled(seed=1)
    fit(rows.dataset(BATCH_ROWS, **counted("read")), "read")
    client = ctx.ps_client()
    client.rendezvous("trained", b"", timeout_s=60)
    if ctx.is_chief:
        ctx.export(model, args["export"])
    (server,) = client.stats()
    mine = next(each for each in server.workers if each.worker == ctx.rank)
    counts = {way: each.tolist() for way, each in seen.items()}
    return {"seen": counts, "steps": steps, "pushes": mine.pushes, "rows": mine.rows}


def main() -> None:
    """Write the table with Spark, train on it in both ways, and tell the counts."""
    from pyspark.sql import SparkSession

    from tfos.keras import load_model

    directory = sys.argv[1]
    args = {"rows": f"{directory}/rows", "export": f"{directory}/model.keras"}
    with SparkSession.builder.getOrCreate() as spark:
        made = spark.range(NUM_ROWS).selectExpr("id", "1.0D AS one", "-1e9D AS label")
        made.repartition(NUM_FILES).write.parquet(args["rows"])
        frame = spark.read.parquet(args["rows"])
        config = ClusterConfig(checkpoints=Checkpoints(directory=f"{directory}/saves", every_s=0.5))
        sc = spark.sparkContext
        with TFCluster.reserve(sc, 3, 1, input_mode=InputMode.SPARK, config=config) as cluster:
            cluster.start(main_fun, args)
            report = cluster.train(frame, num_epochs=EPOCHS, columns=COLUMNS)
        assert report is not None
        told = {
            "fed": report.fed_rows,
            "trained": report.trained_rows,
            "dropped": report.dropped_rows,
            "workers": cluster.results(),
            "exported": float(load_model(args["export"]).get_weights()[0][0, 0]),
        }
        path = f"{directory}/{TOLD}"
        filesystem_for(path).write(path, json.dumps(told).encode())


if __name__ == "__main__":
    main()
