"""Prints on which executors and hosts the nodes of clusters are.

places_nodes.py hosts     one spread over hosts, one packed
places_nodes.py memory    two with memory per role, by dynamic allocation of two executors

One JSON line after SEEN for each cluster: for each node the number of its executor's resource
profile, and Spark's name of its host.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pyspark

import tfos
from tfos import Resources

DYNAMIC = {
    "spark.executor.cores": "1",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "2",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
}
OF_ROLES = {
    "ps_resources": Resources(memory="700m"),
    "worker_resources": Resources(cores=2, memory="1g"),
}


def main_fun(_args: Any, _ctx: Any) -> None:
    """Return at once."""


def run(sc: Any, cluster_size: int, **options: Any) -> None:
    """Run a cluster of one server and print where its nodes were."""
    mode = tfos.InputMode.TENSORFLOW
    with tfos.TFCluster.reserve(sc, cluster_size, 1, input_mode=mode, **options) as cluster:
        cluster.start(main_fun, None)
        at = {node.name: node.executor_id for node in cluster.status().nodes}
    seen, executors = {}, sc._jsc.sc().statusStore().executorList(False).iterator()
    while executors.hasNext():
        each = executors.next()
        host = str(each.hostPort()).rpartition(":")[0]
        seen[str(each.id())] = (str(each.resourceProfileId()), host)
    print("SEEN", json.dumps({node: seen[executor] for node, executor in at.items()}))


def main() -> None:
    """Run the clusters."""
    conf = pyspark.SparkConf().set("spark.driver.host", "127.0.0.1")
    if sys.argv[1] == "memory":
        for key, value in DYNAMIC.items():
            conf.set(key, value)
    sc = pyspark.SparkContext(conf=conf)
    if sys.argv[1] == "memory":
        run(sc, 3, **OF_ROLES)
        run(sc, 3, **OF_ROLES)
    else:
        run(sc, 5, placement="spread")
        run(sc, 4, placement="pack")
    sc.stop()


if __name__ == "__main__":
    main()
