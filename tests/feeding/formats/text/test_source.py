"""Lines and CSV read directly: every line once wherever files are cut, types, bad lines named."""

from __future__ import annotations

import csv as csv_format
import gzip
import io
import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeding.columnar.batch import Batch
from feeding.errors import DataError, FeedSettingsError, FileChanged
from feeding.formats.csv.options import CsvRequest
from feeding.formats.csv.source import CsvSource
from feeding.formats.text.lines import LineLimits, LineReader
from feeding.formats.text.source import TextSource
from feeding.reading import splits
from feeding.reading.bad_records import BadData
from feeding.reading.reader import DirectReader
from feeding.reading.runs import Source
from feeding.reading.splits import Split

CSV = "n,x,s,flag\n1,0.5,a b,true\n2,-1e3,,false\n3,nan,ü,true\n"


def rows_of(source: Source, worker: int = 0, num_workers: int = 1) -> dict[str, list[Any]]:
    reader = DirectReader(source, worker, num_workers)
    batches = []
    while isinstance(batch := reader.next_batch(3), Batch):
        batches.append(batch)
    return {
        name: [value for batch in batches for value in batch.arrays[place].tolist()]  # type: ignore[union-attr]
        for place, name in enumerate(source.schema.names)
    }


def read(path: Path | str, **request: Any) -> dict[str, list[Any]]:
    return rows_of(CsvSource(str(path), CsvRequest(**request)))


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(["", "a", "bc", "ü", "longer line"]), max_size=12),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.lists(st.integers(0, 80), max_size=4),
    st.integers(1, 9),
)
def test_ranges_that_adjoin_give_every_line_once(lines, end, has_end, cuts, block_bytes):
    text = end.join(lines) + (end if has_end and lines else "")
    data = text.encode()
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    found = b""
    numbers = []
    for start, stop in itertools.pairwise(bounds):
        file = io.BytesIO(data[max(start - 1, 0) :])
        limits = LineLimits(block_bytes=block_bytes)
        for block in LineReader(file, "f", span=(start, stop), limits=limits).blocks():
            assert block.first_byte == len(found)
            assert start <= block.first_byte < stop
            found += block.data
            numbers += [] if block.first_line is None else [block.first_line]
    assert found == data
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_get_every_line_once(tmp_path, zipped, num_workers, monkeypatch):
    monkeypatch.setattr(splits, "PIECE_BYTES", 100)
    lines = [f"line {n}" * (n % 5) for n in range(200)]
    for part in range(4):
        data = "\n".join(lines[50 * part : 50 * part + 50]).encode()
        path = tmp_path / (f"{part}.gz" if zipped and part % 2 else f"{part}")
        path.write_bytes(gzip.compress(data) if zipped else data)  # gzip by name, and without
    source = TextSource(str(tmp_path))
    shares = [rows_of(source, worker, num_workers)["value"] for worker in range(num_workers)]
    assert sorted(line for share in shares for line in share) == sorted(lines)


def test_types_are_found_or_said(tmp_path):
    (tmp_path / "a.csv").write_text("\ufeff" + CSV)
    found = read(tmp_path)
    rows = list(csv_format.DictReader(io.StringIO(CSV)))
    assert found["n"] == [int(row["n"]) for row in rows]
    np.testing.assert_array_equal(found["x"], [float(row["x"]) for row in rows])
    assert found["s"] == [row["s"] for row in rows]
    assert found["flag"] == [row["flag"] == "true" for row in rows]
    source = CsvSource(
        str(tmp_path), CsvRequest(columns={"x": "float32", "n": "uint8", "s": "bytes"})
    )
    assert [str(spec) for spec in source.schema.columns] == ["x: float32", "n: uint8", "s: bytes"]
    assert rows_of(source)["s"] == [b"a b", b"", "ü".encode()]
    assert read(tmp_path, columns=["flag", "n"]) == {"flag": [True, False, True], "n": [1, 2, 3]}


def test_formats(tmp_path):
    (tmp_path / "a").write_text("1;x\n2;y\n")
    assert read(tmp_path, header=False, delimiter=";") == {"_c0": [1, 2], "_c1": ["x", "y"]}
    assert read(tmp_path, header=["n", "s"], delimiter=";", columns=["s"]) == {"s": ["x", "y"]}
    (tmp_path / "a").write_text('n,s\n1,"x, ""y"""\r\n\n2,z')
    assert read(tmp_path) == {"n": [1, 2], "s": ['x, "y"', "z"]}
    (tmp_path / "a").write_bytes(gzip.compress(b'n,s\n1,"x\ny"\n2,z\n'))
    assert read(tmp_path, quoted_newlines=True) == {"n": [1, 2], "s": ["x\ny", "z"]}
    (tmp_path / "b").write_text("s,n\nw,3\n")  # another order
    assert read(tmp_path, quoted_newlines=True) == {"n": [1, 2, 3], "s": ["x\ny", "z", "w"]}
    (tmp_path / "b").write_text("s,more,n\nw,0,3\n")
    (tmp_path / "a").write_text("s,n\n")
    assert read(tmp_path / "a") == {"s": [], "n": []}
    assert read(tmp_path, columns={"s": "str", "n": "int64"}) == {"s": ["w"], "n": [3]}


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(-(2**62), 2**62),
            st.text(st.characters(exclude_categories=["C", "Z"]) | st.just('"'), max_size=5),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 3),
    st.integers(1, 60),
    st.booleans(),
)
def test_what_python_writes_is_read(tmp_path_factory, rows, num_workers, block_bytes, across):
    path = tmp_path_factory.getbasetemp() / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv_format.writer(file).writerows([("n", "s"), *rows])
    source = CsvSource(
        str(path),
        CsvRequest(columns={"n": "int64", "s": "str"}, quoted_newlines=across),
        limits=LineLimits(block_bytes=block_bytes),
    )
    shares = [rows_of(source, worker, num_workers) for worker in range(num_workers)]
    found = [row for share in shares for row in zip(share["n"], share["s"], strict=True)]
    assert found == rows


BAD = {
    "values": ("n,s\n1,a\n2\n3,c\n4,d\n", r"line 3: .*Expected 2 columns, got 1", [1, 3, 4]),
    "no number": (
        "n,s\n1,a\n2,b\nx,c\n4,d\n",
        r"line 4: .*column #0.* invalid value 'x'",
        [1, 2, 4],
    ),
    "empty": (
        "n,s\n1,a\n,b\n3,c\n4,d\n",
        r"line 3: column 'n': null; pass nulls={'n': value}",
        [1, 3, 4],
    ),
    "open quote": (
        'n,s\n1,a\n2,"b\n3,c\n4,d"\n',
        r"line 3: a quoted value does not end",
        [1, 3, 4],
    ),
    "open quote at the end": ('n,s\n1,a\n2,"b\n', r"line 3: .*pass quoted_newlines=True", [1]),
    "a float too large": (
        "n,s,x\n1,a,1\n2,b,1e39\n3,c,-inf\n",
        r"line 3: column 'x' has 1e39, which float32 cannot hold; name it float64",
        [1, 3],
    ),
    "a float too large for any": (
        "n,s,y\n1,a,1\n2,b,-1e400\n3,c,Infinity\n",
        r"line 3: column 'y' has -1e400, which float64 cannot hold; name it str",
        [1, 3],
    ),
    "carriage return": (
        "n,s\n1,a\n2,b\r8,x\n3,c\n",
        "line 3: a carriage return ends a row",
        [1, 3],
    ),
    "too large": (f"n,s\n1,a\n2,b\n{2**64},c\n", r"line 4: .* invalid value", [1, 2]),
}


@pytest.mark.fault("F45")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_or_left_out(tmp_path, name, caplog):
    text, expected, numbers = BAD[name]
    (tmp_path / "a.csv").write_text(text)
    first = text.partition("\n")[0]
    (tmp_path / "b.csv").write_text(
        f"{first}\n9,z{',0' * first.count(',y')}{',0' * first.count(',x')}\n"
    )
    types = {"n": "int64", "s": "str", "x": "float32", "y": "float64"}
    request = CsvRequest(columns={name: types[name] for name in first.split(",")})
    with pytest.raises(DataError, match=rf"a\.csv: {expected}"):
        rows_of(CsvSource(str(tmp_path), request))
    caplog.set_level(logging.WARNING)
    source = CsvSource(str(tmp_path), request, bad=BadData("skip"))
    for _ in range(2):
        assert rows_of(source)["n"] == [*numbers, 9]
    assert source.num_skipped == 1
    assert "a.csv: line" in caplog.text


def test_empty_values_are_replaced(tmp_path):
    (tmp_path / "a").write_text("n,s\n1,a\n,b\n")
    assert read(tmp_path, nulls={"n": -1}) == {"n": [1, -1], "s": ["a", "b"]}
    (tmp_path / "a").write_text('n,s,t\n1,,\n2,"",c\n')
    assert read(tmp_path, nulls={"s": "none"})["s"] == ["none", "none"]
    assert read(tmp_path, nulls={"s": "none"})["t"] == ["", "c"]


SPARK = r"""1,"x \" y"
2,a\b
3,"q\"\\z"
4,"c,\\"
5,"\\\""
6,\
7,"a,\\n"
8,"\""
9,""
"""
"""What df.write.csv of Spark 4 writes."""
SPARK_VALUES = ['x " y', "a\\b", 'q"\\z', "c,\\", '\\"', "\\", "a,\\n", '"', ""]


@pytest.mark.parametrize("quoted_newlines", [False, True])
@pytest.mark.parametrize("block_bytes", [1, 7, 4096])
def test_what_spark_writes_is_read_with_its_escape(tmp_path, quoted_newlines, block_bytes):
    (tmp_path / "a").write_text(SPARK)
    request = CsvRequest(
        columns={"n": "int64", "s": "str"},
        header=["n", "s"],
        escape="\\",
        quoted_newlines=quoted_newlines,
    )
    limits = LineLimits(block_bytes=block_bytes)
    source = CsvSource(str(tmp_path), request, limits=limits)
    assert rows_of(source) == {"n": list(range(1, 10)), "s": SPARK_VALUES}


def test_names_are_escaped_as_values(tmp_path):
    (tmp_path / "a").write_text('"a \\" b",n\nx,1\n')
    assert read(tmp_path, escape="\\") == {'a " b': ["x"], "n": [1]}
    with pytest.raises(DataError, match="line 1: text follows the closing quote of a name"):
        read(tmp_path)


@pytest.mark.fault("F45")
@pytest.mark.parametrize("quoted_newlines", [False, True])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('2,"x \\" y"', r"text follows .* pass escape='\\\\'"),
        ('2,"x"y', "text follows the closing quote of a value; ',' or the line end must"),
    ],
)
def test_text_after_a_closing_quote_is_refused(tmp_path, line, expected, quoted_newlines):
    (tmp_path / "a").write_text(f"n,s\n1,a\n{line}\n3,c\n")
    request = CsvRequest(quoted_newlines=quoted_newlines, columns={"n": "int64", "s": "str"})
    with pytest.raises(DataError, match=f"a: line 3: {expected}"):
        rows_of(CsvSource(str(tmp_path), request))
    source = CsvSource(str(tmp_path), request, bad=BadData("skip"))
    assert rows_of(source) == {"n": [1, 3], "s": ["a", "c"]}


@pytest.mark.fault("F45")
def test_a_quote_that_is_never_closed_is_refused_across_lines(tmp_path):
    (tmp_path / "a").write_text('a,b\n1,x\n2,"y\n3,z\n4,w\n')
    request = CsvRequest(quoted_newlines=True, columns={"a": "int64", "b": "str"})
    with pytest.raises(DataError, match=r"a: line 3: a quoted value does not end: .* 13 bytes"):
        rows_of(CsvSource(str(tmp_path), request))
    source = CsvSource(str(tmp_path), request, bad=BadData("skip"))
    assert rows_of(source) == {"a": [1], "b": ["x"]}
    assert source.num_skipped == 1


@pytest.mark.fault("F45")
@pytest.mark.parametrize("bad", ["oops", "x,y"])
def test_one_bad_row_of_many_is_left_out_across_lines(tmp_path, bad):
    lines = [f'{n},"v\n{n}"' for n in range(1000)]
    lines[400] = bad
    (tmp_path / "a").write_text("\n".join(["n,s", *lines, ""]))
    request = CsvRequest(quoted_newlines=True, columns={"n": "int64", "s": "str"})
    with pytest.raises(DataError, match="a: line 802: "):
        rows_of(CsvSource(str(tmp_path), request))
    source = CsvSource(
        str(tmp_path), request, bad=BadData("skip"), limits=LineLimits(block_bytes=700)
    )
    assert rows_of(source)["n"] == [n for n in range(1000) if n != 400]
    assert source.num_skipped == 1


def test_a_first_row_without_header_may_hold_line_ends(tmp_path):
    (tmp_path / "a").write_text('\ufeff"a\nb",1\nc,2\n')
    found = read(tmp_path, header=False, quoted_newlines=True)
    assert found == {"_c0": ["a\nb", "c"], "_c1": [1, 2]}


@pytest.mark.parametrize("large", [2**63, -(2**63) - 1, 2**64 - 1])
def test_integers_beyond_int64_are_not_guessed_to_be_floats(tmp_path, large):
    (tmp_path / "a").write_text(f"id,x\n1,1e30\n,2\n{large},3\n")
    with pytest.raises(DataError, match=f"'id' has integers beyond int64, as {large}.*'uint64' or"):
        read(tmp_path)
    assert read(tmp_path, columns={"id": "str"})["id"] == ["1", "", str(large)]
    assert read(tmp_path, columns=["x"])["x"] == [1e30, 2.0, 3.0]
    (tmp_path / "a").write_text(f"x\n{large}\n0.5\n")
    assert read(tmp_path)["x"] == [float(large), 0.5]


@pytest.mark.parametrize("quoted_newlines", [False, True])
def test_a_file_of_a_header_alone_says_nothing_of_types(tmp_path, quoted_newlines):
    (tmp_path / "a").write_text("n,s\n")
    (tmp_path / "b").write_text("n,s")
    (tmp_path / "c").write_text("n,s\n1,a\n")
    found = read(tmp_path, quoted_newlines=quoted_newlines)
    assert found == {"n": [1], "s": ["a"]}
    (tmp_path / "c").unlink()
    assert read(tmp_path, quoted_newlines=quoted_newlines) == {"n": [], "s": []}


@pytest.mark.parametrize("quoted_newlines", [False, True])
def test_a_last_line_without_an_end_has_a_say_in_the_types(tmp_path, quoted_newlines):
    (tmp_path / "a.csv").write_bytes(b"n,x,s\n\n7,0.5,b")
    found = read(tmp_path, quoted_newlines=quoted_newlines)
    assert found == {"n": [7], "x": [0.5], "s": ["b"]}
    (tmp_path / "a.csv").write_bytes(b"n\n1\n2.5")
    assert read(tmp_path, quoted_newlines=quoted_newlines) == {"n": [1.0, 2.5]}


def test_types_are_found_where_a_value_goes_on_behind_the_last_line_end(tmp_path):
    (tmp_path / "a").write_text('s,n\nx,1\n"y\n",2')
    assert read(tmp_path, quoted_newlines=True) == {"s": ["x", "y\n"], "n": [1, 2]}


@pytest.mark.fault("F45")
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"n,s\r1,a\r", "line 1: .*lines end in LF or CR LF"),
        (b'n,"s\nt"\n1,a\n', "line 1: a quoted name does not end on its line"),
        (b"n,s\n1,\xe9\n", "line 2: .*invalid UTF8"),
    ],
)
def test_what_is_no_csv_in_utf8_is_named(tmp_path, data, expected):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(DataError, match=f"a: {expected}"):
        read(tmp_path)


@pytest.mark.fault("F45")
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (gzip.compress(b"n\n" * 900)[:-9], "the compressed data is damaged after byte"),
        (b"\x1f\x8bnoise", "the compressed data is damaged after byte 0"),
        pytest.param(
            gzip.compress(bytes(18 << 20)),
            "compressed bytes became .*, max_gzip_ratio is 250",
            marks=pytest.mark.slow,
        ),
        (b"n\n" + b"1" * 5000, "line at byte 2 has .* max_line_bytes is 2000: .*LineLimits"),
    ],
)
def test_a_damaged_file_is_named_or_left_out(tmp_path, data, expected):
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(b"n\n7\n")
    limits = LineLimits(max_line_bytes=2000, block_bytes=512)
    if "ratio" in expected:
        limits = LineLimits(max_line_bytes=1 << 40)
    for make in (
        lambda bad: TextSource(str(tmp_path), bad=bad, limits=limits),
        lambda bad: CsvSource(
            str(tmp_path), CsvRequest(columns={"n": "str"}), bad=bad, limits=limits
        ),
    ):
        with pytest.raises(DataError, match=f"a: .*{expected}"):
            rows_of(make(BadData()))
        source = make(BadData("skip"))
        assert rows_of(source)[source.schema.names[0]][-1] == "7"
        assert source.num_skipped >= 1


@pytest.mark.fault("F45")
def test_text_that_is_no_utf8_is_named_by_line_or_byte(tmp_path):
    (tmp_path / "a").write_bytes(b"one\ntw\xff\nthree\n")
    with pytest.raises(DataError, match="a: line 2: it is not UTF-8: invalid start byte"):
        rows_of(TextSource(str(tmp_path)))
    assert rows_of(TextSource(str(tmp_path), bad=BadData("skip")))["value"] == ["one", "three"]
    with pytest.raises(DataError, match="a: byte 4: it is not UTF-8"):
        list(TextSource(str(tmp_path)).read(Split(f"{tmp_path}/a", 1, 8)))


@pytest.mark.fault("F46")
def test_other_columns_and_changed_files_are_named(tmp_path):
    (tmp_path / "a").write_text("n,s\n1,a\n")
    (tmp_path / "b").write_text("n,t\n1,a\n")
    with pytest.raises(DataError, match=r"b has no column 's'; it has \['n', 't'\]"):
        read(tmp_path)
    with pytest.raises(DataError, match="a has no column 'z'"):
        read(tmp_path, columns=["z"])
    (tmp_path / "b").write_text("n,n\n1,a\n")
    with pytest.raises(DataError, match="b: two columns have one name"):
        read(tmp_path)
    source = TextSource(str(tmp_path))
    (tmp_path / "b").write_text("longer than before")
    with pytest.raises(FileChanged):
        rows_of(source)


@pytest.mark.parametrize("action", ["fail", "skip"])
@pytest.mark.parametrize("rowless", [False, True])
def test_files_that_give_no_types_are_not_called_empty(tmp_path, action, rowless):
    (tmp_path / "a").write_text("x,y\n1,2\n3\n4,5\n")
    if rowless:  # whose columns would all be text
        (tmp_path / "b").write_text("x,y\n")
    for columns, expected in (
        (None, "a: the types of its columns cannot be found: .* got 1: 3; name them"),
        (["typo"], r"a has no column 'typo'; it has \['x', 'y'\]"),
    ):
        with pytest.raises(DataError, match=expected):
            CsvSource(str(tmp_path), CsvRequest(columns=columns), bad=BadData(action))
    (tmp_path / "a").write_text("")
    if not rowless:
        with pytest.raises(DataError, match="a and 0 other files are empty"):
            CsvSource(str(tmp_path), bad=BadData(action))


def test_a_file_that_gives_no_types_is_read_and_not_skipped(tmp_path, caplog):
    (tmp_path / "a").write_text("x,y\n1,2\n3\n4,5\n")
    (tmp_path / "b").write_text("x,y\n6,7\n")
    source = CsvSource(str(tmp_path), bad=BadData("skip", max_skipped=1))
    assert (source.num_skipped, caplog.messages) == (0, [])
    assert rows_of(source) == {"x": [1, 4, 6], "y": [2, 5, 7]}
    assert source.num_skipped == 1
    said = "a: the types.*; name them; 1 damaged records or files, max_skipped is 0"
    with pytest.raises(DataError, match=said):  # no more files are looked at than skipped
        CsvSource(str(tmp_path), bad=BadData("skip", max_skipped=0))
    (tmp_path / "a").write_text("x,x\n1,2\n")
    (tmp_path / "b").write_text("x,y\n")
    said = "a: two columns have one name: .*; no other file has a row to find types in"
    with pytest.raises(DataError, match=said):  # nor can it be skipped where it alone has rows
        CsvSource(str(tmp_path), bad=BadData("skip"))


@pytest.mark.parametrize("action", ["fail", "skip"])
@pytest.mark.parametrize("header", [True, False])
def test_what_only_later_files_have_is_not_left_out_without_a_word(tmp_path, action, header):
    """Whichever file comes first, and though the policy is to skip files that differ."""
    (tmp_path / "a").write_text("n,_c1\n1,a\n")
    (tmp_path / "b").write_text("n,_c1,_c2,_c3\n2,b,2.5,3\n")

    def found(**request: Any) -> dict[str, list[Any]]:
        request["header"] = header
        return rows_of(CsvSource(str(tmp_path), CsvRequest(**request), bad=BadData(action)))

    said = r"b has columns that .*a lacks: '_c2', '_c3'; name the columns .*columns="
    with pytest.raises(FeedSettingsError, match=said):
        found()
    assert found(columns=["_c1"])["_c1"][-1] == "b"


@pytest.mark.parametrize("action", ["fail", "skip"])
def test_a_key_that_is_a_column_of_a_later_file_is_refused(tmp_path, action):
    for name, text in (("k=1", "n\n1\n"), ("k=2", "n,k\n2,7\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(text)
    for columns in (None, ["n", "k"]):
        request = CsvRequest(columns=columns)
        source = CsvSource(str(tmp_path), request, bad=BadData(action), partitions=True)
        with pytest.raises(FeedSettingsError, match="k=2/f: 'k' is a column of the file and a key"):
            rows_of(source)
    rest = CsvSource(str(tmp_path), CsvRequest(columns=["n"]), partitions=True)
    assert rows_of(rest) == {"n": [1, 2]}


@pytest.mark.parametrize(
    "request_",
    [
        {"columns": []},
        {"columns": {"n": "float16"}},
        {"columns": ["n", "n"]},
        {"nulls": {"z": 1}},
        {"nulls": {"n": "x"}},
    ],
)
def test_requests_that_cannot_be_are_refused(tmp_path, request_):
    (tmp_path / "a").write_text("n,s\n1,a\n")
    with pytest.raises(FeedSettingsError):
        CsvSource(str(tmp_path), CsvRequest(**request_))


def test_files_of_equal_columns_share_their_names(tmp_path):
    """As 100,000 files of 500 columns, whose names would take 3 GB."""
    for number in range(5):
        (tmp_path / f"{number}").write_text("a,b\n1,2\n")
    (tmp_path / "5").write_text("b,a\n4,3\n")
    source = CsvSource(str(tmp_path), CsvRequest())
    assert rows_of(source) == {"a": [1, 1, 1, 1, 1, 3], "b": [2, 2, 2, 2, 2, 4]}
    assert len(source._headers) == 6
    assert len({id(names) for names in source._headers.values()}) == 2
