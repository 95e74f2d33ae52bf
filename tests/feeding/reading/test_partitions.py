"""Columns of `key=value` directories beside the files' own, in all formats that leave them out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feeding.columnar.batch import Batch
from feeding.errors import DataError, FeedSettingsError
from feeding.formats.csv.options import CsvRequest
from feeding.formats.csv.source import CsvSource
from feeding.formats.text.source import TextSource
from feeding.formats.tfrecord.example import Feature
from feeding.formats.tfrecord.framing import RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.formats.tfrecord.source import TFRecordSource
from feeding.reading.partitions import PartitionedSource, partition_columns, partitioned
from feeding.reading.reader import DirectReader
from feeding.reading.row_counts import CountedSource, pieces_of
from feeding.reading.splits import SourceFile


def columns_of(*paths: str, base: str = "/d") -> dict[str, Any]:
    return partition_columns(SourceFile(path, 1, base=base) for path in paths)


@pytest.mark.parametrize(
    ("names", "dtype", "values"),
    [
        (["1", "02", "-3"], "int64", [1, 2, -3]),
        (["1", "2.5", "1e3"], "float64", [1.0, 2.5, 1000.0]),
        (["1", "x"], "str", ["1", "x"]),
        (["1e30", "-2.5"], "float64", [1e30, -2.5]),
        (["1", str(2**63)], "str", ["1", str(2**63)]),
        (["1.5", str(2**70)], "str", ["1.5", str(2**70)]),
        (["1", "1e999"], "str", ["1", "1e999"]),
        (["2026-01-31"], "str", ["2026-01-31"]),
        (["a%20b%2Fc", "%C3%A9", "é", "1_0"], "str", ["a b/c", "é", "é", "1_0"]),
        (["7", "__HIVE_DEFAULT_PARTITION__"], "int64", [7, None]),
        (["__HIVE_DEFAULT_PARTITION__"], "str", [None]),
        (["nan"], "str", ["nan"]),
    ],
)
def test_types_are_those_of_all_values(names, dtype, values):
    paths = [f"/d/k={name}/{number}" for number, name in enumerate(names)]
    (column,) = columns_of(*paths).values()
    assert column.dtype == dtype
    assert [column.value(path) for path in paths] == values


def test_keys_of_all_files_below_what_was_read_are_columns():
    assert list(columns_of("/d/a=1/b=2/x", "/d/b=3/a=4/y")) == ["a", "b"]
    assert list(columns_of("/d/a=1/b=2/x", "/d/b=3/y")) == ["b"]
    assert list(columns_of("/d/a=1/b=2/x", base="/d/a=1")) == ["b"]
    assert not columns_of("/d/a=1/x=2", base="/d/a=1")
    assert not columns_of()


def test_a_dtype_that_is_asked_for_fits_or_is_refused():
    (column,) = columns_of("/d/k=3/x", "/d/k=300/x").values()
    for dtype, value in (("float32", 300.0), ("int16", 300), ("str", "300"), ("bytes", b"300")):
        assert column.of(dtype).value("/d/k=300/x") == value
    with pytest.raises(DataError, match=r"/d/k=300/x: the directory k=300 is no int8"):
        column.of("int8")


def tfrecord(numbers: range) -> bytes:
    file = io.BytesIO()
    writer = RecordWriter(file)
    for n in numbers:
        writer.write(encode_example({"n": n}))
    return file.getvalue()


def lines(numbers: range) -> bytes:
    return "".join(f"{n}\n" for n in ["n", *numbers]).encode()


@pytest.fixture
def root(tmp_path) -> Path:
    for suffix, encoded in (("tfrecord", tfrecord), ("csv", lines)):
        for month in (1, 2):
            path = tmp_path / suffix / f"month={month}" / f"f.{suffix}"
            path.parent.mkdir(parents=True)
            path.write_bytes(encoded(range(10 * month, 10 * month + 3)))
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        "{root}//csv",
        "/{root}/csv//",
        "file://{root}//csv",
        "{root}/./csv",
        "{root}//csv//month=*",
        "csv",
        "./csv",
        "csv/.",
        ".",
        "./csv/*",
        "*/*",
    ],
)
def test_the_keys_are_found_however_a_path_is_spelled(root, monkeypatch, path):
    monkeypatch.chdir(root)
    (root / "tfrecord").rename(root / "_tfrecord")
    source = CsvSource(path.format(root=root), partitions=True)
    assert list(source.directories) == ["month"]


def read(source: Any) -> dict[str, list[Any]]:
    batch = DirectReader(source, 0, 1).next_batch(100)
    assert isinstance(batch, Batch)
    return {name: np.asarray(column).tolist() for name, column in batch.columns.items()}


NUMBERS, MONTHS = [10, 11, 12, 20, 21, 22], [1, 1, 1, 2, 2, 2]


@pytest.mark.slow  # kernels are compiled at first
def test_tfrecord_files_have_them(root):
    path = root / "tfrecord"
    assert read(partitioned(TFRecordSource(path))) == {"n": NUMBERS}
    assert read(partitioned(TFRecordSource(path, partitions=True))) == {
        "n": NUMBERS,
        "month": MONTHS,
    }
    features = {"month": Feature("float32"), "n": Feature("int64")}
    source = partitioned(TFRecordSource(path, features, partitions=True))
    assert read(source) == {"n": NUMBERS, "month": MONTHS}
    assert [spec.dtype for spec in source.schema.columns] == ["int64", "float32"]
    only = partitioned(TFRecordSource(path, {"n": Feature("int64")}, partitions=True))
    assert read(only) == {"n": NUMBERS}
    with pytest.raises(FeedSettingsError, match=r"'month' is a key of directories.*shape \(2,\)"):
        TFRecordSource(path, {"month": Feature("int64", (2,))}, partitions=True)
    (root / "tfrecord" / "month=1").rename(root / "tfrecord" / "n=1")
    with pytest.raises(FeedSettingsError, match=r"'n' is a column of the file and a key.*=False"):
        TFRecordSource([root / "tfrecord" / "n=*"], partitions=True)


@pytest.mark.slow  # kernels are compiled at first
def test_lines_have_them_counted_too(root):
    path = root / "csv"
    assert read(partitioned(CsvSource(path, partitions=True))) == {"n": NUMBERS, "month": MONTHS}
    request = CsvRequest(columns={"month": "str", "n": "float32"})
    source = partitioned(CsvSource(path, request, partitions=True))
    assert read(source) == {"n": NUMBERS, "month": list(map(str, MONTHS))}
    counts = [source.count(piece) for piece in pieces_of(source.files())]
    assert read(CountedSource(source, counts)) == read(source)
    only = CsvSource(path, CsvRequest(columns=["n"]), partitions=True)
    assert read(partitioned(only)) == {"n": NUMBERS}
    text = read(partitioned(TextSource(path, partitions=True)))
    assert text["month"] == [1] * 4 + [2] * 4
    (path / "month=1").rename(path / "n=1")
    with pytest.raises(FeedSettingsError, match=r"'n' is a column of the file and a key"):
        CsvSource([path / "n=*"], partitions=True)


def test_nulls_of_directories_are_refused_where_nothing_replaces_them(root):
    (root / "csv" / "month=1").rename(root / "csv" / "month=__HIVE_DEFAULT_PARTITION__")
    source = TextSource(root / "csv", partitions=True)
    with pytest.raises(DataError, match=r"'month' is null; pass partitions=False"):
        PartitionedSource(source, source.directories.values())
