"""Writer for Spark: Arrow batches as TFRecord files, one or more for each task.

Covers: RecordFilesWriter; grouping of rows by their partition columns; compression.
Does not: encode records (feeding.formats.tfrecord.from_arrow), make files visible
(tfos.datasource.staged_job).
Runs in: `write` on executors, the rest on the driver's host.
Memory: one Arrow batch and its records; open files hold nothing.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from feeding.errors import FeedSettingsError
from feeding.filesystem.registry import filesystem_for
from feeding.reading.partition_paths import directory_name
from tfos.datasource.columns import (
    arrow_schema,
    check_partition_columns,
    check_schema,
    without,
)
from tfos.datasource.listing import complete_path
from tfos.datasource.options import TFRecordOptions
from tfos.datasource.staged_job import TEMPORARY, StagedFile, StagedJob, status_of

if TYPE_CHECKING:
    import pyarrow as pa

    from feeding.columnar.chunk import Array

_MOST_OPEN = 32
"""Most files that one task has open at a time; more directories mean more files, not more open."""
_GZIP_LEVEL = 6
"""Compression level; the default of zlib and of TensorFlow."""


@dataclass(frozen=True, slots=True)
class WrittenFiles(WriterCommitMessage):  # type: ignore[misc]  # pyspark is untyped
    """Files that one task has written."""

    files: tuple[StagedFile, ...]


class RecordFilesWriter(DataSourceArrowWriter):  # type: ignore[misc]  # pyspark is untyped
    """See pyspark's DataSourceArrowWriter.

    Args:
        schema: schema of the DataFrame.
        options: options of the write, with the path.
        overwrite: whether the write replaces the existing content.

    Raises:
        FeedSettingsError: a column that a record cannot hold, or more than one path.
        FileExistsError: the directory has files, and the option ifExists is "error".
        NotADirectoryError: the path is a file.
    """

    def __init__(self, schema: StructType, options: TFRecordOptions, overwrite: bool) -> None:
        if len(options.paths) != 1:
            raise FeedSettingsError(f"a write has one path, got {', '.join(options.paths)}")
        check_partition_columns(schema, options.partition_by)
        self._data = without(schema, options.partition_by)
        check_schema(self._data, options.record_type)
        self._options = options
        root = complete_path(options.paths[0]).rstrip("/")
        status = status_of(root)
        if status is not None and not status.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "it is a file", root)
        if status is not None and not overwrite and options.if_exists == "error":
            _check_empty(root)
        self._job = StagedJob(root, secrets.token_hex(8), overwrite, status is None)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenFiles:
        """Write the rows of one task; return their files."""
        from pyspark import TaskContext

        task = TaskContext.get()
        number = task.partitionId() if task is not None else 0
        suffix = ".tfrecord.gz" if self._options.gzip else ".tfrecord"
        encode = _encoder(arrow_schema(self._data), self._options)
        name = f"part-{number:05d}-{self._job.job_id}.c{{:03d}}{suffix}"
        with contextlib.closing(TaskFiles(self._job.attempt(), name, self._options.gzip)) as files:
            for batch in iterator:
                for directory, rows in by_directory(batch, self._options.partition_by):
                    files.append(directory, encode(rows))
            return WrittenFiles(tuple(files.finish()))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make all files visible."""
        done = [message for message in messages if isinstance(message, WrittenFiles)]
        self._job.commit(file for message in done for file in message.files)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:  # noqa: ARG002 - Spark's signature
        """Remove all files of the write."""
        self._job.abort()


class TaskFiles:
    """Files of one attempt of a task, a few of them open at a time.

    Args:
        directory: directory of the attempt.
        name: name of each file, with a placeholder for its number.
        gzip: whether to compress.
    """

    def __init__(self, directory: str, name: str, gzip: bool) -> None:
        self._directory = directory
        self._name = name
        self._gzip = gzip
        self._open: dict[str, _OpenFile] = {}
        self._finished: list[StagedFile] = []
        self._num_files = 0

    def append(self, directory: str, frames: Array) -> None:
        """Add records to the file that is open for a directory below the root.

        Args:
            directory: directory below the root; "": the root.
            frames: [bytes] uint8, framed records.
        """
        file = self._open.pop(directory, None)
        if file is None:
            if len(self._open) == _MOST_OPEN:
                self._finish(next(iter(self._open)))
            file = self._opened(directory)
        self._open[directory] = file  # the least recently used one is the first
        file.write(frames)

    def finish(self) -> list[StagedFile]:
        """Complete all files and return them."""
        for directory in list(self._open):
            self._finish(directory)
        return self._finished

    def close(self) -> None:
        """Discard unfinished files."""
        for file in self._open.values():
            file.discard()
        self._open.clear()

    def _opened(self, directory: str) -> _OpenFile:
        name = self._name.format(self._num_files)
        self._num_files += 1
        name = f"{directory}/{name}" if directory else name
        return _OpenFile(StagedFile(f"{self._directory}/{name}", name), self._gzip)

    def _finish(self, directory: str) -> None:
        self._finished.append(self._open.pop(directory).finish())


class _OpenFile:
    def __init__(self, place: StagedFile, gzip: bool) -> None:
        self._place = place
        self._stack = contextlib.ExitStack()
        self._file: BinaryIO = self._stack.enter_context(
            filesystem_for(place.staged).create(place.staged)
        )
        self._zip = zlib.compressobj(_GZIP_LEVEL, wbits=31) if gzip else None

    def write(self, frames: Array) -> None:
        self._file.write(frames.data if self._zip is None else self._zip.compress(frames.data))

    def finish(self) -> StagedFile:
        if self._zip is not None:
            self._file.write(self._zip.flush())
        self._stack.close()
        return self._place

    def discard(self) -> None:
        with contextlib.suppress(_Discarded), self._stack:
            raise _Discarded


class _Discarded(Exception):
    pass


def by_directory(
    batch: pa.RecordBatch, partition_by: Sequence[str]
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the rows of a batch grouped by their partition columns, without these columns.

    Args:
        batch: rows of one task.
        partition_by: the partition columns, in the order of directories.

    Raises:
        RowError: a value cannot be a directory name.
    """
    import numpy as np

    if not partition_by:
        yield "", batch
        return
    kept = batch.select([name for name in batch.schema.names if name not in partition_by])
    codes = np.zeros(batch.num_rows, np.int64)
    heads: list[str] = [""]
    for column in partition_by:
        coded = batch.column(column).dictionary_encode(null_encoding="encode")
        values = [directory_name(column, value) for value in coded.dictionary.to_pylist()]
        codes = codes * len(values) + coded.indices.to_numpy()
        present, codes = np.unique(codes, return_inverse=True)
        both = (divmod(code, len(values)) for code in present.tolist())
        heads = [f"{heads[head]}/{values[value]}".lstrip("/") for head, value in both]
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(heads) + 1))
    for number, name in enumerate(heads):
        rows = order[bounds[number] : bounds[number + 1]]
        yield name, kept.take(rows)


def _encoder(schema: pa.Schema, options: TFRecordOptions) -> Callable[[pa.RecordBatch], Array]:
    from feeding.formats.tfrecord.from_arrow import ExampleEncoder, framed

    if options.record_type == "ByteArray":
        return lambda batch: framed(batch.column(0))
    return ExampleEncoder(schema).encode


def _check_empty(root: str) -> None:
    there = [each.name for each in filesystem_for(root).entries(root) if each.name != TEMPORARY]
    if there:
        raise FileExistsError(errno.EEXIST, f"it exists, with {there[0]}", root)
