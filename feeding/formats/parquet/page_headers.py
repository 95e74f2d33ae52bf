"""Parquet page headers: checks the sizes of a column's pages before anything is decompressed.

Covers: check_pages.
Does not: decode values (pyarrow does).
Threads: any; pure.
Source: parquet.thrift PageHeader.
"""

from __future__ import annotations

from typing import NamedTuple

from feeding.errors import DataError
from feeding.formats.parquet.footer import ColumnChunk, ParquetLimits
from feeding.formats.parquet.prefixed_text import PrefixedPage
from feeding.formats.parquet.thrift import Fields, struct

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_DICTIONARY_CODES = (2, 8)
"""PLAIN_DICTIONARY, RLE_DICTIONARY."""
_PREFIXED = 7
"""DELTA_BYTE_ARRAY: a value repeats the beginning of the one before."""
_FEW_BYTES = 512
"""Most headers are shorter; statistics of long text make longer ones."""


class PageFacts(NamedTuple):
    """What the headers of a column's pages say about its values.

    Args:
        all_coded: whether all values are dictionary codes.
        begins_coded: whether the first ones are.
        dictionary_bytes: size of the dictionary before compression.
        prefixed: its pages with prefixes.
    """

    all_coded: bool
    begins_coded: bool
    dictionary_bytes: int
    prefixed: tuple[PrefixedPage, ...]

    @property
    def prefixed_bytes(self) -> int:
        """Size of the largest page with prefixes; no text in it is longer."""
        return max((page.size_bytes for page in self.prefixed), default=0)


def check_pages(data: memoryview, chunk: ColumnChunk, limits: ParquetLimits) -> PageFacts:
    """Check the headers of a column's pages.

    Args:
        data: the bytes of the column in one row group.
        chunk: the footer's entry for it.
        limits: bound the size of a page.

    Returns:
        How text may expand when it is decoded.

    Raises:
        DataError: a header is damaged, or a page exceeds the limits.
    """
    at, values, whole, dictionary = 0, 0, 0, 0
    all_coded, begins_coded = True, False
    prefixed: list[PrefixedPage] = []
    while values < chunk.num_values:
        page = f"the page at byte {chunk.start + at}"
        fields, behind = _header(data, at, page)
        size, stored = _sizes(fields, page, limits)
        whole += size
        if whole > limits.max_row_group_bytes:
            raise DataError(f"{page}: the column has {whole} bytes, more than max_row_group_bytes")
        at = behind + stored
        if at > len(data):
            raise DataError(f"{page} is truncated: {stored} bytes, {len(data) - behind} are left")
        count, encoding = _values(fields)
        if encoding is None:
            dictionary = max(dictionary, size)
        elif encoding not in _DICTIONARY_CODES:
            all_coded = False
            if encoding == _PREFIXED:
                prefixed.append(PrefixedPage(behind, at, size, count, _level_bytes(fields)))
        elif count and not values:
            begins_coded = True
        values += count
    if values > chunk.num_values:
        raise DataError(f"its pages hold {values} values, the footer says {chunk.num_values}")
    return PageFacts(all_coded, begins_coded, dictionary, tuple(prefixed))


def _header(data: memoryview, at: int, page: str) -> tuple[Fields, int]:
    """Return the fields of the header at `at`, and the offset of the page's bytes."""
    for most_bytes in (_FEW_BYTES, len(data)):
        try:
            fields, size = struct(bytes(data[at : at + most_bytes]), 0)
        except IndexError:
            continue
        return fields, at + size
    raise DataError(f"{page} has a truncated header")


def _sizes(fields: Fields, page: str, limits: ParquetLimits) -> tuple[int, int]:
    """Return the bytes of a page before compression and in the file."""
    size, stored = fields.get(2), fields.get(3)
    if not isinstance(size, int) or not isinstance(stored, int) or min(size, stored) < 0:
        raise DataError(f"{page} has a damaged header")
    if size > limits.max_page_bytes:
        raise DataError(
            f"{page} has {size} bytes before compression, max_page_bytes is {limits.max_page_bytes}"
        )
    return size, stored


def _level_bytes(fields: Fields) -> int | None:
    """Return the bytes of a page's levels; None for a page of the first kind."""
    inner = fields.get(8)
    if fields.get(1) != _DATA_V2 or not isinstance(inner, dict):
        return None
    found = (inner.get(5), inner.get(6))
    if not all(isinstance(each, int) and each >= 0 for each in found):
        raise DataError("a page has a damaged header")
    return sum(each for each in found if isinstance(each, int))


def _values(fields: Fields) -> tuple[int, int | None]:
    """Return the number of values of a page and their encoding; None for a dictionary."""
    kind = fields.get(1)
    inner = fields.get({_DATA: 5, _DATA_V2: 8}.get(kind, 0)) if isinstance(kind, int) else None
    if not isinstance(inner, dict):
        return 0, None
    count, encoding = inner.get(1), inner.get(4 if kind == _DATA_V2 else 2)
    if not isinstance(count, int) or not isinstance(encoding, int) or count < 0:
        raise DataError("a page has a damaged header")
    return count, encoding
