"""The headers of a column's pages: their sizes are checked before anything is decompressed.

Covers: check_pages; the little of Thrift's compact protocol that page headers use.
Does not: decode values (pyarrow).      Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from feeding.errors import DataError
from feeding.parquet_footer import Chunk, ParquetLimits

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_DICTIONARY_CODES = (2, 8)
"""PLAIN_DICTIONARY, RLE_DICTIONARY."""
_MAX_DEPTH = 6

Fields = dict[int, "int | Fields"]


def check_pages(data: memoryview, chunk: Chunk, limits: ParquetLimits) -> bool:
    """Walk over a column's pages.

    Args:
        data: the bytes of the column in one row group.
        chunk: what the footer says of it.
        limits: what a page may ask for.

    Returns:
        Whether all values are numbers of entries of a dictionary.

    Raises:
        DataError: a header is damaged, or a page is larger than it may be.
    """
    at, values, whole = 0, 0, 0
    all_coded = True
    while values < chunk.num_values:
        header = _Header(data, at)
        fields = header.struct()
        page = f"the page at byte {chunk.start + at}"
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
        at = header.at + stored
        if at > len(data):
            raise DataError(
                f"{page} is cut short: {stored} bytes, {len(data) - header.at} are left"
            )
        count, is_coded = _values(fields)
        values += count
        all_coded &= is_coded
    if values > chunk.num_values:
        raise DataError(f"its pages hold {values} values, the footer says {chunk.num_values}")
    return all_coded


def _values(fields: Fields) -> tuple[int, bool]:
    """Return how many values a page holds, and whether they are numbers of dictionary entries."""
    kind = fields.get(1)
    inner = fields.get({_DATA: 5, _DATA_V2: 8}.get(kind, 0)) if isinstance(kind, int) else None
    if not isinstance(inner, dict):
        return 0, True
    count, encoding = inner.get(1), inner.get(4 if kind == _DATA_V2 else 2)
    if not isinstance(count, int) or count < 0:
        raise DataError("a page has a damaged header")
    return count, encoding in _DICTIONARY_CODES


@dataclass(slots=True)
class _Header:
    """Thrift structs in compact form, of integers and structs; what else there is, is passed."""

    data: memoryview
    at: int

    def struct(self, depth: int = 0) -> Fields:
        """Read the fields up to the struct's end, by their numbers."""
        fields: Fields = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            value = self._value(head & 15, depth)
            if value is not None:
                fields[number] = value
        return fields

    def _value(self, kind: int, depth: int) -> int | Fields | None:
        if depth == _MAX_DEPTH:
            raise DataError("a page header is nested too deep")
        if kind in (1, 2):  # true, false: nothing follows
            return None
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 12:
            return self.struct(depth + 1)
        if kind == 3:
            self.at += 1
        elif kind == 7:
            self.at += 8
        elif kind == 8:
            length = self._varint()
            self.at += length
        else:
            raise DataError(f"a page header holds a field of unknown kind {kind}")
        return None

    def _signed(self) -> int:
        found = self._varint()
        return (found >> 1) ^ -(found & 1)

    def _varint(self) -> int:
        found = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
        raise DataError("a page header holds a number of more than 64 bits")

    def _byte(self) -> int:
        if self.at >= len(self.data):
            raise DataError("a page header is cut short")
        self.at += 1
        return self.data[self.at - 1]
