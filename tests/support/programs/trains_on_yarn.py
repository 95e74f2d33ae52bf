"""A small training on YARN without a model: rows and checkpoints on HDFS, exact counts.

trains_on_yarn.py DIRECTORY     on HDFS; TOLD there has what was counted, as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

from feeding.filesystem.registry import filesystem_for
from tests.support.plain_steps import PlainSteps
from tfos import Checkpoints, ClusterConfig, InputMode, TFCluster

NUM_ROWS = 600
EPOCHS = 2
BATCH_ROWS = 50
TOLD = "told.json"


def main_fun(_args: Any, ctx: Any) -> dict[str, Any]:
    """Push once for each batch of rows; return what was counted here and on the server."""
    steps, feed, total, rows = PlainSteps(ctx, 1000), ctx.get_data_feed(), 0, 0
    while not feed.should_stop():
        batch = feed.next_batch(BATCH_ROWS)
        if batch:
            steps.step()
            total, rows = total + sum(batch), rows + len(batch)
    return {"steps": steps.count, "rows": rows, "sum": total, "value": steps.value()}


def main() -> None:
    """Write rows, train on them twice, and tell the counts."""
    from pyspark import SparkContext

    directory = sys.argv[1]
    with SparkContext() as sc:
        sc.parallelize(range(NUM_ROWS), 3).saveAsTextFile(f"{directory}/rows")
        saves = Checkpoints(directory=f"{directory}/saves", every_s=1.0)
        config = ClusterConfig(checkpoints=saves)
        with TFCluster.reserve(sc, 2, 1, input_mode=InputMode.SPARK, config=config) as cluster:
            cluster.start(main_fun, None)
            report = cluster.train(sc.textFile(f"{directory}/rows").map(int), num_epochs=EPOCHS)
        assert report is not None
        told = {
            "worker": cluster.results()[0],
            "fed": report.fed_rows,
            "trained": report.trained_rows,
            "dropped": report.dropped_rows,
        }
        path = f"{directory}/{TOLD}"
        filesystem_for(path).write(path, json.dumps(told).encode())


if __name__ == "__main__":
    main()
