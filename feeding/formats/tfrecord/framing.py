"""TFRecord files: reader of framed records in blocks, and writer.

Covers: RecordReader (plain and gzip, CRCs, limits, policy for damaged records), RecordWriter.
Does not: open files (filesystem), parse records (example), assign them to workers (reading.splits).
Threads: a reader or writer belongs to one thread; most of its time is without the GIL.
"""

from __future__ import annotations

import dataclasses
import gzip as gzip_format
import io
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from feeding.columnar.chunk import Array
from feeding.config import MIB, check_count
from feeding.errors import DataError
from feeding.formats.tfrecord import frame_kernels
from feeding.reading.bad_records import BadData
from feeding.reading.discover import is_gzip
from feeding.reading.gzip_bound import beyond_ratio
from rpc.field_texts import with_field_texts

_KEPT_BYTES = 4 * MIB
"""A larger buffer is given up with its block: many readers wait for their turns, each with one."""


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLimits:
    """Bounds of what a file makes its reader allocate."""

    max_record_bytes: int = 256 * MIB
    """Larger records are refused before memory is taken for them."""
    max_gzip_ratio: int = 250
    """Most bytes per compressed byte of a gzip file, over the whole file. Ordinary data has below
    20; deflate allows 1032."""
    block_bytes: int = MIB // 2
    """Bytes read and decoded at a time, at least 12, the head of a record. A block that fits the
    CPU's cache is fastest."""

    def __post_init__(self) -> None:
        check_count("max_record_bytes", self.max_record_bytes)
        check_count("max_gzip_ratio", self.max_gzip_ratio)
        check_count("block_bytes", self.block_bytes, frame_kernels.FRAME_HEAD)


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Consecutive records of one file; the arrays are valid until the next block is read."""

    buffer: Array
    """uint8, holds the records."""
    starts: Array
    """int64[n], offset of each record in the buffer."""
    lengths: Array
    """int64[n], bytes of each record."""
    first_record: int
    """Number of the first record in its file, from 0."""
    first_byte: int
    """Offset of the buffer in the file, after decompression."""

    def __len__(self) -> int:
        return len(self.starts)

    def records(self) -> Iterator[bytes]:
        """Yield each record as bytes of its own."""
        view = self.buffer.data
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            yield view[start : start + length].tobytes()

    def part(self, start: int, stop: int) -> RecordBlock:
        """Return records `start` to `stop`, `stop` excluded, counted within the block."""
        chosen = slice(start, stop)
        first_record = self.first_record + start
        return dataclasses.replace(
            self,
            starts=self.starts[chosen],
            lengths=self.lengths[chosen],
            first_record=first_record,
        )


class RecordReader:
    """The records of one file, or those that begin in one range of its bytes.

    A range's first record begins at the first length whose CRC is right. So readers of adjacent
    ranges return every record once, unless records hold whole TFRecord files themselves. The reader
    finds the next record after damaged bytes in the same way.

    A compressed file is known by its first bytes: a range from 0 on reads it to its end, and no
    other range can be read.

    Args:
        file: the file's bytes from `span[0]` on; the caller closes it.
        name: for messages.
        span: first byte of the range, and its end, excluded; None: the file's end.
        limits: bound records and compression.
        bad: policy for damaged records.
    """

    def __init__(
        self,
        file: BinaryIO | io.RawIOBase,
        name: str,
        *,
        span: tuple[int, int | None] = (0, None),
        limits: RecordLimits | None = None,
        bad: BadData | None = None,
    ) -> None:
        self._name = name
        self._stop = sys.maxsize if span[1] is None else span[1]
        self._limits = limits or RecordLimits()
        self._bad = bad or BadData()
        self._file = _Source(file)
        self._is_gzip = False
        self._buffer = np.empty(self._limits.block_bytes, np.uint8)
        self._filled = 0
        self._file_at = span[0]
        """Offset of the buffer in the (decompressed) file."""
        self._is_lost = span[0] > 0
        """Whether the reader has to search for the next record."""
        self.num_records = 0
        """Records found so far, damaged ones included."""
        self._is_over = False
        self._damage = ""
        """Why the rest of the file cannot be read."""

    def blocks(self) -> Iterator[RecordBlock]:
        """Yield the records, some at a time.

        Raises:
            DataError: a record is damaged and the policy is to fail; names file, record and byte.
            OSError: the file cannot be read.
        """
        return self._blocks(checks_data=True)

    def count(self) -> int:
        """Return the number of records, without checking the CRC of their data.

        Raises:
            DataError: a length is damaged or the file is truncated, and the policy is to fail.
            OSError: the file cannot be read.
        """
        for _ in self._blocks(checks_data=False):
            pass
        return self.num_records

    def _blocks(self, *, checks_data: bool) -> Iterator[RecordBlock]:
        source = self._open()
        starts = np.empty(self._limits.block_bytes // 16 + 1, np.int64)
        lengths = np.empty_like(starts)
        while not self._is_over and self._file_at < self._stop:
            at_end = self._fill(source)
            if self._is_lost:
                self._search(at_end)
                continue
            limit = self._limits.max_record_bytes
            count, at, fault, length = frame_kernels.scan(
                self._buffer, self._filled, limit, starts, lengths, checks_data
            )
            if self._file_at + at >= self._stop:
                count, at = self._own(starts[:count], at)
                fault = frame_kernels.OK
            if count:
                is_large = len(self._buffer) > _KEPT_BYTES
                yield self._block(starts[:count], lengths[:count], at if is_large else None)
                self.num_records += count
                at = 0 if is_large else at
            at = self._after_fault(at, fault, length)
            self._keep_from(at)
            is_whole = fault == frame_kernels.OK and count < len(starts)
            if is_whole and self._file_at < self._stop:
                self._await_whole(length, at_end)
        if not (self._is_over or self._is_lost):
            self._check_next(source)

    def _block(self, starts: Array, lengths: Array, taken: int | None) -> RecordBlock:
        """Return records as a block; of `taken` bytes, it takes the buffer over."""
        block = RecordBlock(self._buffer, starts, lengths, self.num_records, self._file_at)
        if taken is not None:
            left = self._buffer[taken : self._filled]
            self._buffer = np.empty(max(len(left), self._limits.block_bytes), np.uint8)
            self._buffer[: len(left)] = left
            self._filled = len(left)
            self._file_at += taken
        return block

    def _own(self, starts: Array, at: int) -> tuple[int, int]:
        """Return how many records begin in the range, and the offset of the next frame."""
        bound = self._stop - self._file_at + frame_kernels.FRAME_HEAD
        count = int(np.searchsorted(starts, bound))
        return count, int(starts[count]) - frame_kernels.FRAME_HEAD if count < len(starts) else at

    def _check_next(self, source: BinaryIO) -> None:
        """Report the record after the range if the reader of the next range cannot find it."""
        at_end = self._filled < frame_kernels.FRAME_HEAD and self._fill(source)
        if self._filled < frame_kernels.FRAME_HEAD:
            self._await_whole(-1, at_end)
            return
        one = np.empty(1, np.int64)
        limit = self._limits.max_record_bytes
        _, at, fault, length = frame_kernels.scan(self._buffer, self._filled, limit, one, one, True)
        if fault != frame_kernels.BAD_DATA:
            self._after_fault(at, fault, length)

    def _search(self, at_end: bool) -> None:
        """Search for the next record."""
        limit = self._limits.max_record_bytes
        at, _ = frame_kernels.find_record(self._buffer, self._filled, limit)
        self._is_lost = at < 0
        if at >= 0:
            self._keep_from(at)
            return
        self._keep_from(max(0, self._filled - frame_kernels.FRAME_HEAD + 1))
        self._is_over = at_end

    def _open(self) -> BinaryIO:
        if self._file_at or not is_compressed(self._file.peek(frame_kernels.FRAME_HEAD)):
            return self._file  # type: ignore[return-value]  # it reads into buffers
        self._is_gzip, self._stop = True, sys.maxsize
        return gzip_format.GzipFile(fileobj=self._file)  # type: ignore[return-value]  # so does it

    def _fill(self, source: BinaryIO) -> bool:
        """Fill the buffer from the file; returns whether the file has ended."""
        view = self._buffer.data
        while self._filled < len(view):
            try:
                count = source.readinto(view[self._filled :])  # type: ignore[attr-defined]
            except (zlib.error, EOFError, gzip_format.BadGzipFile) as error:
                self._damage = f"the compressed data is damaged: {error}"
                return True
            if not count:
                return True
            self._filled += count
            if self._is_gzip and self._is_bomb():
                return True
        return False

    def _is_bomb(self) -> bool:
        num_made, num_stored = self._file_at + self._filled, self._file.num_read
        text = beyond_ratio(num_made, num_stored, self._limits.max_gzip_ratio)
        self._damage = text or self._damage
        return bool(text)

    def _after_fault(self, at: int, fault: int, length: int) -> int:
        """Report a damaged record; returns the offset of the next frame."""
        if fault == frame_kernels.OK:
            return at
        if fault == frame_kernels.BAD_DATA:
            self._skip(at, f"its CRC does not match its {length} bytes")
            self.num_records += 1
            return at + frame_kernels.FRAME_HEAD + length + frame_kernels.FRAME_FOOT
        if fault == frame_kernels.TOO_LONG:
            limit = self._limits.max_record_bytes
            wider = f"a source with limits=RecordLimits(max_record_bytes={length}) takes it"
            self._lose(at, f"it has {length} bytes, max_record_bytes is {limit}; {wider}")
        else:
            self._lose(at, "the CRC of its length is wrong; is this a TFRecord file?")
        return at + 1

    def _await_whole(self, length: int, at_end: bool) -> None:
        """Grow the buffer for a large record, or report that the file ends inside it."""
        if at_end:
            self._is_over = True
            needed = frame_kernels.FRAME_HEAD if length < 0 else _frame_bytes(length)
            cut = f"it is truncated: it needs {needed} bytes, {self._filled} are left"
            if self._damage or self._filled:
                self._skip(0, self._damage or cut)
        elif length >= 0 and _frame_bytes(length) > len(self._buffer):
            grown = np.empty(_frame_bytes(length), np.uint8)
            grown[: self._filled] = self._buffer[: self._filled]
            self._buffer = grown

    def _keep_from(self, at: int) -> None:
        left = self._filled - at
        if at and left:
            self._buffer[:left] = self._buffer[at : self._filled].copy()
        self._filled = left
        self._file_at += at

    def _lose(self, at: int, reason: str) -> None:
        """Report a record whose end is not known."""
        self._skip(at, reason)
        self.num_records += 1
        self._is_lost = True

    def _skip(self, at: int, reason: str) -> None:
        byte = self._file_at + at
        error = DataError(f"{self._name}: record {self.num_records} at byte {byte}: {reason}")
        self._bad.skip(self._name, byte, error)


class RecordWriter:
    """Writes records to a file.

    Args:
        file: gets the bytes; the caller closes it.
        gzip: whether to compress.
    """

    def __init__(self, file: BinaryIO, *, gzip: bool = False) -> None:
        self._zipped = gzip_format.GzipFile(fileobj=file, mode="wb", mtime=0) if gzip else None
        self._file: BinaryIO = self._zipped or file  # type: ignore[assignment]
        self.num_records = 0
        """Records written so far."""

    def write(self, record: bytes) -> None:
        """Append one record."""
        head = len(record).to_bytes(8, "little")
        self._file.write(b"".join((head, _crc_of(head), record, _crc_of(record))))
        self.num_records += 1

    def close(self) -> None:
        """Flush the compression; the file itself stays open."""
        if self._zipped is not None:
            self._zipped.close()


class _Source(io.RawIOBase):
    """A file with `peek`, which counts the bytes read."""

    def __init__(self, file: BinaryIO | io.RawIOBase) -> None:
        self._file = file
        self._peeked = b""
        self.num_read = 0

    def peek(self, count: int) -> bytes:
        while len(self._peeked) < count and (more := self._file.read(count - len(self._peeked))):
            self._peeked += more
        return self._peeked

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._peeked:
            count = min(len(buffer), len(self._peeked))
            buffer[:count] = self._peeked[:count]
            self._peeked = self._peeked[count:]
        else:
            count = self._file.readinto(buffer)  # type: ignore[union-attr]  # all that are opened for reading have it
        self.num_read += count
        return count


def is_compressed(head: bytes) -> bool:
    """Return whether a file is gzip, by its first 12 bytes; a record's length may look like it."""
    begins_record = len(head) == frame_kernels.FRAME_HEAD and _crc_of(head[:8]) == head[8:]
    return is_gzip(head) and not begins_record


def _crc_of(data: bytes) -> bytes:
    array = np.frombuffer(data, np.uint8)
    return int(frame_kernels.masked_crc(array, 0, len(array))).to_bytes(4, "little")


def _frame_bytes(length: int) -> int:
    return frame_kernels.FRAME_HEAD + length + frame_kernels.FRAME_FOOT
