"""Spark's format "tfrecord": what is written comes back, whole or not at all."""

from __future__ import annotations

import datetime
import subprocess
import sys

import pytest

import tfos
from feeding.formats.tfrecord.framing import RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.formats.tfrecord.infer import decode_example
from tests.support.spark_masters import REPO

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(480, func_only=True),
    pytest.mark.parametrize("spark", ["local[4]"], indirect=True),
]
SCHEMA = (
    "yes boolean, tiny tinyint, short smallint, number int, long bigint, f float, d double, "
    "text string, raw binary, longs array<bigint>, floats array<float>, texts array<string>, "
    "flags array<boolean>, raws array<binary>"
)
ROWS = [
    *[
        (
            *(
                n % 2 == 0,
                n,
                -n,
                n * 1000,
                n << 40,
                n / 4,
                n / 2,
                f"row {n} \u20ac",
                bytes([n, 255]),
            ),
            *([n] * (n % 3), [n / 8], ["a", "", f"{n}"], [True, False], [b"", b"\xfe"]),
        )
        for n in range(60)
    ],
    (None,) * 14,
]


@pytest.fixture
def session(spark):
    from pyspark.sql import SparkSession

    session = SparkSession(spark)
    tfos.register_data_sources(session)
    return session


def write(df, path, mode="append", **options):
    df.write.format("tfrecord").mode(mode).options(**options).save(str(path))


def read(session, *paths, schema=None, **options):
    reader = session.read.format("tfrecord").options(**options)
    if schema:
        reader = reader.schema(schema)
    return reader.load([str(path) for path in paths] if len(paths) > 1 else str(paths[0]))


def write_file(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for row in rows:
            writer.write(encode_example(row))


def names(directory):
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def visible(directory):
    """Without what tasks write that Spark had not ended yet when their job was taken back."""
    return [name for name in names(directory) if not name.startswith("_temporary/")]


def as_bytes(row):
    """Return a Row as a tuple that can be compared; binary values are bytearrays in Spark."""
    return tuple(bytes(v) if isinstance(v, bytearray) else v for v in row)


def test_every_type_comes_back_with_its_nulls(session, tmp_path):
    df = session.createDataFrame(ROWS, SCHEMA)
    write(df.where("long < 20L << 40").coalesce(1), tmp_path / "data")
    rest = df.where("long IS NULL OR long >= 20L << 40").repartition(2)
    write(rest, tmp_path / "data", compression="gzip")
    ends = [name.partition(".")[2].partition(".")[2] for name in names(tmp_path / "data")]
    assert sorted(ends) == ["", "tfrecord", "tfrecord.gz", "tfrecord.gz"]
    found = read(session, tmp_path / "data", schema=SCHEMA)
    assert found.schema == df.schema
    in_order = lambda row: (row[4] is not None, row[4])  # noqa: E731
    assert sorted(map(as_bytes, found.collect()), key=in_order) == sorted(ROWS, key=in_order)


def test_a_schema_is_inferred_from_several_files(session, tmp_path):
    write_file(tmp_path / "a", {"n": 1, "x": 0.5, "t": "a", "i": b"\xff", "l": [1, 2], "s": [1.5]})
    write_file(tmp_path / "b", {"n": 2, "x": 1.5, "t": "b", "i": b"", "l": [3], "late": "x"})
    df = read(session, tmp_path)
    assert df.schema.simpleString() == (
        "struct<i:binary,l:array<bigint>,late:string,n:bigint,s:float,t:string,x:float>"
    )
    assert [tuple(row) for row in df.orderBy("n").select("n", "l", "late", "s").collect()] == [
        (1, [1, 2], None, 1.5),
        (2, [3], "x", None),
    ]
    assert dict(read(session, tmp_path, binaryFeatures="t").dtypes)["t"] == "binary"


HOSTILE = ["../../out", "..", "%2e%2e%2f", "a/b", "C:\\x", "\u20ac \uff0f", "", None, "k=v", "\n"]


@pytest.mark.long
@pytest.mark.attack("A18")
def test_values_become_directories_that_lead_nowhere_else_and_come_back(session, tmp_path):
    rows = [(n, value, datetime.date(2026, 1, 1 + n % 2)) for n, value in enumerate(HOSTILE * 2)]
    df = session.createDataFrame(rows, "n int, _name string, day date")
    write(df, tmp_path / "up" / "data", partitionBy="day,_name")
    root = tmp_path / "up" / "data"
    assert names(tmp_path) == [f"up/data/{name}" for name in names(root)]
    assert "day=2026-01-01/_name=..%2F..%2Fout" in {name.rpartition("/")[0] for name in names(root)}
    found = read(session, root)
    assert found.schema.simpleString() == "struct<n:bigint,day:date,_name:string>"
    expected = {(n, day, name or None) for n, name, day in rows}
    assert {tuple(row) for row in found.collect()} == expected
    assert found.where("_name = 'a/b'").count() == 2
    one_day = read(session, root / "day=2026-01-01")
    assert one_day.columns == ["n", "_name"]
    one_day = read(session, root / "day=2026-01-01", basePath=str(root))
    assert (one_day.columns, one_day.count()) == (["n", "day", "_name"], 10)


@pytest.mark.long
def test_modes(session, tmp_path):
    path = tmp_path / "data"
    df = session.range(40).repartition(4)
    write(df, path)
    write(df, path)
    assert len(names(path)) == 9
    assert read(session, path).count() == 80
    with pytest.raises(Exception, match=r"it exists, with .*data"):
        write(df, path, ifExists="error")
    write(session.range(3).coalesce(1), path, mode="overwrite")
    assert len(names(path)) == 2
    assert read(session, path).count() == 3
    write(session.range(0), path, mode="overwrite")
    assert read(session, path, schema="id bigint").count() == 0
    write(session.range(1), tmp_path / "new", ifExists="error")
    with pytest.raises(Exception, match="it is a file"):
        write(session.range(1), next((tmp_path / "new").glob("part-*")))


@pytest.mark.long
@pytest.mark.parametrize("mode", [pytest.param("append", marks=pytest.mark.long), "overwrite"])
def test_a_job_that_fails_leaves_what_was_there(session, tmp_path, mode):
    def fail(batches):
        for batch in batches:
            yield batch
            if batch.column(0)[0].as_py() == 0:
                raise ValueError("half way")

    write(session.range(3).coalesce(1), tmp_path / "old")
    before = visible(tmp_path / "old")
    broken = session.range(0, 4, 1, 4).mapInArrow(fail, "id bigint")
    # After the first failure, Spark may give a task the Python worker that it is just ending.
    for where in ("new", "old"):
        with pytest.raises(Exception, match=r"half way|Python worker exited unexpectedly"):
            write(broken, tmp_path / where, mode=mode)
    assert not visible(tmp_path / "new")
    assert visible(tmp_path / "old") == before


@pytest.mark.long
def test_damage_fails_with_its_place_or_is_dropped(session, tmp_path):
    write_file(tmp_path / "part-0", *({"n": n} for n in range(50)))
    data = bytearray((tmp_path / "part-0").read_bytes())
    data[len(data) // 2] ^= 255
    (tmp_path / "part-0").write_bytes(data)
    with pytest.raises(Exception, match=r"part-0: record 25 at byte \d+: the CRC of"):
        read(session, tmp_path, schema="n int").collect()
    kept = read(session, tmp_path, schema="n int", mode="DROPMALFORMED")
    assert {row.n for row in kept.collect()} == set(range(50)) - {25}
    with pytest.raises(Exception, match="max_skipped is 0"):
        read(session, tmp_path, schema="n int", mode="dropmalformed", maxSkipped=0).collect()


@pytest.mark.long
def test_records_as_they_are(session, tmp_path):
    write_file(tmp_path / "in", *({"n": n} for n in range(5)))
    df = read(session, tmp_path / "in", recordType="ByteArray")
    assert df.schema.simpleString() == "struct<byteArray:binary>"
    assert [decode_example(bytes(row[0])) for row in df.collect()] == [{"n": [n]} for n in range(5)]
    write(df.coalesce(1), tmp_path / "out", recordType="bytearray")
    (copy,) = (tmp_path / "out").glob("part-*")
    assert copy.read_bytes() == (tmp_path / "in").read_bytes()


@pytest.mark.long
def test_a_large_file_is_read_by_several_tasks_and_every_record_once(session, tmp_path):
    write_file(tmp_path / "part-0", *({"n": n, "pad": b"x" * (n % 50)} for n in range(4000)))
    df = read(session, tmp_path, maxPartitionBytes=20_000)
    assert df.rdd.getNumPartitions() > 8
    assert sorted(row.n for row in df.select("n").collect()) == list(range(4000))


def test_types_that_no_record_holds_are_refused_before_a_task_runs(session, tmp_path):
    with pytest.raises(Exception, match=r"no Example holds column 'd' of type decimal.9,2.; cast"):
        write(session.createDataFrame([], "d decimal(9,2)"), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_spark_finds_the_format_by_itself(spark):
    program = (
        "import io; from pyspark.sql.worker.lookup_data_sources import _main; "
        "out = io.BytesIO(); _main(io.BytesIO(), out); print(out.getvalue()[8:16].decode())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == "tfrecord", run.stderr


def test_tensorflowonsparks_functions_write_where_nothing_is_and_know_what_they_loaded(
    spark, session, tmp_path, monkeypatch
):
    from pyspark.sql.datasource import DataSourceRegistration

    from tfos import dfutil

    # Spark has the format, and warns of each source that replaces one.
    monkeypatch.setattr(DataSourceRegistration, "register", None)
    df = session.createDataFrame(ROWS[:10], SCHEMA)
    dfutil.saveAsTFRecords(df, str(tmp_path / "data"))
    with pytest.raises(Exception, match="it exists"):
        dfutil.saveAsTFRecords(df, str(tmp_path / "data"))
    loaded = dfutil.loadTFRecords(spark, str(tmp_path / "data"), binary_features="text")
    assert dict(loaded.dtypes) | {"d": "double", "f": "double", "text": "binary"} == dict(
        loaded.dtypes
    )
    assert {row.d for row in loaded.collect()} == {row.d for row in df.collect()}
    assert (dfutil.isLoadedDF(loaded), dfutil.isLoadedDF(loaded.select("d"))) == (True, False)
    pairs = df.rdd.mapPartitions(dfutil.toTFExample(df.dtypes))
    rows = pairs.mapPartitions(lambda part: dfutil.fromTFExample(part, ["raw", "raws"]))
    assert {row.long for row in rows.collect()} == {row.long for row in df.collect()}
