"""`spark.read.format("tfrecord")`, `df.write.format("tfrecord")`: Spark's side of TFRecord files.

Covers: the registration with a session. The parts: source (Spark's entry point), options, columns
(types), inference, reader, writer, staged_job (atomic visibility).
Does not: frame, decode or encode records, name `key=value` directories (feeding), train.
Runs in: the driver, and Python processes that Spark starts there and on executors.
"""

from __future__ import annotations

from typing import Any

from tfos.errors import UnsupportedError


def register_data_sources(spark: Any) -> None:
    """Register the format "tfrecord" with a SparkSession.

    Not needed if tfos is installed by pip on the driver: Spark 4 finds the package
    `pyspark_tfrecord` itself. It is needed if tfos is only on `sys.path` of the driver's program.

    Args:
        spark: a SparkSession, classic or Connect.

    Raises:
        UnsupportedError: the object is not a SparkSession of Spark 4.
    """
    registration = getattr(spark, "dataSource", None)
    if registration is None:
        raise UnsupportedError(
            f"spark must be a SparkSession of Spark 4 or later, got {type(spark).__qualname__}"
        )
    from tfos.datasource.source import TFRecordDataSource

    session = getattr(spark, "_jsparkSession", None)  # Connect has none
    # Spark warns of a source that replaces one, even itself.
    if not (session and session.sessionState().dataSourceManager().dataSourceExists("tfrecord")):
        registration.register(TFRecordDataSource)
