"""TensorFlowOnSpark's conversions of rows and records, without Spark's JVM and TensorFlow."""

from __future__ import annotations

import pytest

from feeding.errors import DataError, FeedSettingsError, RowError
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.formats.tfrecord.infer import decode_example
from tfos import dfutil

pytestmark = pytest.mark.slow  # imports pyspark

DTYPES = [("f", "double"), ("i", "int"), ("b", "boolean"), ("s", "string"), ("r", "binary")]
DTYPES += [("l", "array<float>"), ("t", "array<string>"), ("e", "array<bigint>"), ("n", "float")]
ROW = {
    "f": 1.5,
    "i": -3,
    "b": True,
    "s": "\u20ac",
    "r": bytearray(b"\xff"),
    "l": [0.5, 2.0],
    "t": ["a", "b"],
    "e": [],
    "n": None,
}


def test_rows_become_records_and_rows_again():
    from pyspark.sql import Row

    pairs = list(dfutil.toTFExample(DTYPES)([Row(**ROW), Row(**ROW)]))
    assert [rest for _, rest in pairs] == [None, None]
    assert decode_example(bytes(pairs[0][0]))["t"] == [b"a", b"b"]
    first, second = dfutil.fromTFExample(iter(pairs), binary_features=["r"])
    assert first == second
    back = {**ROW, "b": 1, "e": None}
    del back["n"]
    assert first.asDict() == back
    assert list(first.asDict()) == sorted(back)


def test_every_byte_value_is_kept_and_none_is_null():
    records = [encode_example({"x": [b"1", b"2", b"3"]}), encode_example({"x": []})]
    assert [row.x for row in dfutil.fromTFExample(records)] == [["1", "2", "3"], None]


def test_a_null_inside_an_array_is_refused_and_never_a_number():
    for dtype, value in (
        ("array<double>", [1.0, None]),
        ("array<int>", [None]),
        ("array<string>", [None]),
    ):
        with pytest.raises(RowError, match="'x' has a null inside an array"):
            list(dfutil.toTFExample([("x", dtype)])([{"x": value}]))


def test_a_feature_may_have_any_name():
    (row,) = dfutil.fromTFExample([encode_example({"cls": 1, "self": 2, "a b": 3})])
    assert row.asDict() == {"a b": 3, "cls": 1, "self": 2}


def test_partitions_are_not_kept_in_a_list():
    def endless():
        while True:
            yield encode_example({"x": 1}), None

    assert next(iter(dfutil.fromTFExample(endless()))).x == 1
    rows = ({"x": 1} for _ in iter(int, 1))
    assert next(dfutil.toTFExample([("x", "int")])(rows))[1] is None


def test_the_schema_of_a_record():
    record = encode_example({"f": 1.5, "i": 2, "s": "x", "r": b"\xff", "l": [1.0, 2.0], "e": []})
    schema = dfutil.infer_schema(record, binary_features=["r"])
    assert schema.simpleString() == (
        "struct<e:string,f:double,i:bigint,l:array<double>,r:binary,s:string>"
    )
    assert dfutil.infer_schema((bytearray(record), None), ["r"]) == schema


def test_one_binary_feature_may_be_given_by_its_name_alone():
    record = encode_example({"image": b"abc", "i": b"text"})
    schema = dfutil.infer_schema(record, "image")
    assert schema.simpleString() == "struct<i:string,image:binary>"
    (row,) = dfutil.fromTFExample([record], "image")
    assert row.asDict() == {"i": "text", "image": bytearray(b"abc")}


def test_what_cannot_be_is_named():
    with pytest.raises(FeedSettingsError, match=r"column 'd' is decimal\(9,2\)"):
        dfutil.toTFExample([("d", "decimal(9,2)")])
    with pytest.raises(DataError, match="'x' holds bytes that are not UTF-8; name it"):
        list(dfutil.fromTFExample([encode_example({"x": b"\xff"})]))
    with pytest.raises(DataError, match="got a int"):
        dfutil.infer_schema(3)
