"""Parquet files read directly: every row once, equal shares, the types that are promised."""

from __future__ import annotations

import datetime
import decimal
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeding.arrow.columns import owner_of
from feeding.columnar.batch import Batch, EpochEnd, Ragged
from feeding.errors import DataError, FeedSettingsError
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.local import LocalReader
from feeding.formats.parquet import footer
from feeding.formats.parquet.plan import ParquetRequest
from feeding.formats.parquet.row_groups import _fetch
from feeding.formats.parquet.source import ParquetSource
from feeding.reading.bad_records import BadData
from feeding.reading.reader import DirectReader
from feeding.reading.splits import Split

UTC = datetime.UTC
VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)


def table(numbers: range) -> pa.Table:
    return pa.table(
        {
            "n": pa.array(list(numbers), pa.int64()),
            "some": pa.array([[n] * (n % 3) for n in numbers], pa.list_(pa.float32())),
            "pair": pa.array([[n, -n] for n in numbers], pa.list_(pa.int16())),
            "s": pa.array([f"row {n}" for n in numbers], pa.string()),
        }
    )


def write(path: Path, rows: pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, **options)
    return path


def epoch(reader: DirectReader, batch_size: int) -> list[Batch]:
    batches = []
    while isinstance(batch := reader.next_batch(batch_size), Batch):
        batches.append(batch)
    assert isinstance(batch, EpochEnd)
    assert all(each.num_rows == batch_size for each in batches[:-1])
    return batches


def values(column: Any) -> list[Any]:
    if isinstance(column, Ragged):
        return [each.tolist() for each in np.split(column.values, column.offsets[1:-1])]
    return column.tolist()


def rows_of(source: ParquetSource, batch_size: int = 7) -> dict[str, list[Any]]:
    batches = epoch(DirectReader(source, 0, 1), batch_size)
    return {
        name: [value for batch in batches for value in values(batch.columns[name])]
        for name in source.schema.names
    }


def read(path: Path | str, **request: Any) -> dict[str, list[Any]]:
    return rows_of(ParquetSource(str(path), ParquetRequest(**request)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("parquet")
    write(root / "part-0.parquet", table(range(70)), row_group_size=16, compression="zstd")
    write(root / "part-1.parquet", table(range(70, 70)))
    plain = {"compression": "none", "use_dictionary": False, "row_group_size": 9}
    write(root / "sub" / "part-0.parquet", table(range(70, 120)), data_page_version="2.0", **plain)
    (root / "_SUCCESS").write_bytes(b"")
    (root / "_metadata").write_bytes(b"no Parquet")
    (root / ".part-0.parquet.crc").write_bytes(b"neither")
    return root


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.integers(1, 4),
    st.integers(1, 50),
    st.none() | st.integers(-(2**70), 2**70),
    st.integers(1, 60),
)
def test_the_workers_get_every_row_once_and_equally_many(
    directory, num_workers, batch_size, seed, window
):
    source = ParquetSource(str(directory))
    window = window if seed is not None else 1
    readers = [
        DirectReader(source, worker, num_workers, seed=seed, shuffle_rows=window)
        for worker in range(num_workers)
    ]
    for _ in range(2):
        shares = [epoch(reader, batch_size) for reader in readers]
        found = []
        for batches in shares:
            for batch in batches:
                ns, some, pair, texts = (
                    values(batch.columns[name]) for name in source.schema.names
                )
                assert some == [[float(n)] * (n % 3) for n in ns]
                assert pair == [[n, -n] for n in ns]
                assert texts == [f"row {n}" for n in ns]
                found += ns
        assert sorted(found) == list(range(120))
        counts = [sum(batch.num_rows for batch in batches) for batches in shares]
        assert max(counts) - min(counts) <= 1


NAMED: dict[str, tuple[pa.Array, list[Any], str]] = {
    "bool": (pa.array([True, False, True]), [True, False, True], "bool"),
    "int8": (pa.array([1, -2, 3], pa.int8()), [1, -2, 3], "int8"),
    "uint64": (pa.array([1, 2**64 - 1, 3], pa.uint64()), [1, 2**64 - 1, 3], "uint64"),
    "half": (pa.array(np.array([1, 0.5, 3], np.float16)), [1, 0.5, 3], "float16"),
    "double": (pa.array([0.1, 2, 3]), [0.1, 2, 3], "float64"),
    "decimal": (
        pa.array([decimal.Decimal("0.10"), decimal.Decimal("-7.25"), decimal.Decimal(3)]),
        [0.1, -7.25, 3.0],
        "float64",
    ),
    "long_decimal": (
        pa.array(
            [decimal.Decimal("1e20"), decimal.Decimal(2), decimal.Decimal(3)], pa.decimal128(38, 3)
        ),
        [1e20, 2.0, 3.0],
        "float64",
    ),
    "date": (
        pa.array(
            [datetime.date(1969, 12, 31), datetime.date(1970, 1, 2), datetime.date(2026, 1, 1)]
        ),
        [-1, 1, 20454],
        "int32",
    ),
    "when": (
        pa.array(
            [datetime.datetime(1970, 1, 1, 0, 0, n, n, UTC) for n in range(3)],
            pa.timestamp("us", "UTC"),
        ),
        [0, 1_000_001, 2_000_002],
        "int64",
    ),
    "nanos": (pa.array([-1001, 0, 1999], pa.timestamp("ns")), [-1, 0, 1], "int64"),
    "millis": (pa.array([-1, 0, 5], pa.timestamp("ms")), [-1000, 0, 5000], "int64"),
    "text": (pa.array(["ä", "", "b"]), ["ä", "", "b"], ""),
    "coded": (pa.array(["x", "y", "x"]).dictionary_encode(), ["x", "y", "x"], ""),
    "binary": (pa.array([b"\xff", b"", b"b"]), [b"\xff", b"", b"b"], ""),
    "fixed_binary": (pa.array([b"ab", b"cd", b"ef"], pa.binary(2)), [b"ab", b"cd", b"ef"], ""),
    "fixed_list": (
        pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
        [[1, 2], [3, 4], [5, 6]],
        "int32",
    ),
    "ragged": (pa.array([[1.5], [], [2.5, 3.5]]), [[1.5], [], [2.5, 3.5]], "float64"),
    "tags": (pa.array([["ä", ""], [], ["b"]]), [["ä", ""], [], ["b"]], ""),
    "tag_pairs": (pa.array([["a", "b"]] * 3), [["a", "b"]] * 3, ""),
    "flags": (
        pa.array([[True, False], [False, False], [True, True]]),
        [[True, False], [False, False], [True, True]],
        "bool",
    ),
}


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_types_become_what_is_promised(tmp_path, version):
    stored = pa.table({name: array for name, (array, _, _) in NAMED.items()})
    path = write(tmp_path / "file", stored, data_page_version=version, row_group_size=2)
    source = ParquetSource(str(path))
    assert {spec.name: spec.dtype for spec in source.schema.columns} == {
        name: dtype for name, (_, _, dtype) in NAMED.items()
    }
    for batch in epoch(DirectReader(source, 0, 1), 2):
        for name, (_, _, dtype) in NAMED.items():
            column = batch.columns[name]
            held = column.values if isinstance(column, Ragged) else column
            assert held.dtype == (dtype or object)
    assert rows_of(source) == {name: expected for name, (_, expected, _) in NAMED.items()}


def test_int96_timestamps_of_spark_keep_their_years(tmp_path):
    years = [datetime.datetime(year, 7, 1, 12, 0, 0, 5, UTC) for year in (1000, 1969, 2026, 3000)]
    rows = pa.table({"at": pa.array(years, pa.timestamp("us", "UTC"))})
    path = write(tmp_path / "file", rows, use_deprecated_int96_timestamps=True)
    zero = datetime.datetime(1970, 1, 1, tzinfo=UTC)
    assert read(path)["at"] == [
        (year - zero) // datetime.timedelta(microseconds=1) for year in years
    ]


def test_fields_of_structs_and_vectors_are_columns(tmp_path):
    rows = pa.table(
        {
            "s": [{"a": 1, "deep": {"b": "x"}}, {"a": 2, "deep": {"b": "y"}}],
            "v": pa.array(
                [
                    {"type": 1, "values": [1.0, 0.0, 2.0]},
                    {"type": 0, "size": 3, "indices": [2], "values": [5.0]},
                ],
                VECTOR,
            ),
            "a.b": [7, 8],
        }
    )
    path = write(tmp_path / "file", rows)
    assert read(path) == {
        "s.a": [1, 2],
        "s.deep.b": ["x", "y"],
        "v": [[1.0, 0.0, 2.0], [0.0, 0.0, 5.0]],
        "a.b": [7, 8],
    }
    assert read(path, columns=["s.deep.b"]) == {"s.deep.b": ["x", "y"]}
    assert read(path, columns=["a.b", "s.a"]) == {"a.b": [7, 8], "s.a": [1, 2]}


def test_what_has_no_place_in_a_column_is_refused_unless_it_is_not_asked_for(tmp_path):
    rows = pa.table(
        {
            "n": [1],
            "words": [[b"a"]],
            "tags": [["a", "b"]],
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        }
    )
    path = write(tmp_path / "file", rows)
    with pytest.raises(
        FeedSettingsError, match="column 'words' is list<element: binary>; a column is"
    ):
        ParquetSource(str(path))
    assert read(path, columns=["n"]) == {"n": [1]}
    with pytest.raises(FeedSettingsError, match="shapes: 'tags' is not a requested list of num"):
        read(path, columns=["tags"], shapes={"tags": (2,)})
    with pytest.raises(DataError, match=r"has no column 'm'; it has n: int64, words"):
        read(path, columns=["n", "m"])


def test_nulls_are_refused_or_replaced(tmp_path):
    rows = pa.table(
        {
            "n": [1, None, 3],
            "s": ["a", None, "a"],
            "l": pa.array([[1.0], [None], [3.0]]),
            "d": pa.array([None, datetime.date(1970, 1, 2), None]),
            "st": pa.array([{"x": 1}, None, {"x": 3}]),
        }
    )
    path = write(tmp_path / "file", rows, write_statistics=False)
    fills = {"n": -1, "s": "none", "l": 0.5, "d": 9, "st.x": 0}
    assert read(path, nulls=fills) == {
        "n": [1, -1, 3],
        "s": ["a", "none", "a"],
        "l": [[1.0], [0.5], [3.0]],
        "d": [9, 1, 9],
        "st.x": [1, 0, 3],
    }
    for name in fills:
        row = 0 if name == "d" else 1
        with pytest.raises(DataError, match=rf"row group 0, row {row}: column '{name}': null"):
            read(path, columns=[name])
    with pytest.raises(FeedSettingsError, match="the column is int64, which cannot hold that"):
        read(path, nulls={**fills, "n": "x"})
    with pytest.raises(FeedSettingsError, match="'x' is not one of the columns"):
        read(path, nulls={"x": 1})


def test_shapes_are_found_or_said(tmp_path):
    rows = pa.table({"image": [[float(n)] * 4 for n in range(5)]})
    path = write(tmp_path / "file", rows)
    assert ParquetSource(str(path)).schema.columns[0].shape == (4,)
    batch = epoch(
        DirectReader(ParquetSource(str(path), ParquetRequest(shapes={"image": (2, 2)})), 0, 1), 5
    )[0]
    np.testing.assert_array_equal(
        np.asarray(batch.columns["image"]), np.arange(5.0)[:, None, None] * np.ones((2, 2))
    )
    spec = ParquetSource(str(path), ParquetRequest(shapes={"image": None})).schema.columns[0]
    assert spec.kind == "ragged"
    by_chance = write(tmp_path / "chance", pa.table({"l": [[1], [2, 3, 4]]}))  # 2 on average
    assert read(by_chance) == {"l": [[1], [2, 3, 4]]}
    late = write(tmp_path / "late", pa.table({"l": [[1, 2]] * 256 + [[1], [2, 3, 4]]}))
    with pytest.raises(
        DataError,
        match=r"row 256: column 'l': 1 values, expected 2 \(shape \(2,\)\); pass shapes={'l': No",
    ):
        read(late)


def test_keys_of_directories_are_columns(tmp_path):
    for day, name in (("2026-01-31", "a%20b"), ("2026-02-01", "__HIVE_DEFAULT_PARTITION__")):
        for hour in (1, 23):
            write(
                tmp_path / f"day={day}" / f"hour={hour}" / f"who={name}" / "f.parquet",
                table(range(2)),
            )
    assert set(read(tmp_path, partitions=False)) == {"n", "some", "pair", "s"}
    with pytest.raises(DataError, match=r"'who' is null; pass nulls=.*, or partitions=False"):
        read(tmp_path)
    everything = read(tmp_path, nulls={"who": "nobody"})
    assert list(everything) == ["n", "some", "pair", "s", "day", "hour", "who"]
    assert everything["hour"] == [1, 1, 23, 23] * 2
    assert set(read(tmp_path / "day=2026-01-31", columns=["hour", "who"])) == {"hour", "who"}
    with pytest.raises(DataError, match="has no column 'day'"):  # as in Spark: above what is read
        read(tmp_path / "day=2026-01-31", columns=["day"])
    found = read(tmp_path, columns=["hour", "n", "day", "who"], nulls={"who": "nobody"})
    assert found["hour"] == [1, 1, 23, 23] * 2
    assert found["day"] == ["2026-01-31"] * 4 + ["2026-02-01"] * 4
    assert found["who"] == ["a b"] * 4 + ["nobody"] * 4
    with pytest.raises(DataError, match="'who' is null"):
        read(tmp_path, columns=["who"])
    assert read(tmp_path, columns=["n"], filters=[("hour", ">", 20), ("n", "=", 1)]) == {
        "n": [1, 1]
    }


def test_a_column_of_the_files_and_of_the_directories_is_refused(tmp_path):
    for day in (1, 2):
        path = tmp_path / f"day={day}" / "f"
        write(path, pa.table({"day": [day + 10, day + 20], "n": [day, -day], "daytime": [3, 4]}))
    both: list[dict[str, Any]] = [
        {},
        {"columns": ["day"]},
        {"columns": ["n"], "filters": [("day", "=", 1)]},
        {"columns": ["n"], "filters": pc.field("day") == 1},
    ]
    for request in both:
        which = ", and filters name it;" if "filters" in request else ";"
        said = f"'day' is a column of the file and a key of its directories{which} pass"
        with pytest.raises(FeedSettingsError, match=said):
            read(tmp_path, **request)
    assert read(tmp_path, columns=["n"]) == {"n": [1, -1, 2, -2]}
    for filters in ([("daytime", "=", 4)], pc.field("daytime") == 4):
        assert read(tmp_path, columns=["n"], filters=filters) == {"n": [-1, -2]}
    assert read(tmp_path, columns=["day"], filters=[("day", ">", 11)], partitions=False) == {
        "day": [21, 12, 22]
    }


def test_a_text_that_equals_the_name_of_a_key_names_no_column(tmp_path):
    text, odd = pc.field("s"), pc.field('a"b')
    for day in (1, 2):
        rows = pa.table(
            {"day": [day] * 3, "s": ["day", 'a "day', 'x"day'], 'a"b': ["day", "b", "c"]}
        )
        write(tmp_path / f"day={day}" / "f", rows)
    for filters in (text == "day", text.isin(["day", "x"]), pc.starts_with(text, "day")):
        assert read(tmp_path, columns=["s"], filters=filters) == {"s": ["day", "day"]}
    assert read(tmp_path, columns=["s"], filters=text == 'a "day') == {"s": ['a "day'] * 2}
    day = pc.field("day") == 1
    for filters in (
        (text == "day") & day,
        day | (text == "day"),
        (odd == "b") & day & (odd == "b"),
        (text == 'a "') & day & (text == '" b'),
        text.isin(['x"', "x"]) & day & (text == "day"),
    ):
        with pytest.raises(FeedSettingsError, match=r"'day' is .* filters name it"):
            read(tmp_path, columns=["s"], filters=filters)


@pytest.mark.parametrize("action", ["fail", "skip"])
def test_what_only_later_files_have_is_not_left_out_without_a_word(tmp_path, action):
    """Whichever file comes first, and though the policy is to skip files that differ."""
    write(tmp_path / "old" / "f", pa.table({"n": [1]}))
    write(tmp_path / "sub" / "f", pa.table({"n": [2], "new": [2.5], "s": [{"a": 1}]}))

    def found(name: str = "*", **request: Any) -> dict[str, list[Any]]:
        bad = BadData(action)
        return rows_of(ParquetSource(f"{tmp_path}/{name}", ParquetRequest(**request), bad=bad))

    said = r"sub/f has columns that .*old/f lacks: 'new', 's\.a'; name the columns .*columns="
    with pytest.raises(FeedSettingsError, match=said):
        found()
    assert found(columns=["n"]) == {"n": [1, 2]}
    (tmp_path / "old").rename(tmp_path / "new=3")
    (tmp_path / "sub").rename(tmp_path / "new=4")
    both = r"new=4/f: 'new' is a column of the file and a key of its directories"
    for request in ({}, {"columns": ["n", "new"]}, {"filters": [("new", "=", 3)]}):
        with pytest.raises(FeedSettingsError, match=both):
            found("", **request)
    assert found("", columns=["n"]) == {"n": [1, 2]}


def sparse(size: int, items: dict[int, float]) -> dict[str, Any]:
    indices, found = list(items), list(items.values())
    return {"type": 0, "size": size, "indices": indices, "values": found}


def blocks(source: ParquetSource) -> list[tuple[Any, ...]]:
    return [
        block
        for file in source.files()
        for piece, num_rows in enumerate(file.piece_rows or ())
        for block in source.read(Split(file.path, 0, num_rows, piece))
    ]


def test_sparse_vectors_become_dense_in_blocks_of_some_bytes(tmp_path):
    """As stored the file is small; as dense vectors, a hundred times a block of 8 MiB and more."""
    sizes = [1 << 16] * 500 + [1 << 21] + [3] * 1000 + [1 << 18] * 300
    vectors = [sparse(size, {row % size: 1.0 + row}) for row, size in enumerate(sizes)]
    rows = pa.table({"n": list(range(len(sizes))), "f": pa.array(vectors, VECTOR)})
    write(tmp_path / "f", rows)
    source = ParquetSource(str(tmp_path), ParquetRequest(shapes={"f": None}))
    assert source.files()[0].held_bytes > 8 << 20
    at = 0
    for ns, vector in blocks(source):
        assert isinstance(vector, Ragged)
        assert vector.values.nbytes <= 8 << 20 or len(ns) == 1
        for row, items in zip(
            ns.tolist(), np.split(vector.values, vector.offsets[1:-1]), strict=True
        ):
            assert (row, len(items)) == (at, sizes[at])
            assert items[row % sizes[row]] == items.sum() == 1.0 + row
            at += 1
    assert at == len(sizes)
    alike = write(tmp_path / "alike" / "f", rows.slice(500 + 1 + 1000))
    assert ParquetSource(str(alike)).schema.columns[1].shape == (1 << 18,)
    every = blocks(ParquetSource(str(alike), ParquetRequest(filters=[("n", "!=", 1502)])))
    assert {len(ns) for ns, _ in every} == {4, 3}
    assert sum(len(ns) for ns, _ in every) == 299


@pytest.mark.attack("A20")
@pytest.mark.parametrize(
    ("vector", "expected"),
    [
        (sparse(2**31 - 1, {}), r"a vector of 2147483647 items takes 17179869176 bytes, at most "),
        (sparse(-1, {}), "a vector of -1 items"),
        (sparse(3, {3: 1.0}), "an item at 3 of a vector of 3 items"),
        (sparse(3, {-1: 1.0}), "an item at -1 of a vector of 3 items"),
        ({**sparse(3, {}), "values": [1.0]}, "0 indices of 1 values"),
        ({**sparse(3, {1: 2.0}), "type": 1}, "1 indices of a dense vector"),
    ],
)
def test_vectors_that_cannot_be_are_refused_before_they_are_dense(tmp_path, vector, expected):
    good = sparse(3, {0: 1.0, 2: 2.0})
    write(tmp_path / "f", pa.table({"f": pa.array([good, vector, good], VECTOR)}))
    request = ParquetRequest(shapes={"f": None})
    with pytest.raises(DataError, match=f"f: row group 0, row 1: column 'f': {expected}"):
        blocks(ParquetSource(str(tmp_path), request))
    assert not blocks(ParquetSource(str(tmp_path), request, bad=BadData("skip")))


SPARK = "org.apache.spark."
SCHEMA = {f"{SPARK}sql.parquet.row.metadata": "{}"}
OLD, NEW = (datetime.datetime(year, 1, 1) for year in (1500, 2000))
DATES = {"x": [None, NEW.date(), OLD.date()]}
TIMES = {"x": [None, NEW, datetime.datetime(1899, 12, 31)]}
LISTS = {"x": [[NEW.date()], [NEW.date(), OLD.date(), None], []]}


@pytest.mark.parametrize(
    ("columns", "written_by", "row"),
    [
        (DATES, {**SCHEMA, f"{SPARK}version": "2.4.8"}, 2),
        (DATES, SCHEMA, 2),  # older ones have no version
        (DATES, {**SCHEMA, f"{SPARK}version": "4.3.0", f"{SPARK}legacyDateTime": ""}, 2),
        (DATES, {**SCHEMA, f"{SPARK}version": "3.0.1"}, None),
        (DATES, {**SCHEMA, f"{SPARK}version": "10.0.0", f"{SPARK}legacyINT96": ""}, None),
        (DATES, {}, None),  # pyarrow, and Spark's default for what has no version
        (LISTS, SCHEMA, 1),
        (TIMES, {**SCHEMA, f"{SPARK}version": "2.4.8"}, 2),
        (TIMES, {**SCHEMA, f"{SPARK}version": "3.0.1"}, None),
        ("INT96", {**SCHEMA, f"{SPARK}version": "3.0.1"}, 2),
        ("INT96", {**SCHEMA, f"{SPARK}version": "3.1.0"}, None),
        ("INT96", {**SCHEMA, f"{SPARK}version": "4.3.0", f"{SPARK}legacyINT96": ""}, 2),
        ("INT96", {**SCHEMA, f"{SPARK}version": "4.3.0", f"{SPARK}legacyDateTime": ""}, None),
    ],
)
def test_days_of_the_julian_calendar_are_refused(tmp_path, columns, written_by, row):
    """Spark 3 and newer would shift them by up to 10 days; read as they are they are others."""
    is_int96 = columns == "INT96"
    rows = pa.table(TIMES if is_int96 else columns).replace_schema_metadata(written_by)
    options = {"use_deprecated_int96_timestamps": is_int96}
    write(tmp_path / "f", rows, **options)
    write(tmp_path / "new", rows.replace_schema_metadata(None), **options)  # of another writer
    nulls = {"x": 7}
    if row is None:
        assert len(read(tmp_path, nulls=nulls)["x"]) == 6
        return
    what = "timestamp before 1900-01-01" if rows.schema[0].type == pa.timestamp("us") else "date"
    with pytest.raises(DataError, match=f"f: row group 0, row {row}: column 'x': a {what}.*Julian"):
        read(tmp_path, nulls=nulls)
    assert len(read(tmp_path / "new", nulls=nulls)["x"]) == 3
    if columns is not LISTS:
        late = read(tmp_path, nulls=nulls, filters=pc.field("x") > rows["x"][1].as_py())
        assert late == {"x": []}
        only = read(tmp_path, filters=pc.field("x") == rows["x"][1].as_py())
        assert len(only["x"]) == 2


@pytest.mark.parametrize("action", ["fail", "skip"])
def test_a_column_that_no_file_has_is_named(tmp_path, action):
    for name in "ab":
        write(tmp_path / name, pa.table({"n": [1]}))
    with pytest.raises(DataError, match="a has no column 'typo'; it has n: int64"):
        ParquetSource(str(tmp_path), ParquetRequest(columns=["typo"]), bad=BadData(action))


def test_columns_that_cannot_be_told_apart_are_refused(tmp_path):
    path = write(tmp_path / "f", pa.table({"a.b": [[1], [2]], "a": [[3.0], [4.0]], "c": [5, 6]}))
    assert read(path, columns=["a.b", "c"]) == {"a.b": [[1], [2]], "c": [5, 6]}
    with pytest.raises(DataError, match=r"columns 'a' and 'a\.b' cannot be distinguished"):
        read(path)
    path = write(tmp_path / "g", pa.table({"a.b": [1, None], "a": [3, 4]}))
    assert read(path, columns=["a"]) == {"a": [3, 4]}


def test_a_later_file_whose_list_has_parts_of_another_column_is_refused(tmp_path):
    write(tmp_path / "f", pa.table({"a": [[1], [2]]}))
    write(tmp_path / "g", pa.table({"a": [[1], [2]], "a.b": [1, 2]}))
    with pytest.raises(DataError, match=r"g: columns 'a' and 'a\.b' cannot be distinguished"):
        read(tmp_path, columns=["a"])
    write(tmp_path / "e", pa.table({"a": [[1], [2]], "a.b": [1, 2]}))
    asked = ParquetRequest(columns=["a"])
    source = ParquetSource(str(tmp_path), asked, bad=BadData("skip"))
    assert [Path(file.path).name for file in source.files()] == ["f"]


NAMES = st.lists(st.sampled_from(["a", "b", "", "ab"]), min_size=1, max_size=4).map(".".join)


@given(NAMES, st.sets(NAMES))
def test_a_part_of_a_column_has_its_name_in_front(path, columns):
    owners = [name for name in columns if path == name or path.startswith(f"{name}.")]
    assert owner_of(path, columns) == max(owners, key=len, default=None)


def test_many_list_columns_are_not_compared_with_each_other(tmp_path, monkeypatch):
    def asked(count):
        asking = Mock(wraps=owner_of)
        monkeypatch.setattr(footer, "owner_of", asking)
        lists = {f"n{n}": pa.array([[1.0, 2.0]]) for n in range(count)}
        path = write(tmp_path / f"{count}", pa.table(lists))
        assert ParquetSource(path).schema.columns[-1].shape == (2,)
        return asking.call_count

    assert asked(40) == 2 * asked(20)


def test_functions_that_know_no_dictionaries_filter_too(tmp_path):
    path = write(tmp_path / "f", pa.table({"s": ["a", "bcd", None, "bcd"], "n": range(4)}))
    assert read(path, columns=["n", "s"], filters=pc.utf8_length(pc.field("s")) > 1) == {
        "n": [1, 3],
        "s": ["bcd", "bcd"],
    }


def test_a_fraction_is_not_cut_off_to_replace_a_null(tmp_path):
    path = write(tmp_path / "f", pa.table({"n": [1, None]}))
    assert read(path, nulls={"n": 2.0}) == {"n": [1, 2]}
    with pytest.raises(FeedSettingsError, match="int64, which cannot hold that"):
        read(path, nulls={"n": 1.5})


def test_a_date_or_a_datetime_replaces_a_null_as_in_a_feed(tmp_path):
    day, time = datetime.date(1970, 1, 3), datetime.datetime(1970, 1, 1, 0, 0, 1)
    columns = {
        "d": pa.array([None], pa.date32()),
        "days": pa.array([[None]], pa.list_(pa.date32())),
        "ms": pa.array([None], pa.timestamp("ms")),
        "utc": pa.array([None], pa.timestamp("us", "UTC")),
    }
    path = write(tmp_path / "f", pa.table(columns))
    zone = datetime.timezone(datetime.timedelta(hours=1))
    fills = {"d": day, "days": day, "ms": time, "utc": time.replace(tzinfo=zone)}
    found = {"d": [2], "days": [[2]], "ms": [1_000_000], "utc": [1_000_000 - 3_600_000_000]}
    assert read(path, nulls=fills) == found
    exact = datetime.datetime(2500, 1, 1, microsecond=7, tzinfo=datetime.UTC)
    expected = {**found, "ms": [int(exact.timestamp()) * 1_000_000 + 7]}
    assert read(path, nulls={**fills, "ms": exact}) == expected
    for name, value in (("d", time), ("ms", day)):
        with pytest.raises(FeedSettingsError, match="which cannot hold that"):
            read(path, nulls={**fills, name: value})


def test_a_number_does_not_become_infinite_to_replace_a_null(tmp_path):
    path = write(tmp_path / "f", pa.table({"f": pa.array([1, None], pa.float32())}))
    assert read(path, nulls={"f": float("inf")}) == {"f": [1, float("inf")]}
    with pytest.raises(FeedSettingsError, match=r"1e\+39}: the column is float, which cannot hold"):
        read(path, nulls={"f": 1e39})


FILTERS = [
    [("n", ">", 40)],
    [("n", ">=", 16), ("n", "<", 20)],
    [[("n", "<", 3)], [("s", "==", "row 90")]],
    [("s", "in", ["row 1", "row 2", "no"])],
    [("n", ">", 1000)],
    pc.field("n") % 2 == 0 if hasattr(pc.Expression, "__mod__") else pc.field("n") > 7,
    (pc.field("n") + 1 < 20) & ~pc.field("s").isin(["row 3"]),
]


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_keep_the_rows_that_pyarrow_keeps(directory, filters):
    parts = [directory / "part-0.parquet", directory / "sub" / "part-0.parquet"]
    oracle = [n for part in parts for n in pq.read_table(part, filters=filters)["n"].to_pylist()]
    found = read(directory, columns=["pair"], filters=filters)
    assert found == {"pair": [[n, -n] for n in oracle]}


NAN_FILTERS = [
    [("x", "!=", 5.0)],
    [("x", "not in", [5.0])],
    [[("x", "!=", 5.0), ("n", "<", 3)], [("n", "==", 9)]],
    ~(pc.field("x") == 5.0),
    ~(pc.field("x") < 6.0),
    pc.is_nan(pc.field("x")),
]


@pytest.mark.parametrize("filters", NAN_FILTERS)
def test_rows_that_are_not_a_number_are_kept_whatever_their_row_group(tmp_path, filters):
    rows = pa.table({"n": [0, 1, 2, 3], "x": [5.0, 5.0, float("nan"), 5.0]})
    path = write(tmp_path / "f", rows, row_group_size=4)
    assert read(path, columns=["n"], filters=filters) == {"n": [2]}


def test_other_columns_still_exclude_row_groups_beside_a_float(tmp_path):
    path = write(tmp_path / "f", pa.table({"n": [0, 1], "x": [5.0, 5.0]}), row_group_size=1)
    request = ParquetRequest(filters=[("x", "!=", 4.0), ("n", ">", 0)])
    assert [file.piece_rows for file in ParquetSource(path, request).files()] == [(0, 1)]


def test_row_groups_without_a_wanted_row_are_not_dealt(directory):
    source = ParquetSource(
        str(directory), ParquetRequest(filters=[("n", ">=", 64), ("n", "<", 97)])
    )
    assert [file.piece_rows for file in source.files()] == [
        (0, 0, 0, 0, 6),
        (0,),
        (9, 9, 9, 0, 0, 0),
    ]


@pytest.mark.parametrize(
    "filters", [5, "n > 3", [("n", "~", 3)], [("n", ">")], [("zz", ">", 3)], [("n", ">", "x")]]
)
def test_filters_that_cannot_be_are_refused(directory, filters):
    with pytest.raises(FeedSettingsError, match="filters"):
        ParquetSource(str(directory), ParquetRequest(filters=filters))


@pytest.mark.parametrize(
    "request_",
    [
        {"columns": "n"},
        {"columns": []},
        {"columns": ["n", "n"]},
        {"columns": [1]},
        {"shapes": {"n": (2,)}},
        {"shapes": {"pair": (0,)}},
    ],
)
def test_requests_that_cannot_be_are_refused(directory, request_):
    with pytest.raises(FeedSettingsError):
        ParquetSource(str(directory), ParquetRequest(**request_))


def test_only_the_columns_asked_for_are_read(tmp_path, monkeypatch):
    rows = pa.table({name: np.random.default_rng(1).random(20_000) for name in "abcdefgh"})
    path = write(tmp_path / "file", rows, row_group_size=10_000)
    ranges: list[int] = []
    fetch, fill = LocalReader.read_range, LocalReader.read_into

    def counted(self: LocalReader, offset: int, length: int) -> bytes:
        ranges.append(length)
        return fetch(self, offset, length)

    def filled(self: LocalReader, offset: int, buffer: memoryview) -> int:
        ranges.append(len(buffer))
        return fill(self, offset, buffer)

    monkeypatch.setattr(LocalReader, "read_range", counted)
    monkeypatch.setattr(LocalReader, "read_into", filled)
    assert read(path, columns=["d"]) == {"d": rows["d"].to_pylist()}
    needed = sum(
        pq.read_metadata(path).row_group(n).column(3).total_compressed_size for n in (0, 1)
    )
    assert sum(ranges) < needed + (66 << 10)
    ranges.clear()
    assert len(read(path, columns=["a", "b", "c"])["a"]) == 20_000
    assert len(ranges) == 3  # the footer, and one for each row group: neighbours come together


@pytest.mark.parametrize("filters", [None, [("n", ">", 0)]])
@pytest.mark.parametrize("strict_first", [True, False])
def test_files_differ_in_whether_items_of_lists_may_be_null(tmp_path, strict_first, filters):
    def save(name: str, may_be_null: bool, values: list[Any]) -> None:
        item = pa.field("element", pa.int64(), nullable=may_be_null)
        write(tmp_path / name, pa.table({"n": [1], "v": pa.array([values], pa.list_(item))}))

    save("a", not strict_first, [1, 2])
    save("b", strict_first, [3, 4])
    found = read(tmp_path, columns=["v"], filters=filters)
    assert found == {"v": [[1, 2], [3, 4]]}
    save("b", strict_first, [3, None] if strict_first else [3, 4])
    if strict_first:
        with pytest.raises(DataError, match=r"b: .*'v'.*null"):
            read(tmp_path, columns=["v"], filters=filters)
    write(tmp_path / "b", pa.table({"n": [1], "v": [[0.5, 1.5]]}))
    with pytest.raises(DataError, match=r"'v': expected list<.*int64.*found list<.*double"):
        read(tmp_path, columns=["v"], filters=filters)


def test_a_remote_row_group_is_in_memory_once():
    """Two row groups are held as they are stored: joining the ranges of one would make three."""
    piece, num_bytes = bytes(range(256)) * 4096, 16 << 20

    class Remote:
        def start_range(self, offset: int, length: int) -> Callable[[], bytes]:
            at = offset % len(piece)
            return lambda: bytes(memoryview(piece)[at : at + length])

    config = FileSystemConfig(range_bytes=len(piece), ranges_in_flight=2)
    result: Future[list[tuple[int, bytearray]]] = Future()
    tracemalloc.start()
    try:
        _fetch(Remote(), [(0, num_bytes), (5, 300)], config, result, threading.Event())  # type: ignore[arg-type]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (first, whole), (second, part) = result.result()
    assert (first, second) == (0, 5)
    assert whole == piece * (num_bytes // len(piece))
    assert part == piece[5:300]
    assert peak_bytes < 1.5 * num_bytes
