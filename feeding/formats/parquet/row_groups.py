"""Parquet row groups: fetches, checks and decodes the pages of the requested columns.

Covers: HeldRanges (the file object that pyarrow reads), RowGroupReader (byte ranges to batches),
read-ahead of the next row group.
Does not: know schemas or filters (plan), make numpy arrays (arrow.columns).
Threads: a reader belongs to one; pyarrow decodes columns in parallel on its own threads.
Memory: the needed columns of two row groups as they are stored, one decoded batch.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from feeding.arrow.columns import one_line
from feeding.errors import DataError
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.interface import RangeReader
from feeding.filesystem.local import LocalReader
from feeding.filesystem.registry import DEFAULTS
from feeding.formats.parquet.footer import ColumnChunk, Footer, ParquetLimits
from feeding.formats.parquet.page_headers import PageFacts, check_pages
from feeding.formats.parquet.prefixed_text import decoded_bytes

_GAP_BYTES = 128 << 10
"""Gap between two columns below which one request for both is faster than two."""

_LOOK_ROWS = 1024
"""Decoded at a time until one has a text."""


class HeldRanges(io.RawIOBase):
    """Some ranges of a file in memory, as a seekable file object.

    Args:
        size_bytes: size of the whole file.
        parts: offset and bytes of each range; they do not overlap.
    """

    def __init__(self, size_bytes: int, parts: Sequence[tuple[int, bytes | memoryview]]) -> None:
        super().__init__()
        self._size = size_bytes
        self._parts = sorted((start, memoryview(data)) for start, data in parts)
        self._starts = [start for start, _ in self._parts]
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def size(self) -> int:
        """Return the size of the whole file; pyarrow calls it."""
        return self._size

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position.

        Args:
            offset: bytes, relative to `whence`.
            whence: see `io.IOBase.seek`.
        """
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> memoryview:
        """Return the next bytes.

        Raises:
            DataError: they belong to no requested column.
        """
        stop = self._size if size < 0 else min(self._at + size, self._size)
        data = self.range(self._at, stop)
        self._at = stop
        return data

    def range(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to before `stop`."""
        index = bisect.bisect_right(self._starts, start) - 1
        if index >= 0:
            begin, data = self._parts[index]
            if stop <= begin + len(data):
                return data[start - begin : stop - begin]
        raise DataError(f"a page at bytes {start} to {stop}, outside of the requested columns")


class RowGroupReader:
    """Decodes row groups of one open file while the next one is fetched.

    Args:
        file: the file; closed by the caller.
        footer: its footer.
        paths: names of the columns to decode.
        limits: bound row groups and pages.
    """

    def __init__(
        self, file: RangeReader, footer: Footer, paths: Sequence[str], limits: ParquetLimits
    ) -> None:
        self._file = file
        self._footer = footer
        self._paths = list(paths)
        self._leaves = footer.leaves(self._paths)
        self._limits = limits

    def fetch(self, group: int) -> Fetched:
        """Start to fetch a row group.

        Raises:
            DataError: its columns have impossible ranges, or exceed the limits.
        """
        chunks = self._footer.chunks(group, self._leaves, self._limits)
        return Fetched(self._file, group, chunks)

    def batches(self, fetched: Fetched, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a row group.

        Args:
            fetched: the row group.
            batch_rows: rows per batch.

        Raises:
            DataError: it is damaged; names the file and the row group.
            OSError: it cannot be read.
        """
        footer = self._footer
        with fetched.parts() as parts:
            held = HeldRanges(footer.size_bytes, [*parts, (footer.start, footer.tail)])
            yield from self._decoded(held, fetched, batch_rows)

    def _decoded(
        self, held: HeldRanges, fetched: Fetched, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        footer = self._footer
        try:
            encoded, most_rows = self._text_columns(held, fetched)
            rows = min(batch_rows, most_rows)
            for batch in self._iterated(held, fetched.group, rows, self._paths, encoded):
                if encoded:
                    for name, array in zip(batch.schema.names, batch.columns, strict=True):
                        _check_codes(name, array)
                yield batch
        except (pa.ArrowException, OSError, ValueError, MemoryError, DataError) as error:
            where = f"{footer.path}: row group {fetched.group}"
            raise DataError(f"{where}: {one_line(error)}") from None

    def _iterated(
        self, held: HeldRanges, group: int, rows: int, paths: list[str], encoded: list[str]
    ) -> Iterator[pa.RecordBatch]:
        reader = pq.ParquetFile(
            pa.PythonFile(held, mode="r"),
            metadata=self._footer.metadata,
            pre_buffer=False,
            read_dictionary=encoded,
            coerce_int96_timestamp_unit="us",
            page_checksum_verification=True,
        )
        found: Iterator[pa.RecordBatch] = reader.iter_batches(
            rows, row_groups=[group], columns=paths
        )
        return found

    def _text_columns(self, held: HeldRanges, fetched: Fetched) -> tuple[list[str], int]:
        """Check all pages; return the text columns to keep encoded, and the most rows of a batch.

        Columns of dictionary codes alone stay encoded: a few long entries may expand to more text
        than memory holds. Text with prefixes, or with codes in some of its pages only, may do so
        too: the longest texts of such columns bound the rows.
        """
        encoded, longest_bytes = [], 0
        for leaf, chunk in zip(self._leaves, fetched.chunks, strict=True):
            column = self._footer.metadata.schema.column(leaf)
            data = held.range(chunk.start, chunk.stop)
            pages = check_pages(data, chunk, self._limits)
            if column.physical_type != "BYTE_ARRAY":
                continue
            if pages.all_coded and not column.max_repetition_level:
                encoded.append(column.path)
                continue
            entry_bytes = pages.dictionary_bytes
            if pages.begins_coded and not pages.prefixed_bytes:
                entry_bytes = self._longest_entry(held, fetched.group, column.path, entry_bytes)
            if column.max_repetition_level:  # a row may hold all of them
                self._check_list(column.path, chunk.num_values, entry_bytes)
                self._check_prefixed(fetched.group, leaf, data, pages)
            longest_bytes += max(entry_bytes, pages.prefixed_bytes)
        # Half of the limit: pyarrow doubles the memory that text grows in.
        return encoded, max(1, self._limits.max_row_group_bytes // (2 * max(1, longest_bytes)))

    def _check_list(self, path: str, num_values: int, entry_bytes: int) -> None:
        if num_values * entry_bytes > self._limits.max_row_group_bytes:
            raise DataError(
                f"column {path!r}: {num_values} codes of texts of up to {entry_bytes} bytes in "
                f"lists, max_row_group_bytes is {self._limits.max_row_group_bytes}; write smaller "
                "row groups or raise the limit"
            )

    def _check_prefixed(self, group: int, leaf: int, data: memoryview, pages: PageFacts) -> None:
        if not pages.prefixed:
            return
        column = self._footer.metadata.schema.column(leaf)
        codec = self._footer.metadata.row_group(group).column(leaf).compression
        levels = (column.max_repetition_level, column.max_definition_level)
        found = 0
        for page in pages.prefixed:
            stored = data[page.start : page.stop]
            found += decoded_bytes(stored, page, codec, sum(map(bool, levels)))
            if found > self._limits.max_row_group_bytes:
                raise DataError(
                    f"column {column.path!r}: texts of {found} bytes or more in lists, by their "
                    f"prefixes; max_row_group_bytes is {self._limits.max_row_group_bytes}; write "
                    "smaller row groups or raise the limit"
                )

    def _longest_entry(self, held: HeldRanges, group: int, path: str, at_most: int) -> int:
        """Return the bytes of the longest text in a column's dictionary, or what it is at most."""
        asked = next((each for each in self._paths if f"{path}.".startswith(f"{each}.")), path)
        for batch in self._iterated(held, group, _LOOK_ROWS, [asked], [path]):
            array = batch.column(0)
            while pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
                array = array.values
            if array.type.id != pa.lib.Type_DICTIONARY:
                return at_most
            if len(array.dictionary):  # it comes with the first text
                return int(pc.max(pc.binary_length(array.dictionary)).as_py() or 0)
        return 0


def _check_codes(name: str, array: pa.Array) -> None:
    """Refuse a code that has no entry: pyarrow takes it over from the file as it is."""
    if array.type.id == pa.lib.Type_DICTIONARY:
        entries = len(array.dictionary)
        codes = pc.min_max(array.indices)
        for code in (codes["min"].as_py(), codes["max"].as_py()):
            if code is not None and not 0 <= code < entries:
                raise DataError(
                    f"column {name!r}: a dictionary index is {code}, the dictionary has {entries} "
                    "entries; the file is damaged"
                )
    elif array.type.id == pa.lib.Type_STRUCT:
        for place in range(array.type.num_fields):
            _check_codes(f"{name}.{array.type.field(place).name}", array.field(place))


class Fetched:
    """The stored columns of one row group, fetched in the background.

    A thread fetches ranges of remote files; it ends when it has all of them or when this object is
    freed. A local file is read on use: the kernel reads ahead.

    Args:
        file: the file; closed by the caller.
        group: index of the row group.
        chunks: byte ranges of its columns.
    """

    def __init__(self, file: RangeReader, group: int, chunks: Sequence[ColumnChunk]) -> None:
        self.group = group
        self.chunks = chunks
        self._file = file
        self._spans = joined_spans(chunks)
        self._is_dropped = threading.Event()
        self._ahead: Future[list[tuple[int, bytearray]]] = Future()
        if not isinstance(file, LocalReader):
            work = (file, self._spans, DEFAULTS, self._ahead, self._is_dropped)
            threading.Thread(target=_fetch, args=work, name="row-group", daemon=True).start()

    def __del__(self) -> None:
        self._is_dropped.set()

    @contextlib.contextmanager
    def parts(self) -> Iterator[list[tuple[int, memoryview]]]:
        """Return offset and bytes of each range; the bytes are valid inside the `with` block.

        Raises:
            OSError: a range cannot be read.
        """
        if not isinstance(self._file, LocalReader):
            yield [(at, memoryview(data)) for at, data in self._ahead.result()]
            return
        sizes = [stop - at for at, stop in self._spans]
        with _scratch.borrowed(sum(sizes)) as buffer:
            parts, used = [], 0
            for (at, _), size in zip(self._spans, sizes, strict=True):
                part = buffer[used : used + size]
                parts.append((at, part[: _filled(self._file, at, part)]))
                used += size
            yield parts


def _filled(file: LocalReader, at: int, part: memoryview) -> int:
    filled = 0
    while filled < len(part) and (count := file.read_into(at + filled, part[filled:])):
        filled += count
    return filled


class _Scratch:
    """One buffer that row groups of local files reuse: to allocate it costs more than to read.

    pyarrow copies what it decodes, so nothing refers to the buffer afterwards.
    """

    def __init__(self) -> None:
        self._free: bytearray | None = None

    @contextlib.contextmanager
    def borrowed(self, num_bytes: int) -> Iterator[memoryview]:
        """Return the buffer for the `with` block, or a new one if it is in use."""
        buffer, self._free = self._free, None
        if buffer is None or len(buffer) < num_bytes:
            buffer = bytearray(num_bytes)
        try:
            yield memoryview(buffer)[:num_bytes]
        finally:
            self._free = buffer


_scratch = _Scratch()


def _fetch(
    file: RangeReader,
    spans: Sequence[tuple[int, int]],
    config: FileSystemConfig,
    result: Future[list[tuple[int, bytearray]]],
    is_dropped: threading.Event,
) -> None:
    try:
        parts = []
        for start, stop in spans:
            data = bytearray(stop - start)  # joined pieces would be in memory twice
            coming: collections.deque[tuple[int, Callable[[], bytes]]] = collections.deque()
            for at in range(start, stop, config.range_bytes):
                length = min(config.range_bytes, stop - at)
                coming.append((at - start, file.start_range(at, length)))
                if len(coming) == config.ranges_in_flight:
                    _place(data, *coming.popleft())
                if is_dropped.is_set():
                    return
            for each in coming:
                _place(data, *each)
            parts.append((start, data))
        result.set_result(parts)
    except BaseException as error:  # noqa: BLE001 - `parts` raises it
        result.set_exception(error)


def _place(data: bytearray, at: int, take: Callable[[], bytes]) -> None:
    piece = take()
    data[at : at + len(piece)] = piece


def joined_spans(chunks: Sequence[ColumnChunk]) -> list[tuple[int, int]]:
    """Return (start, stop) ranges that hold all chunks of columns; near ones are joined."""
    spans: list[tuple[int, int]] = []
    for start, stop in sorted((chunk.start, chunk.stop) for chunk in chunks):
        if spans and start - spans[-1][1] <= _GAP_BYTES:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return spans
