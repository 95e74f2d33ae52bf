"""Writer of exports: Parquet files of sorted rows beside the model, then the manifest.

The export is written under a hidden name beside its own and renamed when it is complete. In a
store without directory renames, the files are written in place under new names, then the manifest
that names them; then the previous manifest's files are removed. A reader sees the old export or
the new one; between the two renames of a replaced directory it sees none.

Covers: files and their digests, commit, refusal to replace other content.
Does not: know where rows come from, sort them (ps.sorted_rows).
Memory: one row group; disk of this host: one file, if the target is remote.
Threads: the caller's.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from feeding.errors import FeedError
from feeding.filesystem.interface import FileSystem
from feeding.filesystem.location import LOCAL, Location, parse
from feeding.filesystem.registry import filesystem_for
from feeding.filesystem.temp_files import staging_name
from ps.sorted_rows.order import SortedBatch, batch_rows
from tfos.errors import ExportError, SettingsError
from tfos.files.transfer import file_pieces, replace_directory
from tfos.serving.cache_directory import is_full
from tfos.serving.export_format import (
    EXPORT_MANIFEST,
    ExportedFile,
    ExportedTable,
    ExportManifest,
    encode_with_digest,
)
from tfos.serving.export_reader import ExportFiles

_OWN_NAME = re.compile(rf"{re.escape(EXPORT_MANIFEST)}|tables|model(-[0-9a-f]{{12}})?\.keras")
FILE_BYTES = 128 << 20
"""A file ends with the row group that takes it to this size; a row group is at most one batch."""


class ExportWriter:
    """Writes one export. A context manager: without `commit` nothing is left.

    A full disk within the block, even for rows that wait to be sorted, is an ExportError.

    Args:
        path: a directory or URL; `commit` replaces an export that is there.
        base: for a delta, the state that it adds to. A delta does not replace a whole export.
    """

    def __init__(self, path: str, base: str | None = None) -> None:
        try:
            self._target = parse(path)
            self._fs: FileSystem = filesystem_for(path)
            refuse_other_content(self._fs, self._target)
        except FeedError as error:
            if isinstance(error, OSError):
                raise
            raise SettingsError(f"cannot export to {path}: {error}") from error
        self._base = base
        if base is not None:
            _refuse_whole_export(self._target)
        self._token = "" if self._fs.renames_whole else secrets.token_hex(6)
        """Part of the names of files that are beside those of an earlier export."""
        self._place = self._target
        if self._fs.renames_whole:
            self._place = self._target.sibling(staging_name(self._target.name))
        self._tables: list[ExportedTable] = []
        self._model: ExportedFile | None = None
        self._is_read = False
        """Whether readers may find the manifest, so that its files must stay."""

    def __enter__(self) -> ExportWriter:
        self._fs.mkdirs(str(self._place))
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if not self._is_read:
            with suppress(OSError):
                if self._fs.renames_whole:
                    self._fs.delete(str(self._place), recursive=True)
                else:
                    self._remove_files(lambda name: self._token in name)
        if isinstance(error, OSError) and is_full(error):
            raise _no_room(self._target, error) from error

    def add_table(self, table: ExportedTable, batches: Iterable[SortedBatch]) -> None:
        """Write a table's rows.

        Args:
            table: its record, without files.
            batches: its rows in order, each id once.

        Raises:
            ExportError: a value is NaN or infinite.
            OSError: the file system failed.
        """
        directory = self._place.child(f"tables/{table.directory}")
        stem, count = self._named("part"), batch_rows(table.row_nbytes)
        rows = _FileSequence(self._fs, directory, stem, row_schema(table), count)
        gone = _FileSequence(self._fs, directory, self._named("gone"), GONE_SCHEMA, batch_rows(8))
        with rows, gone:
            for batch in batches:
                kept = batch.only(~batch.removed)
                _refuse_nonfinite(table, kept)
                rows.add([pa.array(kept.ids), _lists(kept.rows, table)])
                gone.add([pa.array(batch.ids[batch.removed])])
        found = msgspec.structs.replace(
            table,
            num_rows=rows.num_rows,
            num_removed=gone.num_rows,
            files=tuple(rows.files),
            removed=tuple(gone.files),
        )
        self._tables.append(found)

    def add_model(self, file: Path) -> None:
        """Put the dense model beside the tables.

        Args:
            file: a `.keras` file on this host.
        """
        name = f"{self._named('model')}.keras"
        with self._fs.create(str(self._place.child(name))) as opened:
            copy = _HashedFile(opened)
            for piece in file_pieces(file):
                copy.write(piece)
        self._model = ExportedFile(name, 0, copy.nbytes, copy.digest.hexdigest())

    def commit(
        self,
        *,
        state: str,
        source: str,
        save_id: str = "",
        step: int | None = None,
    ) -> ExportManifest:
        """Write the manifest and give the export its name.

        Args:
            state: see ExportManifest, as for the others.
            source: origin of the rows, in words.
            save_id: save id of a checkpoint.
            step: step of a checkpoint.

        Raises:
            OSError: the file system failed. What was there before is unchanged; or, in a store
                without renames, the export may be complete, if only the last reply was lost.
        """
        refuse_other_content(self._fs, self._target)  # others may have written meanwhile
        manifest = ExportManifest(
            state=state,
            base=self._base,
            source=source,
            save_id=save_id,
            step=step,
            tables=tuple(self._tables),
            model=self._model,
        )
        before = None if self._fs.renames_whole else _manifest_at(self._target)
        self._is_read = not self._fs.renames_whole  # even if this write fails: it may have arrived
        self._fs.write(str(self._place.child(EXPORT_MANIFEST)), encode_with_digest(manifest))
        if self._fs.renames_whole:
            replace_directory(self._fs, self._place, self._target)
            self._is_read = True
        if before is not None:
            gone = {*_file_names(before)} - {*_file_names(manifest)}
            with suppress(OSError):  # the export is complete
                self._remove_files(gone.__contains__)
        return manifest

    def _named(self, stem: str) -> str:
        return f"{stem}-{self._token}" if self._token else stem

    def _remove_files(self, goes: Callable[[str], bool]) -> None:
        """Remove files of the place by their names below it; others may also write there."""
        directories = [self._place]
        with suppress(FileNotFoundError):
            tables = self._place.child("tables")
            directories += map(tables.child, _names_in(self._fs, tables))
        for directory in directories:
            below = str(directory).removeprefix(str(self._place)).lstrip("/")
            for name in _names_in(self._fs, directory):
                if goes(f"{below}/{name}".lstrip("/")):
                    self._fs.delete(str(directory.child(name)))


def _names_in(fs: FileSystem, directory: Location) -> list[str]:
    return [entry.name for entry in fs.entries(str(directory))]


def _manifest_at(target: Location) -> ExportManifest | None:
    """Return the manifest of the export that is there; None: no readable one is there."""
    try:
        return ExportFiles(str(target)).manifest
    except ExportError:
        return None


def _file_names(manifest: ExportManifest) -> Iterator[str]:
    """Yield the names of an export's files below its place."""
    if manifest.model is not None:
        yield manifest.model.name
    for table in manifest.tables:
        for file in (*table.files, *table.removed):
            yield f"tables/{table.directory}/{file.name}"


def refuse_other_content(fs: FileSystem, target: Location) -> None:
    """Refuse a target with content other than an export, which the export would remove.

    In a store without directory renames, others' files are never removed, and leftovers of a
    process that was killed during an export are no obstacle.

    Args:
        fs: file system of the target.
        target: place of the export.

    Raises:
        SettingsError: it is a file, or a directory with other content.
    """
    try:
        found = {entry.name for entry in fs.entries(str(target))}
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise SettingsError(
            f"{target} is a file, but an export is a directory; name another path"
        ) from None
    other = sorted(name for name in found if not _OWN_NAME.fullmatch(name))
    if fs.renames_whole and EXPORT_MANIFEST not in found:
        other = other or sorted(found)
    if other:
        raise SettingsError(
            f"{target} is a directory with {other[0]!a} in it and no export of only tables. An "
            "export would replace all its content; name a path below it"
        )


def _refuse_whole_export(target: Location) -> None:
    """Refuse a delta that would replace a whole export, which other deltas may need."""
    found = _manifest_at(target)
    if found is not None and found.base is None:
        raise SettingsError(
            f"{target} is a whole export, and a delta would replace it. No delta is usable "
            "without its whole export; name another path for the delta"
        )


def _no_room(target: Location, error: OSError) -> ExportError:
    """Return the error for a full disk: the one that the error names, or the target's."""
    own = str(Path(target.path).parent)  # the target itself exists only if it is replaced
    place = error.filename or (own if target.scheme == LOCAL else tempfile.gettempdir())
    free = ""
    with suppress(OSError):  # it is on another host
        free = f", where {shutil.disk_usage(place).free / 1e6:.1f} MB are free without its files"
    return ExportError(
        f"not exported to {target}: its files have no room in {place}{free} ({error.strerror}). "
        "Make room there, or name another path or staging_dir"
    )


GONE_SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])


def row_schema(table: ExportedTable) -> pa.Schema:
    """Return the columns of a table's files.

    Args:
        table: record of the table.
    """
    element = pa.field("element", pa.from_numpy_dtype(np.dtype(table.dtype)), nullable=False)
    row = pa.field("row", pa.list_(element, table.dim), nullable=False)
    return pa.schema([*GONE_SCHEMA, row])


def _lists(rows: Any, table: ExportedTable) -> pa.FixedSizeListArray:
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, type=row_schema(table).field("row").type)


def _refuse_nonfinite(table: ExportedTable, batch: SortedBatch) -> None:
    is_finite = np.isfinite(batch.rows).all(axis=1)
    if not is_finite.all():
        bad = int(batch.ids[int(np.argmin(is_finite))])
        raise ExportError(
            f"not exported: the row of id {bad} of table {table.name!r} has a value that is NaN "
            "or infinite; restore an earlier checkpoint"
        )


class _HashedFile:
    """Counts and digests what is written to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.nbytes = 0
        self.closed = False
        self._is_abandoned = False

    def write(self, data: Any) -> int:
        piece = memoryview(data)
        self.digest.update(piece)
        self.nbytes += piece.nbytes
        if not self._is_abandoned:
            self._file.write(piece)
        return piece.nbytes

    def abandon(self) -> None:
        """Write no more: the file will not appear."""
        self._is_abandoned = True

    def flush(self) -> None:
        """Do nothing: no data is buffered here."""

    def close(self) -> None:
        """Do nothing: the opener closes the file."""

    def tell(self) -> int:
        return self.nbytes


class _FileSequence:
    """Parquet files of one schema, each of about FILE_BYTES; none if there are no rows."""

    def __init__(
        self, fs: FileSystem, directory: Location, stem: str, schema: pa.Schema, group_rows: int
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._stem = stem
        self._schema = schema
        self._group_rows = group_rows
        self._waiting: list[pa.Table] = []
        self._num_waiting = 0
        self._open: tuple[ExitStack, _HashedFile, pq.ParquetWriter] | None = None
        self._in_file = 0
        self.files: list[ExportedFile] = []
        self.num_rows = 0

    def __enter__(self) -> _FileSequence:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        if kind is not None:
            self._abandon(kind, *details)
            return
        try:
            if self._num_waiting:
                self._write_group(pa.concat_tables(self._waiting))
            self._end_file()
        except BaseException as error:
            self._abandon(type(error), error, error.__traceback__)
            raise

    def add(self, columns: list[pa.Array]) -> None:
        """Add rows, as the schema's columns."""
        table = pa.Table.from_arrays(columns, schema=self._schema)
        self._waiting.append(table)
        self._num_waiting += table.num_rows
        self.num_rows += table.num_rows
        if self._num_waiting < self._group_rows:
            return
        table = pa.concat_tables(self._waiting)
        while table.num_rows >= self._group_rows:
            self._write_group(table.slice(0, self._group_rows))
            table = table.slice(self._group_rows)
        self._waiting, self._num_waiting = [table], table.num_rows

    def _write_group(self, table: pa.Table) -> None:
        if self._open is None:
            self._open = self._begin_file()
        self._open[2].write_table(table, row_group_size=self._group_rows)
        self._in_file += table.num_rows
        if self._open[1].nbytes >= FILE_BYTES:
            self._end_file()

    def _begin_file(self) -> tuple[ExitStack, _HashedFile, pq.ParquetWriter]:
        name = f"{self._stem}-{len(self.files):05d}.parquet"
        stack = ExitStack()
        file = _HashedFile(stack.enter_context(self._fs.create(str(self._directory.child(name)))))
        # Compression and dictionaries do not make weights smaller, only slower.
        writer = pq.ParquetWriter(
            file, self._schema, compression="none", use_dictionary=False, write_statistics=["id"]
        )
        return stack, file, writer

    def _end_file(self) -> None:
        if self._open is None:
            return
        stack, file, writer = self._open
        writer.close()
        self._open = None
        stack.close()
        name = f"{self._stem}-{len(self.files):05d}.parquet"
        self.files.append(ExportedFile(name, self._in_file, file.nbytes, file.digest.hexdigest()))
        self._in_file = 0

    def _abandon(self, *error: Any) -> None:
        """Close the open file so that it does not appear."""
        if self._open is None:
            return
        stack, file, writer = self._open
        self._open = None
        file.abandon()
        writer.close()  # otherwise its finalizer would write to a closed file
        stack.__exit__(*error)
