"""Parquet page headers: checks the sizes of a column's pages before anything is decompressed.

Covers: check_pages; the part of Thrift's compact protocol that page headers use.
Does not: decode values (pyarrow does).
Threads: any; pure.
Source: parquet.thrift PageHeader; Thrift compact protocol specification.
"""

from __future__ import annotations

from feeding.errors import DataError
from feeding.formats.parquet.footer import ColumnChunk, ParquetLimits

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_DICTIONARY_CODES = (2, 8)
"""PLAIN_DICTIONARY, RLE_DICTIONARY."""
_MAX_DEPTH = 6
_FEW_BYTES = 512
"""Most headers are shorter; statistics of long text make longer ones."""
_INTEGERS = (5, 6, 4)
_STRUCT, _BINARY = 12, 8
_SIZES = {1: 0, 2: 0, 3: 1, 7: 8}
"""Bytes of skipped fields by kind: booleans (1 and 2, the value is the kind), bytes, doubles."""

Fields = dict[int, "int | Fields"]


def check_pages(data: memoryview, chunk: ColumnChunk, limits: ParquetLimits) -> bool:
    """Check the headers of a column's pages.

    Args:
        data: the bytes of the column in one row group.
        chunk: the footer's entry for it.
        limits: bound the size of a page.

    Returns:
        Whether all values are dictionary codes.

    Raises:
        DataError: a header is damaged, or a page exceeds the limits.
    """
    at, values, whole = 0, 0, 0
    all_coded = True
    while values < chunk.num_values:
        page = f"the page at byte {chunk.start + at}"
        fields, behind = _header(data, at, page)
        size, stored = fields.get(2), fields.get(3)
        if not isinstance(size, int) or not isinstance(stored, int) or min(size, stored) < 0:
            raise DataError(f"{page} has a damaged header")
        whole += size
        if size > limits.max_page_bytes:
            raise DataError(
                f"{page} has {size} bytes before compression, max_page_bytes is "
                f"{limits.max_page_bytes}"
            )
        if whole > limits.max_row_group_bytes:
            raise DataError(f"{page}: the column has {whole} bytes, more than max_row_group_bytes")
        at = behind + stored
        if at > len(data):
            raise DataError(f"{page} is truncated: {stored} bytes, {len(data) - behind} are left")
        count, is_coded = _values(fields)
        values += count
        all_coded &= is_coded
    if values > chunk.num_values:
        raise DataError(f"its pages hold {values} values, the footer says {chunk.num_values}")
    return all_coded


def _header(data: memoryview, at: int, page: str) -> tuple[Fields, int]:
    """Return the fields of the header at `at`, and the offset of the page's bytes."""
    for most_bytes in (_FEW_BYTES, len(data)):
        try:
            fields, size = _struct(bytes(data[at : at + most_bytes]), 0)
        except IndexError:
            continue
        return fields, at + size
    raise DataError(f"{page} has a truncated header")


def _values(fields: Fields) -> tuple[int, bool]:
    """Return the number of values of a page, and whether they are dictionary codes."""
    kind = fields.get(1)
    inner = fields.get({_DATA: 5, _DATA_V2: 8}.get(kind, 0)) if isinstance(kind, int) else None
    if not isinstance(inner, dict):
        return 0, True
    count, encoding = inner.get(1), inner.get(4 if kind == _DATA_V2 else 2)
    if not isinstance(count, int) or count < 0:
        raise DataError("a page has a damaged header")
    return count, encoding in _DICTIONARY_CODES


def _struct(data: bytes, at: int, depth: int = 0) -> tuple[Fields, int]:
    """Read a Thrift struct in compact form: its integer and struct fields, by number.

    Returns:
        The fields, and the offset of the struct's end.

    Raises:
        DataError: a field is illegal.
        IndexError: the struct is truncated.
    """
    fields: Fields = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = _signed(data, at)
        if kind in _INTEGERS:
            fields[number], at = _signed(data, at)
        elif kind == _STRUCT:
            if depth == _MAX_DEPTH:
                raise DataError("a page header is nested too deep")
            fields[number], at = _struct(data, at, depth + 1)
        elif kind == _BINARY:
            length, at = _varint(data, at)
            at += length
        elif kind in _SIZES:
            at += _SIZES[kind]
        else:
            raise DataError(f"a page header holds a field of unknown kind {kind}")
    return fields, at + 1


def _signed(data: bytes, at: int) -> tuple[int, int]:
    found, at = _varint(data, at)
    return (found >> 1) ^ -(found & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 128:
        return byte, at + 1
    found = byte & 127
    for shift in range(7, 70, 7):
        at += 1
        byte = data[at]
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at + 1
    raise DataError("a page header holds a number of more than 64 bits")
