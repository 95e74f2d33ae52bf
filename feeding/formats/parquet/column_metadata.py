"""Parquet column metadata: checks each column of a footer before pyarrow makes objects of it.

Covers: check_column_metadata.
Does not: check byte ranges (footer) or pages (page_headers).
Threads: any; pure.
Source: parquet.thrift FileMetaData, ColumnMetaData, SizeStatistics.

`RowGroupMetaData.column()` of pyarrow lets a C++ exception pass, which aborts the process, where a
column's metadata contradicts the schema (seen with 26.0.1).
"""

from __future__ import annotations

import pyarrow.parquet as pq

from feeding.errors import DataError
from feeding.formats.parquet.thrift import BINARY, I32, I64, STRUCT, Fields, Items, struct

_TYPES = (
    "BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY",
)  # fmt: skip


_FILE_LISTS = {2: STRUCT, 4: STRUCT, 5: STRUCT, 7: STRUCT}
_GROUP_LISTS = {1: STRUCT, 4: STRUCT}
_COLUMN_LISTS = {2: I32, 3: BINARY, 8: STRUCT, 13: STRUCT}
_SIZE_LISTS = {2: I64, 3: I64}
"""Kinds of items by field. pyarrow ignores the kind of the file, so another one is refused."""


def check_column_metadata(path: str, data: bytes, metadata: pq.FileMetaData) -> None:
    """Compare the columns of all row groups with the schema: type, level histograms, encryption.

    Args:
        path: path of the file.
        data: the footer.
        metadata: the same, parsed by pyarrow.

    Raises:
        DataError: names file, row group, column, expected and found.
    """
    try:
        fields, _ = struct(data, 0)
    except (DataError, IndexError) as error:
        raise DataError(f"{path}: its footer is damaged: {error}") from None
    groups = _structs(fields, 4)
    if 8 in fields or not _has_kinds(fields, _FILE_LISTS) or len(groups) != metadata.num_row_groups:
        raise DataError(f"{path}: its footer is damaged, or the file is encrypted")
    leaves = [metadata.schema.column(n) for n in range(len(metadata.schema))]
    expected = [
        (
            _TYPES.index(leaf.physical_type),
            leaf.max_repetition_level + 1,
            leaf.max_definition_level + 1,
        )
        for leaf in leaves
    ]
    for group, row_group in enumerate(groups):
        columns = _structs(row_group, 1)
        if len(columns) != len(leaves) or not _has_kinds(row_group, _GROUP_LISTS):
            raise DataError(
                f"{path}: row group {group}: its footer is damaged: {len(columns)} columns, the "
                f"schema has {len(leaves)}"
            )
        for leaf, column, known in zip(leaves, columns, expected, strict=True):
            if wrong := _contradiction(column, *known):
                raise DataError(
                    f"{path}: row group {group}: column {leaf.path!r}: its footer is damaged: "
                    f"{wrong}"
                )


def _contradiction(column: Fields, kind: int, repetitions: int, definitions: int) -> str:
    """Return how a ColumnChunk contradicts the schema; empty: not at all."""
    if 8 in column:
        return "it is encrypted; write the file without encryption"
    found = column.get(3)
    if not isinstance(found, dict) or not _has_kinds(found, _COLUMN_LISTS):
        return "it has no metadata"
    if found.get(1) != kind:
        number = found.get(1)
        name = _TYPES[number] if isinstance(number, int) and 0 <= number < len(_TYPES) else number
        return f"its type is {name}, the schema says {_TYPES[kind]}"
    sizes = found.get(16)
    if not isinstance(sizes, dict):
        return ""
    if 1 in sizes and _TYPES[kind] != "BYTE_ARRAY":
        return f"it has a size of text, but its type is {_TYPES[kind]}"
    for field, name, levels in ((2, "repetition", repetitions), (3, "definition", definitions)):
        histogram = sizes.get(field)
        count = histogram.num_items if isinstance(histogram, Items) else 0
        if count not in (0, levels) or not _has_kinds(sizes, _SIZE_LISTS):
            return f"its histogram of {name} levels has {count} numbers, expected {levels}"
    return ""


def _has_kinds(fields: Fields, kinds: dict[int, int]) -> bool:
    """Whether the lists of a struct have the kinds of items that the format gives them."""
    for number, kind in kinds.items():
        found = fields.get(number)
        if isinstance(found, Items) and not found.is_of(kind):
            return False
    return True


def _structs(fields: Fields, number: int) -> list[Fields]:
    found = fields.get(number)
    return found.structs if isinstance(found, Items) else []
