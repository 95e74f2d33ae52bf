"""The format "tfrecord" on a real HDFS: written by tasks, seen at once, read back."""

from __future__ import annotations

import pytest

import tfos
from feeding.filesystem.registry import filesystem_for

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(480, func_only=True),
    pytest.mark.parametrize("spark", ["local[4]"], indirect=True),
]


def test_dataframes_go_to_hdfs_and_come_back(spark, hdfs):
    from pyspark.sql import SparkSession

    session = SparkSession(spark)
    tfos.register_data_sources(session)
    root = f"{hdfs.url}/clicks"
    rows = [(n, f"user {n}", ["a/b", "%2e", "\u20ac", None][n % 4]) for n in range(40)]
    df = session.createDataFrame(rows, "n bigint, user string, place string").repartition(2)
    options = {"partitionBy": "place", "compression": "gzip"}
    for mode in ("append", "overwrite"):
        df.write.format("tfrecord").mode(mode).options(**options).save(root)
    fs = filesystem_for(root)
    assert {entry.name for entry in fs.entries(root)} == {
        *("_SUCCESS", "place=a%2Fb", "place=%252e", "place=\u20ac"),
        "place=__HIVE_DEFAULT_PARTITION__",
    }
    found = session.read.format("tfrecord").load(root)
    assert {tuple(row) for row in found.collect()} == set(rows)
    assert session.read.format("tfrecord").load(f"{root}/place=a*").count() == 10

    def fail(batches):
        yield from batches
        raise ValueError("at the end")

    broken = df.mapInArrow(fail, df.schema)
    with pytest.raises(Exception, match="at the end"):
        broken.write.format("tfrecord").mode("overwrite").save(root)
    assert session.read.format("tfrecord").load(root).count() == 40
    assert not fs.exists(f"{root}/_temporary")
