"""Three clusters of one application on YARN: two side by side, and one in their slots afterwards.

two_clusters_on_yarn.py DIRECTORY   on HDFS; TOLD there has what was counted, as JSON
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from feeding.filesystem.registry import filesystem_for
from tests.support.programs.trains_on_yarn import main_fun
from tfos import InputMode, TFCluster

EPOCHS = 2
ROWS = {"left": 400, "right": 700, "after": 500}
"""By cluster; each has one server and one worker."""
TOLD = "told.json"


def reserved(sc: Any) -> TFCluster:
    """Return a cluster whose main_fun runs."""
    cluster = TFCluster.reserve(sc, 2, 1, input_mode=InputMode.SPARK)
    cluster.start(main_fun)
    return cluster


def main() -> None:
    """Train all of them, and tell their counts."""
    from pyspark import SparkContext

    directory = sys.argv[1]
    told: dict[str, Any] = {}
    with SparkContext() as sc:

        def fed(cluster: TFCluster, name: str) -> Any:
            return cluster.train(sc.parallelize(range(ROWS[name]), 3), num_epochs=EPOCHS)

        def end(cluster: TFCluster, name: str, *reports: Any) -> None:
            cluster.shutdown()
            told[name] = {
                "fed": sum(each.fed_rows for each in reports),
                "trained": sum(each.trained_rows for each in reports),
                "dropped": sum(each.dropped_rows for each in reports),
                "worker": cluster.results()[0],
                "failures": len(cluster.failures),
            }

        with ThreadPoolExecutor(2) as pool:
            left, right = pool.map(reserved, [sc, sc])
            ways = {"left": left, "right": right}
            reports = dict(zip(ways, pool.map(fed, ways.values(), ways), strict=True))
        end(left, "left", reports["left"])
        end(right, "right", reports["right"], fed(right, "right"))  # the other one's end is its own
        after = reserved(sc)
        end(after, "after", fed(after, "after"))
        path = f"{directory}/{TOLD}"
        filesystem_for(path).write(path, json.dumps(told).encode())


if __name__ == "__main__":
    main()
