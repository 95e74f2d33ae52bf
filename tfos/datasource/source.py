"""Data source "tfrecord", as Spark calls it.

Covers: TFRecordDataSource: which reader or writer, and the schema if the user gives none.
Runs in: Python processes on the driver's host.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter
from pyspark.sql.types import StructType

from tfos.datasource.listing import list_files
from tfos.datasource.options import parse_options


class TFRecordDataSource(DataSource):  # type: ignore[misc]  # pyspark is untyped
    """TFRecord files of tf.Example; docs/guides/datasource.md has the options."""

    @classmethod
    def name(cls) -> str:
        """Return the name in `format(…)`."""
        return "tfrecord"

    def schema(self) -> StructType:
        """Return the schema of a sample of the files."""
        from tfos.datasource.inference import infer_schema  # compiles loops

        options = parse_options(self.options)
        return infer_schema(list_files(options), options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of the files below the paths."""
        from tfos.datasource.reader import RecordFilesReader

        return RecordFilesReader(schema, parse_options(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of files below the path.

        Args:
            schema: the DataFrame's schema.
            overwrite: whether old content is replaced.
        """
        from tfos.datasource.writer import RecordFilesWriter

        return RecordFilesWriter(schema, parse_options(self.options), overwrite)
