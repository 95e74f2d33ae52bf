"""Index files: sorted ids, raw rows and a directory per table, built once and mapped by readers.

    CACHE/index-KEY/0.ids       int64[n], sorted by hash (ps.sorted_rows.order)
    CACHE/index-KEY/0.rows      [n, dim] of the table's dtype
    CACHE/index-KEY/0.removed   bool[n]: ids without a row, whose rows are the unseen vector
    CACHE/index-KEY/0.starts    uint32[2^k + 1]: the directory
    CACHE/index-KEY/index.json  `IndexManifest`, written last
    CACHE/index-KEY/checked.json  which files were compared with their digests
    (tfos.serving.check_record)

The numbers are in the host's byte order: an index belongs to its host. It is built under a
hidden name and renamed. KEY is a digest of its sources; readers find the index by KEY, and it
never changes. All processes that map it share its pages.

Covers: building, opening, digests.
Does not: look up (tfos.serving.row_index), know exports (tfos.serving.export_reader), choose which
indexes stay (tfos.serving.cache_use).
Threads: any.
"""

from __future__ import annotations

import hashlib
import mmap
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ps.sorted_rows.order import (
    MAX_SORTED_ROWS,
    Directory,
    SortedBatch,
    batch_rows,
    directory_bits,
    hashed,
)
from tfos.console.console import Console
from tfos.console.progress_lines import ProgressLines
from tfos.errors import ExportError, SettingsError
from tfos.serving import cache_directory, cache_use
from tfos.serving.cache_use import INDEX_MANIFEST
from tfos.serving.check_record import CheckRecord
from tfos.serving.export_format import (
    ExportedTable,
    Sha256,
    StateId,
    decode_with_digest,
    encode_with_digest,
)

Array = np.ndarray[Any, Any]

INDEX_FORMAT = 1
_DIGEST_BYTES = 8 << 20
_COLUMNS = ("ids", "rows", "removed", "starts")


class IndexedTable(msgspec.Struct, frozen=True):
    """One table of an index."""

    table: ExportedTable
    """Without files."""
    num_rows: int
    """Number of entries, removed ids included."""
    num_removed: int
    bits: int
    """Bits of a hash that select a bucket."""
    digests: tuple[Sha256, ...]
    """SHA-256 of ids, rows, removed and starts."""


class IndexManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `index.json`."""

    digest: str = ""
    """SHA-256 of this file with an empty digest."""
    format: int = INDEX_FORMAT
    byte_order: str = sys.byteorder
    key: str
    state: StateId
    """State of the export's rows with this index."""
    tables: tuple[IndexedTable, ...]


class MappedTable:
    """One table of an index, mapped and read-only.

    Args:
        directory: directory of the index.
        number: number of the table in it.
        record: its entry in the manifest.

    Raises:
        ExportError: a file's size differs from the manifest's.
    """

    def __init__(self, directory: Path, number: int, record: IndexedTable) -> None:
        table, count = record.table, record.num_rows
        self.table = table
        self.num_rows = count
        self.num_removed = record.num_removed
        self.paths = tuple(directory / f"{number}.{column}" for column in _COLUMNS)
        ids, rows, removed, starts = self.paths
        self.ids = _mapped(ids, "int64", (count,))
        self.rows = _mapped(rows, table.dtype, (count, table.dim))
        self.removed = _mapped(removed, "bool", (count,))
        self.starts = _mapped(starts, "uint32", ((1 << record.bits) + 1,))

    @property
    def nbytes(self) -> int:
        """Number of mapped bytes."""
        return sum(each.nbytes for each in (self.ids, self.rows, self.removed, self.starts))

    def batches(self) -> Iterator[SortedBatch]:
        """Yield all entries in order."""
        whole = SortedBatch(self.ids, self.rows, self.removed)
        count = batch_rows(self.table.row_nbytes)
        for start in range(0, self.num_rows, count):
            yield whole.part(start, min(start + count, self.num_rows))


class MappedIndex:
    """An index that exists.

    Args:
        directory: directory of the index.
        key: digest of its sources.

    Raises:
        ExportError: its manifest or the size of a file is damaged, or it is another index.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self.directory = directory
        path = directory / INDEX_MANIFEST
        self.release = cache_use.hold(self, path)
        """Ends the mark that it is in use, before this object is collected."""
        self.manifest = decode_with_digest(path.read_bytes(), str(path), IndexManifest)
        found = (self.manifest.format, self.manifest.byte_order, self.manifest.key)
        expected = (INDEX_FORMAT, sys.byteorder, key)
        if found != expected:
            raise ExportError(f"{path} is another index: got {found}, expected {expected}")
        self.tables: Mapping[str, MappedTable] = {
            record.table.name: MappedTable(directory, number, record)
            for number, record in enumerate(self.manifest.tables)
        }

    def is_checked(self) -> bool:
        """Return whether a process of this host has compared the digests since it was started."""
        try:
            record = self._check_record()
        except FileNotFoundError:  # another process found damage and builds it again
            return False
        return record is not None and record.is_at(self.directory)

    def check(self) -> None:
        """Read all files, compare digests, and record that they match.

        Raises:
            ExportError: a file is damaged.
        """
        found = self._check_record()  # files written to meanwhile are not recorded
        for record in self.manifest.tables:
            _verify(self.tables[record.table.name], record)
        if found is not None:
            found.write(self.directory)

    def _check_record(self) -> CheckRecord | None:
        paths = [path for table in self.tables.values() for path in table.paths]
        opened_ns = (self.directory / INDEX_MANIFEST).stat().st_ctime_ns  # by `hold`
        return CheckRecord.of(self.manifest.digest, paths, opened_ns)

    @property
    def state(self) -> str:
        """The state of the rows with this index."""
        return self.manifest.state

    @property
    def key(self) -> str:
        """Digest of its sources."""
        return self.manifest.key

    @property
    def nbytes(self) -> int:
        """Number of mapped bytes."""
        return sum(table.nbytes for table in self.tables.values())


class TableSource(msgspec.Struct, frozen=True):
    """The source of one table of an index."""

    table: ExportedTable
    num_rows: int
    """Largest number of entries."""
    batches: Callable[[], Iterator[SortedBatch]]


def index_key(*parts: str) -> str:
    """Return the key of an index that is built from the named parts."""
    return hashlib.sha256("\n".join((str(INDEX_FORMAT), *parts)).encode()).hexdigest()[:32]


class IndexCache:
    """The indexes in one directory of this host.

    Args:
        directory: directory of the cache; see cache_directory.
        console: shows the place, size and progress of an index.
        verify: compare the digests of an existing index, unless a process of this host did.
    """

    def __init__(self, directory: Path, console: Console, *, verify: bool) -> None:
        self.directory = directory
        self._console = console
        self._verify = verify

    def index(self, key: str, state: str, sources: list[TableSource]) -> MappedIndex:
        """Return the index of a key; build it if it is missing or damaged.

        Args:
            key: a key from `index_key`.
            state: state of the rows.
            sources: one source per table.

        Raises:
            ExportError: an export is damaged, the disk is full, or another process does not finish
                building.
            OSError: a file system failed.
        """
        target = self.directory / f"index-{key}"
        found = self._checked(target, key)
        if found is not None:
            return found
        try:
            built = self._built(target, key, state, sources)
        except OSError as error:
            if not cache_directory.is_full(error):
                raise
            nbytes = _expected_nbytes(sources)
            raise cache_directory.no_room(self.directory, nbytes) from error
        cache_use.remove_unused(self.directory)
        return built

    def remove(self, index: MappedIndex) -> None:
        """Remove an index's files unless another object has it open; existing mappings stay valid.

        Args:
            index: an index that its owner will not open again.
        """
        index.release()
        cache_use.remove_if_unused(index.directory / INDEX_MANIFEST)

    def _built(self, target: Path, key: str, state: str, sources: list[TableSource]) -> MappedIndex:
        """Build an index; try again if unused indexes filled a quota."""
        try:
            return self._build_once(target, key, state, sources)
        except OSError as error:
            # The free space of the disk does not show a quota.
            is_full = cache_directory.is_full(error)
            if not is_full or not cache_use.make_room(self.directory, lambda: False):
                raise
        return self._build_once(target, key, state, sources)

    def _build_once(
        self, target: Path, key: str, state: str, sources: list[TableSource]
    ) -> MappedIndex:
        """Build an index, or wait for the process that builds it."""
        cache_directory.cache_directory(self.directory)  # a cleaner may have removed it
        cache_use.remove_leftovers(self.directory)  # before room is checked
        with self._alone(target):
            found = self._existing(target, key)  # built by the previous holder of the lock
            if found is not None:
                return found
            return self._build(target, key, state, sources)

    def _alone(self, target: Path) -> AbstractContextManager[None]:
        wait = f"another process builds or checks the index {target}; waiting for it"
        return cache_directory.only_builder(
            self.directory, target.name, lambda: self._console.line(wait)
        )

    def _checked(self, target: Path, key: str) -> MappedIndex | None:
        """Return an existing intact index; of several processes, the first one reads all of it."""
        try:
            found = MappedIndex(target, key)
            if not self._verify or found.is_checked():
                return found
        except FileNotFoundError:
            return None
        except ExportError:
            pass  # told under the lock
        try:
            with self._alone(target):
                return self._existing(target, key)
        except SettingsError:  # a cache that this process may only read
            return self._existing(target, key)
        finally:
            cache_use.remove_leftovers(self.directory)  # the lock

    def _existing(self, target: Path, key: str) -> MappedIndex | None:
        """Return an intact index; a damaged one is told and removed."""
        try:
            found = MappedIndex(target, key)
            if self._verify and not found.is_checked():
                found.check()
            return found
        except FileNotFoundError:
            return None
        except ExportError as error:
            self._console.warn(f"the index is built again: {error}")
            with suppress(OSError):  # this process may not remove it
                _remove(target)
            return None

    def _build(self, target: Path, key: str, state: str, sources: list[TableSource]) -> MappedIndex:
        nbytes = _expected_nbytes(sources)
        has_room = partial(cache_directory.has_room, self.directory, nbytes)
        cache_use.make_room(self.directory, has_room)
        if not has_room():
            raise cache_directory.no_room(self.directory, nbytes)
        num_rows = sum(source.num_rows for source in sources)
        self._console.line(f"index of {num_rows:,} rows, {nbytes / 1e6:,.1f} MB, in {target}")
        lines = ProgressLines(self._console)
        staged = Path(
            tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".building", dir=self.directory)
        )
        try:
            records: list[IndexedTable] = []
            for number, source in enumerate(sources):
                with _TableBuilder(staged, number, source) as builder:
                    for done in builder.write():
                        lines.show(f"index of {source.table.name!r}: {done:,} rows")
                records.append(builder.record())
            manifest = IndexManifest(key=key, state=state, tables=tuple(records))
            (staged / INDEX_MANIFEST).write_bytes(encode_with_digest(manifest))
            # Before it has its name: from then on, other processes may remove unused indexes.
            release = cache_use.hold(self, staged / INDEX_MANIFEST)
            try:
                _put(staged, target)
                return MappedIndex(target, key)
            finally:
                release()
        finally:
            self._console.end_progress()
            shutil.rmtree(staged, ignore_errors=True)


def _put(staged: Path, target: Path) -> None:
    """Give an index its name; an incomplete one there is removed."""
    with suppress(FileNotFoundError):
        _remove(target)
    staged.rename(target)


def _remove(target: Path) -> None:
    """Remove an index that nobody may open again; existing mappings stay valid."""
    shutil.rmtree(cache_use.move_aside(target), ignore_errors=True)


class _TableBuilder:
    """Writes the files of one table of an index."""

    def __init__(self, directory: Path, number: int, source: TableSource) -> None:
        if source.num_rows > MAX_SORTED_ROWS:
            raise ExportError(
                f"table {source.table.name!r} has {source.num_rows} rows, but an index holds at "
                f"most {MAX_SORTED_ROWS}; divide the table"
            )
        self._source = source
        self._opened = ExitStack()  # closes each file, even if the disk is full for one of them
        self._files = [
            self._opened.enter_context((directory / f"{number}.{column}").open("xb"))
            for column in _COLUMNS
        ]
        self._digests = [hashlib.sha256() for _ in _COLUMNS]
        self._directory = Directory(source.num_rows)
        self._num_rows = 0
        self._num_removed = 0

    def __enter__(self) -> _TableBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def write(self) -> Iterator[int]:
        """Write all rows; yields the number written."""
        table = self._source.table
        unseen = np.array(table.unseen, table.dtype)
        for batch in self._source.batches():
            rows = np.where(batch.removed[:, None], unseen, batch.rows)
            self._directory.add(hashed(batch.ids))
            self._num_rows += batch.ids.size
            self._num_removed += int(np.count_nonzero(batch.removed))
            self._write(ids=batch.ids, rows=rows, removed=batch.removed)
            yield self._num_rows
        self._write(starts=self._directory.starts())

    def record(self) -> IndexedTable:
        """Return the manifest's entry of the table."""
        bare = msgspec.structs.replace(
            self._source.table, files=(), removed=(), num_rows=0, num_removed=0
        )
        digests = tuple(digest.hexdigest() for digest in self._digests)
        bits = self._directory.bits
        return IndexedTable(bare, self._num_rows, self._num_removed, bits, digests)

    def _write(self, **columns: Array) -> None:
        for name, array in columns.items():
            at = _COLUMNS.index(name)
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            self._files[at].write(data)
            self._digests[at].update(data)


def _expected_nbytes(sources: list[TableSource]) -> int:
    return sum(
        source.num_rows * (9 + source.table.row_nbytes)
        + 4 * ((1 << directory_bits(source.num_rows)) + 1)
        for source in sources
    )


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> Array:
    """Map a file of this size; an empty one needs no mapping."""
    expected = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    with path.open("rb") as file:
        found = file.seek(0, 2)
        if found != expected:
            raise ExportError(f"{path} has {found} bytes, but the index says {expected}")
        if not expected:
            return np.empty(shape, dtype)
        mapped = mmap.mmap(file.fileno(), expected, mmap.MAP_SHARED, mmap.PROT_READ)
    return np.frombuffer(mapped, dtype).reshape(shape)


def _verify(table: MappedTable, record: IndexedTable) -> None:
    arrays = (table.ids, table.rows, table.removed, table.starts)
    for path, array, expected in zip(table.paths, arrays, record.digests, strict=True):
        digest = hashlib.sha256()
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, _DIGEST_BYTES):
            digest.update(flat[start : start + _DIGEST_BYTES].data)
        if digest.hexdigest() != expected:
            raise ExportError(
                f"{path} is damaged: its SHA-256 is {digest.hexdigest()}, but the index says "
                f"{expected}"
            )
