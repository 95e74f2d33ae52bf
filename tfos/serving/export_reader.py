"""Reader of exports: the manifest, and rows in their order, with every file's digest checked.

Covers: local directories and URLs, refusal of damaged and foreign files by name.
Does not: build an index (tfos.serving.index_files).      Memory: one file.
Threads: the caller's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from feeding.errors import FeedError
from feeding.filesystem.location import parse
from feeding.filesystem.registry import filesystem_for
from ps.sorted_rows.merge import merged
from ps.sorted_rows.order import SortedBatch, batch_rows, first_out_of_order, hashed
from tfos.errors import ExportError, SettingsError
from tfos.serving.export_format import (
    EXPORT_MANIFEST,
    MAX_MANIFEST_BYTES,
    ExportedFile,
    ExportedTable,
    ExportManifest,
    decode_export,
)

Array = np.ndarray[Any, Any]


class ExportFiles:
    """An export that exists.

    Args:
        path: a directory or URL.

    Raises:
        SettingsError: the path is refused.
        ExportError: there is no complete export, or its manifest is damaged.
        OSError: the file system failed.
    """

    def __init__(self, path: str) -> None:
        try:
            self._location = parse(path)
            self._fs = filesystem_for(path)
        except FeedError as error:
            raise SettingsError(f"cannot read an export at {path!a}: {error}") from error
        self.path = str(self._location)
        data = self._read_manifest()
        self.manifest: ExportManifest = decode_export(data, f"{self.path}/{EXPORT_MANIFEST}")

    def rows(self, table: ExportedTable) -> Iterator[SortedBatch]:
        """Yield a table's rows, and a delta's removed ids, in their order.

        Args:
            table: record from the manifest.

        Raises:
            ExportError: a file is missing, damaged, or not what the manifest says.
        """
        rows = self._in_order(table, table.files)
        if not table.removed:
            return rows
        gone = self._in_order(table, table.removed)
        return merged(gone, rows, keeps_removed=True)

    def fetch_model(self, target: Path) -> None:
        """Copy the dense model to a file on this host.

        Args:
            target: a path that does not exist yet.

        Raises:
            ExportError: the export has none, or it is damaged.
        """
        model = self.manifest.model
        if model is None:
            raise ExportError(
                f"{self.path} has no model.keras, only tables. Use `lookup`, or export "
                "the model with ctx.export(model, path, tables='beside')"
            )
        target.write_bytes(self._checked(model.name, model))

    def _read_manifest(self) -> bytes:
        name = f"{self.path}/{EXPORT_MANIFEST}"
        try:
            with self._fs.open(str(self._location.child(EXPORT_MANIFEST))) as file:
                if file.size_bytes > MAX_MANIFEST_BYTES:
                    raise ExportError(
                        f"{name} has {file.size_bytes} bytes, more than the limit of "
                        f"{MAX_MANIFEST_BYTES}"
                    )
                return file.read_range(0, file.size_bytes)
        except (FileNotFoundError, NotADirectoryError):
            raise ExportError(
                f"{self.path} has no complete export: {EXPORT_MANIFEST}, which is written last, is "
                "missing. Name the directory that ctx.export or export_tables returned. While an "
                "export is replaced, it is missing for a moment: call again. A process that was "
                "killed in that moment has left both exports beside it, as "
                f".{self._location.name}.<12 digits>.tmp: rename one"
            ) from None

    def _in_order(
        self, table: ExportedTable, files: tuple[ExportedFile, ...]
    ) -> Iterator[SortedBatch]:
        last = -1
        for file in files:
            name = f"tables/{table.directory}/{file.name}"
            data = self._checked(name, file)
            count = 0
            for batch in _decoded(data, table, f"{self.path}/{name}"):
                hashes = hashed(batch.ids)
                if (at := first_out_of_order(hashes, last)) >= 0:
                    raise ExportError(
                        f"{self.path}/{name}: id {batch.ids[at]} in row {count + at} is not in the "
                        "order of the ids' hashes; export again with this version"
                    )
                last = int(hashes[-1])
                count += batch.ids.size
                yield batch
            if count != file.num_rows:
                raise ExportError(
                    f"{self.path}/{name} has {count} rows, but the manifest says {file.num_rows}"
                )

    def _checked(self, name: str, file: ExportedFile) -> bytes:
        """Read a whole file and compare size and digest."""
        path = f"{self.path}/{name}"
        try:
            with self._fs.open(str(self._location.child(name))) as opened:
                size = opened.size_bytes
                data = opened.read_range(0, size) if size == file.nbytes else b""
        except FileNotFoundError:
            self._refuse_changed()
            raise ExportError(f"{path} is missing, but the manifest names it") from None
        if size != file.nbytes:
            self._refuse_changed()
            raise ExportError(f"{path} has {size} bytes, but the manifest says {file.nbytes}")
        found = hashlib.sha256(data).hexdigest()
        if found != file.sha256:
            self._refuse_changed()
            raise ExportError(
                f"{path} is damaged: its SHA-256 is {found}, but the manifest says {file.sha256}"
            )
        return data

    def _refuse_changed(self) -> None:
        """Raise if the export has been replaced or removed since its manifest was read."""
        try:
            if ExportFiles(self.path).manifest.digest == self.manifest.digest:
                return
            found = "another export is there"
        except ExportError as error:
            found = str(error)
        raise ExportError(
            f"{self.path} has changed since its {EXPORT_MANIFEST} was read: {found}. Call again "
            "with an export that does not change (for a served model: refresh() with it)"
        ) from None


def _decoded(data: bytes, table: ExportedTable, path: str) -> Iterator[SortedBatch]:
    """Yield the rows of one Parquet file, whose digest was correct."""
    try:
        parquet = pq.ParquetFile(pa.BufferReader(data))
        names = parquet.schema_arrow.names
        if names not in (["id"], ["id", "row"]):
            raise ExportError(f"{path} has the columns {names}, expected id and row")
        for batch in parquet.iter_batches(batch_rows(table.row_nbytes), use_threads=False):
            if batch.num_rows:
                yield _as_sorted(batch, table, path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} cannot be read as Parquet: {error}") from error


def _as_sorted(batch: pa.RecordBatch, table: ExportedTable, path: str) -> SortedBatch:
    ids, count = batch.column(0), batch.num_rows
    if ids.type != pa.int64() or ids.null_count:
        raise ExportError(f"{path}: column id is {ids.type} with {ids.null_count} nulls, not int64")
    if batch.num_columns == 1:
        rows = np.zeros((count, table.dim), table.dtype)
        return SortedBatch(ids.to_numpy(), rows, np.ones(count, np.bool_))
    lists = batch.column(1)
    element = pa.from_numpy_dtype(np.dtype(table.dtype))
    is_list = pa.types.is_fixed_size_list(lists.type)
    if not (is_list and lists.type.list_size == table.dim and lists.type.value_type == element):
        raise ExportError(f"{path}: column row is {lists.type}, expected {table.dim} x {element}")
    flat = lists.flatten()
    if flat.null_count or len(flat) != count * table.dim:
        raise ExportError(f"{path}: column row has nulls")
    rows = flat.to_numpy().reshape(count, table.dim)
    return SortedBatch(ids.to_numpy(), rows, np.zeros(count, np.bool_))


def read_rows(path: str, table: str) -> ExportRows:
    """Return the rows of a table of an export, in batches; each loop over them reads the files.

    Args:
        path: a directory or URL with an export that is not a delta.
        table: name of the table.

    Returns:
        Batches of (ids, rows): int64[n] (uint64[n] for a table of uint64 ids) and [n, dim] of the
        table's dtype. They can be read again, as `ctx.load_rows` does if a server restarts.
        A loop raises ExportError if there is no such export or table, or it is a delta or
        damaged.
    """
    return ExportRows(path, table)


@dataclass(frozen=True)
class ExportRows:
    """The result of `read_rows`."""

    path: str
    table: str

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        files = ExportFiles(self.path)
        if files.manifest.base is not None:
            raise ExportError(
                f"{self.path} is a delta of the state {files.manifest.base}; read a whole export"
            )
        found = files.manifest.table(self.table)
        kind = np.uint64 if found.id_kind == "uint64" else np.int64
        for batch in files.rows(found):
            yield batch.ids.view(kind), batch.rows
