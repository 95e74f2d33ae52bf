"""Feed, infer and read rows on Spark with closures above 1 MiB; then look for the secret.

Usage: search_for_secret.py DIRECTORY. Prints a line per file of Spark that holds the cluster's
secret, then "searched N files, M in the event log".
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

from tests.support.spark_masters import await_executors, make_context
from tfos import InputMode, TFCluster
from tfos.spark.task_secrets import PREFIX

LARGE = bytes(2 << 20)


def double(row: int) -> int:
    return 2 * row + len(LARGE) * 0


def main_fun(args: Any, ctx: Any) -> None:
    """Answer rows until the feed ends."""
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        if rows := feed.next_batch(10):
            feed.batch_results(rows)


def holding(root: Path, secrets: list[bytes]) -> tuple[list[Path], int]:
    """Return the files below a directory that hold one of some texts, and how many were read."""
    found, count = [], 0
    for path in root.rglob("*"):
        if path.is_file():
            data, count = path.read_bytes(), count + 1
            if any(secret in data for secret in secrets):
                found.append(path)
    return found, count


def main(root: Path) -> None:
    from pyspark.sql import SparkSession

    for name in ("events", "local"):
        (root / name).mkdir()
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (root / "events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.local.dir": str(root / "local"),
    }
    sc = make_context("local-cluster[2,1,1024]", **conf)
    await_executors(sc, 2)
    cluster = TFCluster.reserve(sc, 2, 1, input_mode=InputMode.SPARK)
    secret = cluster._reserved.credentials.secret
    # What a job carries is base64 of JSON with base64.
    carried = sc.getLocalProperty(PREFIX + cluster.cluster_id).encode()
    forms = [secret, secret.hex().encode(), base64.b64encode(secret), carried]
    with cluster:
        cluster.start(main_fun)
        rows = sc.parallelize(range(100), 4).map(double)
        assert sorted(cluster.inference(rows).map(double).collect()) == [4 * n for n in range(100)]
        frame = SparkSession(sc).range(0, 100, 1, 4)
        answers = cluster.inference(frame, output="twice bigint")
        assert answers.count() == 100
        found, num_files = holding(root, forms)
        assert not any(form in str(sc._conf.getAll()).encode() for form in forms)
    sc.stop()
    logged, num_logs = holding(root / "events", forms)
    for path in {*found, *logged}:
        print(path.relative_to(root))
    print(f"searched {num_files} files, {num_logs} of event logs")


if __name__ == "__main__":
    import cloudpickle
    from pyspark import cloudpickle as sparks

    for library in (cloudpickle, sparks):
        library.register_pickle_by_value(sys.modules[__name__])
    main(Path(sys.argv[1]))
