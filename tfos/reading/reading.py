"""Direct reading: `ctx.read`, the files of each format.

Covers: the arguments that describe files; making their source.
Does not: read (feeding), choose the form of the rows (tfos.reading.file_rows), feed from Spark
(ctx.dataset).
Runs in: the worker's process.      Threads: main_fun's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tfos.reading.file_rows import FileRows

if TYPE_CHECKING:
    from feeding.filesystem.interface import Path
    from feeding.formats.parquet.footer import ParquetLimits
    from feeding.formats.text.lines import LineLimits
    from feeding.formats.tfrecord.example import Feature
    from feeding.formats.tfrecord.framing import RecordLimits
    from feeding.reading.partitions import KeyedSource
    from tfos.reading.protocols import DatasetContext


class Reading:
    """Reader of `ctx.read`; every worker gets its own share of the files.

        rows = ctx.read.parquet("hdfs:///flights", ["distance", "delay"]).shuffled(seed=1)
        model.fit(rows.dataset(1024, feature_cols="distance", label_cols="delay"), epochs=3)

    Args:
        ctx: rank of this worker, and the base of relative paths.
    """

    def __init__(self, ctx: DatasetContext) -> None:
        self._ctx = ctx

    def tfrecord(
        self,
        paths: Path | Iterable[Path],
        columns: Mapping[str, Feature] | None = None,
        *,
        partitions: bool = True,
        on_bad_data: Literal["fail", "skip"] = "fail",
        max_skipped: int = 100,
        limits: RecordLimits | None = None,
    ) -> FileRows:
        """Return the rows of TFRecord files of tf.Example, plain or gzip.

        Args:
            paths: files, directories and patterns, local, hdfs:// and all schemes of fsspec;
                relative ones resolve like `ctx.absolute_path`. Names that begin with `_` or `.` are
                skipped unless a path names them.
            columns: `Feature` of each column by name, keys of directories (`day=2026-01-31`)
                included. None: inferred from the first records, and all keys of directories.
            partitions: whether keys of directories are columns; False: all columns are the files'.
            on_bad_data: "fail": the first damaged record raises DataError. "skip": it is logged,
                counted and left out.
            max_skipped: with "skip": one more than this raises; each counts once, not every epoch.
            limits: largest sizes that a file may declare; None: the defaults.

        Raises:
            FileNotFoundError: a path has no file.
            SettingsError: no path, or a setting that cannot work.
            DataError: the columns must be inferred, and no record has any.
        """
        from feeding.formats.tfrecord.source import TFRecordSource
        from feeding.reading.bad_records import BadData

        bad = BadData(on_bad_data, max_skipped)
        source = TFRecordSource(
            self._absolute(paths), columns, bad=bad, limits=limits, partitions=partitions
        )
        return self._rows(source)

    def parquet(  # noqa: PLR0913 - what a user may say about files, all but two by keyword
        self,
        paths: Path | Iterable[Path],
        columns: Sequence[str] | None = None,
        *,
        filters: Any = None,
        nulls: Mapping[str, Any] | None = None,
        shapes: Mapping[str, tuple[int, ...] | None] | None = None,
        partitions: bool = True,
        on_bad_data: Literal["fail", "skip"] = "fail",
        max_skipped: int = 100,
        limits: ParquetLimits | None = None,
    ) -> FileRows:
        """Return the rows of Parquet files; only the selected columns are read.

        The footers of all files are read and compared here.

        Args:
            paths: as for `tfrecord`.
            columns: names (`parent.child` for fields of structs) and keys of directories
                (`day=2026-01-31`). None: all that the files store, and all keys of directories.
            filters: conditions [("column", ">", 3), …] that must all hold; a list of such lists,
                one of which must hold; or a pyarrow.compute expression. Row groups that cannot
                match are not read.
            nulls: value that replaces nulls, by column; other columns must not contain any.
            shapes: shapes of list columns, by name; None for any number of values. Other shapes are
                inferred from the files.
            partitions: whether keys of directories are columns; False: all columns are the files'.
            on_bad_data: "fail": the first damaged file or row group raises DataError. "skip": the
                rest of it is logged, counted and left out.
            max_skipped: with "skip": one more than this raises; each counts once, not every epoch.
            limits: largest sizes that a file may declare; None: the defaults.

        Raises:
            FileNotFoundError: a path has no file.
            SettingsError: no path, or a setting that cannot work.
            DataError: a file is damaged or has other columns than the first, or one is missing.
            MissingPackage: pyarrow is too old.
        """
        from feeding.formats.parquet.plan import ParquetRequest
        from feeding.formats.parquet.source import ParquetSource
        from feeding.reading.bad_records import BadData

        request = ParquetRequest(
            columns=columns,
            filters=filters,
            nulls=nulls or {},
            shapes=shapes or {},
            partitions=partitions,
        )
        bad = BadData(on_bad_data, max_skipped)
        source = ParquetSource(self._absolute(paths), request, bad=bad, limits=limits)
        return FileRows(source, self._ctx)

    def csv(  # noqa: PLR0913 - what a user may say about files, all but two by keyword
        self,
        paths: Path | Iterable[Path],
        columns: Sequence[str] | Mapping[str, str] | None = None,
        *,
        header: bool | Sequence[str] = True,
        delimiter: str = ",",
        quoted_newlines: bool = False,
        escape: str | None = None,
        nulls: Mapping[str, Any] | None = None,
        partitions: bool = True,
        on_bad_data: Literal["fail", "skip"] = "fail",
        max_skipped: int = 100,
        limits: LineLimits | None = None,
    ) -> FileRows:
        """Return the rows of CSV files, UTF-8, plain or gzip.

        Args:
            paths: as for `tfrecord`.
            columns: names, or names with dtypes ("int64", "float32", "bool", "str", "bytes", …);
                None: all. Keys of directories (`day=2026-01-31`) are names, too. Other dtypes
                are inferred, those of the files from the first lines of the first one.
            header: whether the first line of each file has the names; or the names, for files
                without such a line; False: _c0, _c1, …
            delimiter: one character between values.
            quoted_newlines: whether quoted values may contain line ends; if so, each file goes
                whole to one worker.
            escape: character before a quote within a quoted value, a backslash in files that Spark
                wrote; None: such a quote is doubled.
            nulls: value that replaces empty values, by column; other number columns refuse an empty
                value.
            partitions: whether keys of directories are columns; False: all columns are the files'.
            on_bad_data: "fail": the first bad line raises DataError. "skip": it is logged, counted
                and left out.
            max_skipped: with "skip": one more than this raises; each counts once, not every epoch.
            limits: largest sizes that a file may declare; None: the defaults.

        Raises:
            FileNotFoundError: a path has no file.
            SettingsError: no path, or a setting that cannot work.
            DataError: the first file has no such column.
        """
        from feeding.formats.csv.options import CsvRequest
        from feeding.formats.csv.source import CsvSource
        from feeding.reading.bad_records import BadData

        request = CsvRequest(
            columns=columns,
            header=header,
            delimiter=delimiter,
            quoted_newlines=quoted_newlines,
            escape=escape,
            nulls=nulls or {},
        )
        bad = BadData(on_bad_data, max_skipped)
        source = CsvSource(
            self._absolute(paths), request, bad=bad, limits=limits, partitions=partitions
        )
        return self._rows(source)

    def text(
        self,
        paths: Path | Iterable[Path],
        *,
        partitions: bool = True,
        on_bad_data: Literal["fail", "skip"] = "fail",
        max_skipped: int = 100,
        limits: LineLimits | None = None,
    ) -> FileRows:
        """Return the lines of text files, UTF-8, plain or gzip, as the column `value`.

        Args:
            paths: as for `tfrecord`.
            partitions: whether keys of directories (`day=2026-01-31`) are columns, too.
            on_bad_data: "fail": the first line that is not UTF-8 raises DataError. "skip": it is
                logged, counted and left out.
            max_skipped: with "skip": one more than this raises; each counts once, not every epoch.
            limits: largest sizes that a file may declare; None: the defaults.

        Raises:
            FileNotFoundError: a path has no file.
            SettingsError: no path, or a setting that cannot work.
        """
        from feeding.formats.text.source import TextSource
        from feeding.reading.bad_records import BadData

        bad = BadData(on_bad_data, max_skipped)
        source = TextSource(self._absolute(paths), bad=bad, limits=limits, partitions=partitions)
        return self._rows(source)

    def _absolute(self, paths: Path | Iterable[Path]) -> list[str]:
        from feeding.reading.discover import path_list

        return [self._ctx.absolute_path(path) for path in path_list(paths)]

    def _rows(self, source: KeyedSource) -> FileRows:
        from feeding.reading.partitions import partitioned

        return FileRows(partitioned(source), self._ctx)
