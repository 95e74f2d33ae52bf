"""Format of an export: the manifest's records, their encoding and every check without files. Pure.

    PATH/model.keras                      the dense model, if there is one
    PATH/tables/NAME/part-00000.parquet   id int64, row fixed_size_list<float>[dim]
    PATH/tables/NAME/gone-00000.parquet   id int64: in a delta, ids that no longer have a row
    PATH/export.json                      `ExportManifest`, written last, names all files

In a store that has no rename of directories, names have a token: part-0a1b2c3d4e5f-00000.parquet.

The files of a table together are sorted by the hash of their ids (ps.sorted_rows.order), each id
once. An id of a table of uint64 ids is stored as the int64 with the same bits.

A *delta* turns the state of its base into its own: changed and new rows, removed ids.

Covers: names, records, encoding.      Does not: read or write files.      Threads: none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np

from ps import codec
from ps.manifest.limits import MAX_NAME_LENGTH, DType
from ps.manifest.table_spec import MAX_DIM, MAX_INT64, MAX_TABLES, TableSpec, largest_id
from rpc.errors import UNREADABLE
from tfos.errors import ExportError

EXPORT_MANIFEST = "export.json"
EXPORT_FORMAT = 1
MAX_MANIFEST_BYTES = 64 << 20
MAX_FILE_BYTES = 1 << 30
"""Largest size of a Parquet file: it is in memory while it is read."""
HASH_OF_STRINGS = f"tf.strings.to_hash_bucket_fast(x, {MAX_INT64})"
"""How strings and bytes become ids."""

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
StateId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-zA-Z-]{1,100}\Z")]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_DIGEST_FIELD = re.compile(rb'^ "digest": "([0-9a-f]{64})"', re.MULTILINE)


class ExportedFile(msgspec.Struct, frozen=True):
    """One file of an export."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}\Z")]
    num_rows: _Count
    nbytes: _Count
    sha256: Sha256


class ExportedTable(msgspec.Struct, frozen=True, kw_only=True):
    """One table of an export."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    directory: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,119}\Z")]
    """Below `tables/`."""
    dim: Annotated[int, msgspec.Meta(ge=1, le=MAX_DIM)]
    dtype: DType
    id_kind: Literal["int64", "uint64"]
    max_id: Annotated[int, msgspec.Meta(ge=0)] | None
    id_source: Literal["any", "integers", "strings"] = "any"
    """What the ids were in training; see TableSpec."""
    unseen: tuple[float, ...]
    """[dim]: the row of an id without one."""
    strings: str = HASH_OF_STRINGS
    num_rows: _Count = 0
    num_removed: _Count = 0
    files: tuple[ExportedFile, ...] = ()
    """Files in the order of the rows."""
    removed: tuple[ExportedFile, ...] = ()
    """Files of a delta, in the order of the ids."""

    @property
    def largest_id(self) -> int:
        """The largest id that the table accepts."""
        return largest_id(self.id_kind, self.max_id)

    @property
    def kind(self) -> str:
        """What must match if rows of one table replace those of another, in words."""
        hashed = "" if self.strings == HASH_OF_STRINGS else f", strings by {self.strings}"
        return f"{self.name!r} ({self.dtype}[{self.dim}], {self.id_kind} ids{hashed})"

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self.dim * np.dtype(self.dtype).itemsize


class ExportManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `export.json`."""

    digest: str = ""
    """SHA-256 of this file with an empty digest."""
    format: int = EXPORT_FORMAT
    state: StateId
    """Identifies the rows with this export. Exports of one checkpoint have the same state."""
    base: StateId | None = None
    """For a delta, the state that it adds to."""
    source: str
    """Origin of the rows, for people."""
    save_id: str = ""
    """Save id of the checkpoint that the rows are from; empty: from running servers."""
    step: int | None = None
    """Step of that checkpoint."""
    tables: tuple[ExportedTable, ...]
    model: ExportedFile | None = None

    def table(self, name: str) -> ExportedTable:
        """Return the table of this name.

        Raises:
            ExportError: there is none.
        """
        for table in self.tables:
            if table.name == name:
                return table
        known = ", ".join(repr(table.name) for table in self.tables) or "none"
        raise ExportError(f"no table {name!r}; the export has {known}")


Record = TypeVar("Record", bound=msgspec.Struct)


def kinds_of(tables: Iterable[ExportedTable]) -> str:
    """Return the kinds of tables: equal if rows of one group can replace those of the other."""
    return ", ".join(sorted(table.kind for table in tables)) or "none"


def exported_table(spec: TableSpec) -> ExportedTable:
    """Return the record of a table of parameter servers, without files.

    Args:
        spec: the table.
    """
    unseen = spec.unseen or (0.0,) * spec.dim
    return ExportedTable(
        name=spec.name,
        directory=_directory_for(spec.name),
        dim=spec.dim,
        dtype=spec.dtype,
        id_kind=spec.id_kind,
        max_id=spec.max_id,
        id_source=spec.id_source,
        unseen=unseen,
    )


def _directory_for(name: str) -> str:
    """Return a directory name that every file system accepts: the table's name if possible."""
    if _SAFE_NAME.fullmatch(name):
        return name
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:60]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def encode_with_digest(record: msgspec.Struct) -> bytes:
    """Return a record as JSON that holds its own digest.

    Args:
        record: the record; its first field `digest` is empty.
    """
    body = msgspec.json.format(msgspec.json.encode(record), indent=1)
    found = hashlib.sha256(body).hexdigest().encode()
    return body.replace(b' "digest": ""', b' "digest": "' + found + b'"', 1)


def decode_with_digest(data: bytes, path: str, kind: type[Record]) -> Record:
    """Check and decode the result of `encode_with_digest`.

    Args:
        data: the file's content.
        path: path of the file, for messages.
        kind: type of the record.

    Raises:
        ExportError: it is damaged, or of another type.
    """
    match = _DIGEST_FIELD.search(data)
    if match is None:
        raise ExportError(f"{path} is not a {kind.__name__}: it has no digest")
    expected = match[1].decode()
    found = hashlib.sha256(data.replace(match[1], b"", 1)).hexdigest()
    if found != expected:
        raise ExportError(f"{path} is damaged: its digest is {found}, but it says {expected}")
    try:
        return codec.json(data, kind)
    except UNREADABLE as error:
        raise ExportError(f"{path} is not a {kind.__name__}: {error}") from error


def decode_export(data: bytes, path: str) -> ExportManifest:
    """Check and decode an export's manifest.

    Args:
        data: the file's content.
        path: path of the file, for messages.

    Raises:
        ExportError: it is damaged, of another format, or has invalid content.
    """
    manifest = decode_with_digest(data, path, ExportManifest)
    if manifest.format != EXPORT_FORMAT:
        raise ExportError(
            f"{path} has format {manifest.format}, but this version reads {EXPORT_FORMAT}. Read it "
            "with the tfos that wrote it, or export again"
        )
    names = [table.name for table in manifest.tables]
    directories = {table.directory for table in manifest.tables}
    if len(names) > MAX_TABLES or len({*names}) < len(names) or len(directories) < len(names):
        raise ExportError(f"{path} names the tables {names[:5]} ({len(names)}), each must be once")
    for table in manifest.tables:
        _check_table(table, path, is_delta=manifest.base is not None)
    return manifest


def _check_table(table: ExportedTable, path: str, *, is_delta: bool) -> None:
    what = f"{path}: table {table.name!r}"
    if len(table.unseen) != table.dim or not np.isfinite(table.unseen).all():
        raise ExportError(
            f"{what} has an unseen vector of {len(table.unseen)} numbers, expected {table.dim} "
            "finite numbers"
        )
    for files, count in ((table.files, table.num_rows), (table.removed, table.num_removed)):
        total = sum(file.num_rows for file in files)
        if total != count:
            raise ExportError(f"{what} says {count} rows, but its files have {total}")
        largest = max((file.nbytes for file in files), default=0)
        if largest > MAX_FILE_BYTES:
            raise ExportError(
                f"{what} has a file of {largest} bytes, more than {MAX_FILE_BYTES}: a file is in "
                "memory while it is read. Export again with this version, which writes smaller "
                "files"
            )
    if table.removed and not is_delta:
        raise ExportError(f"{what} removes ids, but the export names no base")
