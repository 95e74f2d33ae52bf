"""Lists of texts with prefixes: their size is known before they are decoded."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeding.columnar.batch import Batch
from feeding.errors import DataError
from feeding.formats.parquet.footer import ColumnChunk, ParquetLimits
from feeding.formats.parquet.page_headers import check_pages
from feeding.formats.parquet.prefixed_text import decoded_bytes
from feeding.formats.parquet.source import ParquetSource
from feeding.reading.reader import DirectReader

MIB = 1 << 20
SMALL = ParquetLimits(max_row_group_bytes=MIB, max_page_bytes=MIB)
CODECS = ["none", "snappy", "gzip", "zstd", "lz4"]
TEXTS = st.none() | st.text("ab", max_size=6)
LISTS = st.lists(st.none() | st.lists(TEXTS, max_size=9), max_size=90)


def stored(path: Path, rows: pa.Table, codec: str, version: str) -> None:
    text = {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}
    pq.write_table(
        rows, path, compression=codec, data_page_version=version, write_statistics=False,
        data_page_size=64, write_batch_size=8, row_group_size=4096, **text,
    )  # fmt: skip


def rows_of(path: Path) -> int:
    reader, found = DirectReader(ParquetSource(str(path), limits=SMALL), 0, 1), 0
    while isinstance(batch := reader.next_batch(64), Batch):
        found += batch.num_rows
    return found


def size_of(path: Path) -> int:
    """Return the decoded size that the pages of the only column promise."""
    metadata = pq.read_metadata(path)
    column = metadata.row_group(0).column(0)
    levels = metadata.schema.column(0)
    start = column.data_page_offset
    data = path.read_bytes()[start : start + column.total_compressed_size]
    chunk = ColumnChunk(
        start=0,
        stop=len(data),
        uncompressed_bytes=column.total_uncompressed_size,
        num_values=column.num_values,
        value_bytes=4,
        is_repeated=True,
    )
    pages = check_pages(memoryview(data), chunk, ParquetLimits()).prefixed
    kinds = bool(levels.max_repetition_level) + bool(levels.max_definition_level)
    return sum(
        decoded_bytes(memoryview(data)[page.start : page.stop], page, column.compression, kinds)
        for page in pages
    )


@settings(max_examples=60)
@given(LISTS, st.sampled_from(CODECS), st.sampled_from(["1.0", "2.0"]))
def test_the_size_is_that_of_the_texts_and_of_their_lengths(tmp_path_factory, rows, codec, version):
    path = tmp_path_factory.getbasetemp() / "texts.parquet"
    table = pa.table({"l": pa.array(rows, pa.list_(pa.string()))})
    stored(path, table, codec, version)
    texts = sum(len(text or "") for row in rows for text in row or ())
    if table.num_rows:
        found = size_of(path)
        encoded = pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size
        assert texts <= found <= texts + encoded


@pytest.mark.attack("A20")
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_list_of_one_text_many_times_is_refused_before_it_is_decoded(tmp_path, codec, version):
    """2,000 times 1 KiB by prefixes in one row of a few bytes."""
    path = tmp_path / "bomb.parquet"
    stored(path, pa.table({"l": [["x" * 1024] * 2000]}), codec, version)
    assert path.stat().st_size < 16 * 1024
    with pytest.raises(DataError, match=r"bomb.*row group 0: column 'l.*max_row_group_bytes"):
        rows_of(path)
    short = tmp_path / "short.parquet"
    stored(short, pa.table({"l": [[f"name {n}" for n in range(9)]] * 500}), codec, version)
    assert rows_of(short) == 500


@pytest.mark.fault("F45")
def test_damaged_lengths_end_typed(tmp_path):
    path = tmp_path / "texts.parquet"
    stored(path, pa.table({"l": [[f"name {n}" for n in range(40)]] * 9}), "none", "2.0")
    column = pq.read_metadata(path).row_group(0).column(0)
    whole = path.read_bytes()
    first = column.data_page_offset
    refused = 0
    for at in range(first, first + column.total_compressed_size, 3):
        broken = bytearray(whole)
        broken[at] ^= 255
        path.write_bytes(bytes(broken))
        try:
            size_of(path)
        except DataError:
            refused += 1
    assert refused
