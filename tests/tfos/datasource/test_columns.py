"""Columns of the format "tfrecord": what a sample of files says, what a schema may ask for."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import tracemalloc
from typing import Any

import pytest

from feeding.errors import DataError, FeedSettingsError, FileChanged
from feeding.formats.tfrecord.framing import RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.reading.partition_paths import directory_name
from tfos.datasource.listing import list_files, path_on
from tfos.datasource.options import TFRecordOptions

pytestmark = pytest.mark.slow  # imports pyspark


def write_file(path, *rows, is_gzip=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    out = io.BytesIO()
    writer = RecordWriter(out)
    for row in rows:
        writer.write(encode_example(row))
    path.write_bytes(gzip.compress(out.getvalue()) if is_gzip else out.getvalue())


def columns(**kinds):
    from pyspark.sql.types import StructType

    schema = StructType()
    for name, kind in kinds.items():
        schema = schema.add(name, kind)
    return schema


def inferred(path, **options):
    from tfos.datasource.inference import infer_schema

    chosen = TFRecordOptions(paths=(str(path),), **options)
    return infer_schema(list_files(chosen), chosen).simpleString()


def test_files_without_records_do_not_hide_those_that_have_some(tmp_path):
    with pytest.raises(FileNotFoundError, match="no data file"):
        inferred(tmp_path)
    for number in range(20):
        write_file(tmp_path / f"part-{number:02}.gz", is_gzip=True)
    (tmp_path / "part-20").touch()
    with pytest.raises(
        DataError, match=r"21 files.* hold no tf.Example with a feature; give a sch"
    ):
        inferred(tmp_path)
    write_file(tmp_path / "part-13.gz", {"n": 1, "l": []}, is_gzip=True)
    assert inferred(tmp_path, sample_files=2) == "struct<n:bigint>"


def test_a_feature_of_two_types_is_named_with_both_files(tmp_path):
    write_file(tmp_path / "a", {"n": 1, "x": 1.0})
    write_file(tmp_path / "b", {"n": 2, "x": 1})
    with pytest.raises(DataError, match=r"'x' is a float32 list in \S+/a and a int64 list in"):
        inferred(tmp_path)


def test_a_partition_that_is_null_is_refused_where_the_schema_says_never(tmp_path):
    from tfos.datasource.reader import RecordFilesReader

    write_file(tmp_path / "p=__HIVE_DEFAULT_PARTITION__" / "a", {"n": 1})
    options = TFRecordOptions(paths=(str(tmp_path),))
    schema = columns(n="integer", p="string")
    assert len(RecordFilesReader(schema, options).partitions()) == 1
    schema["p"].nullable = False
    with pytest.raises(DataError, match=r"/a is in .*p=__HIVE.*'p' is never null"):
        RecordFilesReader(schema, options)


def test_a_schema_names_the_columns_of_directories_in_any_case(tmp_path):
    from tfos.datasource.reader import RecordFilesReader

    write_file(tmp_path / "day=7" / "a", {"n": 1, "DAY": 2})
    options = TFRecordOptions(paths=(str(tmp_path),))
    for names, row in (
        (["Day", "n"], [7, 1]),
        (["day", "DAY"], [7, 2]),
        (["Day", "DAY"], [None, 2]),
    ):
        reader = RecordFilesReader(columns(**dict.fromkeys(names, "integer")), options)
        (part,) = reader.partitions()
        (batch,) = reader.read(part)
        assert batch.to_pylist() == [dict(zip(names, row, strict=True))]


def test_a_task_reads_the_copy_of_a_file_that_its_host_has(tmp_path):
    """Without a scheme each host may have its own, which was copied at another time."""
    from tfos.datasource.reader import RecordFilesReader

    write_file(tmp_path / "a", {"n": 1})
    reader = RecordFilesReader(columns(n="integer"), TFRecordOptions(paths=(str(tmp_path),)))
    (part,) = reader.partitions()
    of_task = pickle.loads(pickle.dumps(reader))
    assert of_task.partitions() == [], "no task needs the other tasks' files"
    os.utime(tmp_path / "a", ns=(5, 5))
    (batch,) = of_task.read(part)
    assert batch.to_pylist() == [{"n": 1}]
    write_file(tmp_path / "a", {"n": 1}, {"n": 2})
    with pytest.raises(FileChanged, match="/a"):
        list(of_task.read(part))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (lambda t: t.TimestampType(), "cast it to string, or to a number with unix_micros"),
        (lambda t: t.StructType(), "select its fields"),
        (lambda t: t.ArrayType(t.ArrayType(t.LongType())), "flatten it"),
        (lambda t: t.MapType(t.StringType(), t.LongType()), "select its values"),
    ],
)
def test_types_that_no_record_holds_are_refused_with_what_helps(kind, text):
    from pyspark.sql import types

    from tfos.datasource.columns import check_schema

    with pytest.raises(FeedSettingsError, match=text):
        check_schema(types.StructType([types.StructField("x", kind(types))]), "Example")


def test_partitions_that_readers_would_pass_over_are_refused():
    from tfos.datasource.columns import check_partition_columns

    schema = columns(**{"n": "integer", ".hidden": "integer", "_seen": "integer"})
    check_partition_columns(schema, ["_seen"])
    with pytest.raises(FeedSettingsError, match=r"'.hidden'; readers skip"):
        check_partition_columns(schema, [".hidden"])


def test_one_directory_has_its_partitions_however_its_path_is_said(tmp_path, monkeypatch):
    root = tmp_path / "data"
    write_file(root / "day=1" / "a", {"n": 1})
    monkeypatch.chdir(tmp_path)
    doubled = str(root).replace("/", "//")
    for said in (root, f"{root}//", doubled, f"file:{root}", f"file://{doubled}", "./data"):
        assert inferred(said) == "struct<n:bigint,day:int>", said
    assert inferred(root / "day=1", base_path=doubled) == "struct<n:bigint,day:int>"


@pytest.mark.parametrize(
    ("path", "default_fs", "whole"),
    [
        ("/a//b", "hdfs://nn:1", "hdfs://nn:1/a/b"),
        ("hdfs://nn//a", "file:///", "hdfs://nn/a"),
        ("s3://bucket/a//b", "hdfs://nn:1", "s3://bucket/a//b"),
        ("a", "hdfs://nn:1", "hdfs://nn:1/user/me/a"),
        ("../a", "file:///", f"file://{os.path.dirname(os.getcwd()).rstrip('/')}/a"),
    ],
)
def test_a_path_is_completed_as_listings_name_it(path, default_fs, whole):
    assert path_on(path, default_fs, "me") == whole


def test_a_scheme_without_a_host_is_refused():
    with pytest.raises(FeedSettingsError, match="'hdfs:/a' names no host; use hdfs://host"):
        path_on("hdfs:/a", "file:///")


def test_many_partitions_of_two_columns_cost_what_there_are():
    import pyarrow as pa

    from tfos.datasource.writer import by_directory

    numbers = pa.array(range(500))
    batch = pa.RecordBatch.from_pydict({"a": numbers, "b": numbers, "c": numbers})
    tracemalloc.start()
    try:
        found = {name: rows.to_pylist() for name, rows in by_directory(batch, ("a", "b"))}
        assert tracemalloc.get_traced_memory()[1] < 4 << 20  # 250 000 names are more
    finally:
        tracemalloc.stop()
    assert found == {f"a={n}/b={n}": [{"c": n}] for n in range(500)}


def test_rows_go_to_the_directories_of_their_own_values_in_their_order():
    import pyarrow as pa

    from tfos.datasource.writer import by_directory

    chosen = random.Random(5)
    rows: list[dict[str, Any]] = [
        {"day": chosen.choice([3, 1, 2]), "n": n, "kind": chosen.choice(["x", None])}
        for n in range(60)
    ]
    expected: dict[str, list[dict[str, int]]] = {}
    for row in rows:
        name = "/".join(directory_name(column, row[column]) for column in ("kind", "day"))
        expected.setdefault(name, []).append({"n": row["n"]})
    assert len(expected) == 6
    batch = pa.RecordBatch.from_pylist(rows)
    found = {name: part.to_pylist() for name, part in by_directory(batch, ("kind", "day"))}
    assert found == expected


def test_a_path_beside_the_base_path_is_not_below_it(tmp_path):
    write_file(tmp_path / "days" / "day=1" / "a", {"n": 1})

    def listed(base: str) -> Any:
        paths = (str(tmp_path / "days" / "day=1"),)
        return list_files(TFRecordOptions(paths=paths, base_path=str(tmp_path / base))).values

    assert listed("days") == [{"day": "1"}]
    with pytest.raises(FeedSettingsError, match=r"days/day=1 is not below basePath \S+/day$"):
        listed("day")


def test_the_sample_for_a_schema_is_spread_over_all_files(tmp_path):
    for number in range(9):
        write_file(tmp_path / f"{number}", *([{"n": number}] if number != 3 else []))
    listing = list_files(TFRecordOptions(paths=(str(tmp_path),)))
    names = [os.path.basename(file.path) for file in listing.sample(4)]
    assert names == ["0", "2", "5", "7"]
    assert len(listing.sample(99)) == 8, "one is empty"
