"""Where Spark 4 finds the format "tfrecord" by itself: in a package `pyspark_*`, `DefaultSource`.

Covers: that name alone; the source is tfos.datasource.
"""

from tfos.datasource.source import TFRecordDataSource as DefaultSource

__all__ = ["DefaultSource"]
