"""TFRecord frame kernels: compiled CRC-32C, and the search for whole records in a block of bytes.

Covers: the bytes around records.
Does not: read files (framing), parse records (example_kernels).
Threads: any; pure, releases the GIL.

    frame    u64 length | u32 masked CRC of the length | data | u32 masked CRC of the data
Little-endian; "masked" is rotated right by 15 bits, plus a constant (tensorflow.org/tutorials/
load_data/tfrecord).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir  # type: ignore[import-untyped]  # llvmlite has no stubs
from numba.core import cgutils, types
from numba.extending import intrinsic

from feeding.columnar.chunk import Array
from feeding.formats.kernel_cache import kernel
from feeding.formats.tfrecord.byte_kernels import word_at

OK, BAD_LENGTH, BAD_DATA, TOO_LONG = range(4)
"""Why a scan ended: no whole record is left, or the fault of the next record."""
FRAME_HEAD, FRAME_FOOT = 12, 4
"""Bytes before a record (length, its CRC) and after it (CRC of the data)."""
_MASK_DELTA = 0xA282EAD8

HAS_CRC_INSTRUCTION = bool(binding.get_host_cpu_features().get("sse4.2", False))


def _crc_tables() -> npt.NDArray[np.uint32]:
    """Return CRC tables uint32[8, 256] for slicing-by-8 (Kounavis and Berry, 2005)."""
    tables = np.zeros((8, 256), np.uint32)
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ np.uint32(0x82F63B78), crc >> 1)
    tables[0] = crc
    for row in range(1, 8):
        before = tables[row - 1]
        tables[row] = tables[0][before & 0xFF] ^ (before >> 8)
    return tables


_TABLES = _crc_tables()


@intrinsic  # type: ignore[untyped-decorator]
def _crc_word(_typing: Any, _crc: Any, _value: Any) -> Any:
    """Add eight bytes to a CRC-32C by the SSE 4.2 instruction."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        integer = ir.IntType(64)
        kind = ir.FunctionType(integer, [integer, integer])
        name = "llvm.x86.sse42.crc32.64.64"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return types.uint64(types.uint64, types.uint64), generate


_inline: Callable[[Any], Any] = numba.njit(nogil=True, inline="never", error_model="numpy")


@_inline
def _stored(buffer: Array, at: int) -> Any:
    return (
        np.uint32(buffer[at])
        | np.uint32(buffer[at + 1]) << np.uint32(8)
        | np.uint32(buffer[at + 2]) << np.uint32(16)
        | np.uint32(buffer[at + 3]) << np.uint32(24)
    )


@_inline
def _crc_by_table(buffer: Array, start: int, stop: int) -> Any:
    crc = np.uint32(0xFFFFFFFF)
    at = start
    while at + 8 <= stop:
        low = crc ^ _stored(buffer, at)
        crc = (
            _TABLES[7, low & np.uint32(0xFF)]
            ^ _TABLES[6, (low >> np.uint32(8)) & np.uint32(0xFF)]
            ^ _TABLES[5, (low >> np.uint32(16)) & np.uint32(0xFF)]
            ^ _TABLES[4, low >> np.uint32(24)]
            ^ _TABLES[3, buffer[at + 4]]
            ^ _TABLES[2, buffer[at + 5]]
            ^ _TABLES[1, buffer[at + 6]]
            ^ _TABLES[0, buffer[at + 7]]
        )
        at += 8
    while at < stop:
        crc = _TABLES[0, (crc ^ buffer[at]) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
        at += 1
    return crc ^ np.uint32(0xFFFFFFFF)


@_inline
def _crc_by_instruction(buffer: Array, start: int, stop: int) -> Any:
    crc = np.uint64(0xFFFFFFFF)
    at = start
    while at + 8 <= stop:
        crc = _crc_word(crc, word_at(buffer, at))
        at += 8
    rest = np.uint32(crc)
    while at < stop:
        rest = _TABLES[0, (rest ^ buffer[at]) & np.uint32(0xFF)] ^ (rest >> np.uint32(8))
        at += 1
    return rest ^ np.uint32(0xFFFFFFFF)


_crc = _crc_by_instruction if HAS_CRC_INSTRUCTION else _crc_by_table


@kernel
def masked_crc(buffer: Array, start: int, stop: int) -> Any:
    """Return the CRC-32C of buffer[start:stop], uint8, as TFRecord stores it: uint32, masked.

    Args:
        buffer: [bytes] uint8.
        start: first byte.
        stop: the byte after the last.
    """
    crc = np.uint32(_crc(buffer, start, stop))
    rotated = (crc >> np.uint32(15)) | (crc << np.uint32(17))
    return np.uint32(rotated + np.uint32(_MASK_DELTA))


@kernel
def scan(
    buffer: Array,
    stop: int,
    max_record_bytes: int,
    starts: Array,
    lengths: Array,
    checks_data: bool,
) -> Any:
    """Find the whole records in buffer[:stop]; a length counts only if its CRC is right.

    Args:
        buffer: uint8, begins with a record.
        stop: end of the filled part.
        max_record_bytes: the scan ends before a larger record.
        starts: int64[m], filled with the offset of each record; the scan ends when it is full.
        lengths: int64[m], filled with the bytes of each record.
        checks_data: whether to check the CRC of a record's data.

    Returns:
        (records found, offset of the next frame, OK or its fault, its length or -1).
    """
    at, count = 0, 0
    while at + FRAME_HEAD <= stop and count < starts.size:
        if masked_crc(buffer, at, at + 8) != _stored(buffer, at + 8):
            return count, at, BAD_LENGTH, 0
        length = word_at(buffer, at)
        if length > np.uint64(max_record_bytes):
            return count, at, TOO_LONG, np.int64(min(length, np.uint64(0x7FFFFFFFFFFFFFFF)))
        start = at + FRAME_HEAD
        if start + FRAME_FOOT > stop or length > np.uint64(stop - start - FRAME_FOOT):
            return count, at, OK, np.int64(length)
        end = start + np.int64(length)
        if checks_data and masked_crc(buffer, start, end) != _stored(buffer, end):
            return count, at, BAD_DATA, np.int64(length)
        starts[count] = start
        lengths[count] = end - start
        count += 1
        at = int(end + FRAME_FOOT)
    return count, at, OK, -1


@kernel
def find_record(buffer: Array, stop: int, max_record_bytes: int) -> Any:
    """Find the first frame in buffer[:stop], by a length whose CRC is right.

    Args:
        buffer: uint8.
        stop: end, excluded.
        max_record_bytes: larger lengths do not count.

    Returns:
        (its offset, its length); (-1, 0) if there is none.
    """
    for at in range(stop - FRAME_HEAD + 1):
        length = word_at(buffer, at)
        if length <= np.uint64(max_record_bytes) and (
            masked_crc(buffer, at, at + 8) == _stored(buffer, at + 8)
        ):
            return at, np.int64(length)
    return -1, 0


@kernel
def seal(buffer: Array, starts: Array, lengths: Array) -> None:
    """Write the frames around records, into the gaps between them.

    Args:
        buffer: uint8, with 12 bytes before and 4 after each record.
        starts: int64[n], offset of each record.
        lengths: int64[n], bytes of each.
    """
    for index in range(starts.size):
        start, length = starts[index], lengths[index]
        for place in range(8):
            buffer[start - FRAME_HEAD + place] = (length >> (8 * place)) & 255
        head = start - FRAME_HEAD
        _store(buffer, start - 4, masked_crc(buffer, head, head + 8))
        _store(buffer, start + length, masked_crc(buffer, start, start + length))


@_inline
def _store(buffer: Array, at: int, value: Any) -> None:
    for place in range(4):
        buffer[at + place] = (value >> np.uint32(8 * place)) & np.uint32(255)
