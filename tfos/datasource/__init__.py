"""`spark.read.format("tfrecord")`, `df.write.format("tfrecord")`: Spark's side of TFRecord files.

Covers: telling a session about it. The parts: source (what Spark calls), options, columns (types),
inference, partition_paths (`key=value` directories), reader, writer, staged_job (what becomes
visible when).
Does not: frame, decode or encode records (feeding), train.
Runs in: the driver, and Python processes that Spark starts there and on executors.
"""

from __future__ import annotations

from typing import Any

from tfos.errors import UnsupportedError


def register_data_sources(spark: Any) -> None:
    """Let a SparkSession know the format "tfrecord".

    Not needed where tfos is installed by pip on the driver: Spark 4 finds the package
    `pyspark_tfrecord` by itself. It is where tfos is only on `sys.path` of the driver's program.

    Args:
        spark: a SparkSession, classic or Connect.

    Raises:
        UnsupportedError: it is no SparkSession of Spark 4.
    """
    registration = getattr(spark, "dataSource", None)
    if registration is None:
        raise UnsupportedError(
            f"spark must be a SparkSession of Spark 4 or later, got {type(spark).__qualname__}"
        )
    from tfos.datasource.source import TFRecordDataSource

    registration.register(TFRecordDataSource)
