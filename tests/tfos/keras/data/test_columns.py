"""Columns of a batch become x, y and weights: selection, dtypes, the user's mapping."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest

from feeding.columnar.batch import Ragged
from tfos.errors import SettingsError
from tfos.keras.data.columns import ColumnRoles, RowMapper

MATRIX = np.arange(12.0).reshape(3, 4)
LABELS = np.array([1, 0, 1])
LISTS = Ragged(np.array([1.0, 2.0, 3.0]), np.array([0, 2, 2, 3]))


def mapper_of(
    features: Any = None, labels: Any = None, dtypes: Any = None, map_fn: Any = None, **more: Any
) -> RowMapper:
    roles = ColumnRoles(
        feature_cols=features, label_cols=labels, dtypes=dtypes, map_fn=map_fn, **more
    )
    return RowMapper(roles, "float32")


def test_rows_of_x_y_and_weight_need_no_words():
    for row in ((MATRIX,), (MATRIX, LABELS), (MATRIX, LABELS, np.ones(3))):
        parts = mapper_of()(row)
        assert len(parts) == len(row)
        assert parts[0].dtype == np.float32
    assert mapper_of()((MATRIX, LABELS))[1].dtype == LABELS.dtype
    assert len(mapper_of()(MATRIX)) == 1


def test_rows_that_are_one_array_are_cut_by_position():
    x, y = mapper_of(slice(1, None), 0)(MATRIX)
    np.testing.assert_array_equal(x, MATRIX[:, 1:])
    np.testing.assert_array_equal(y, MATRIX[:, 0])
    np.testing.assert_array_equal(mapper_of([0, 2], 1)(MATRIX)[0], MATRIX[:, [0, 2]])


def test_named_columns_stand_side_by_side():
    row = {"a": np.zeros(3), "b": np.ones(3), "label": LABELS}
    x, y = mapper_of(["a", "b"], "label")(row)
    np.testing.assert_array_equal(x, [[0, 1]] * 3)
    np.testing.assert_array_equal(y, LABELS)
    np.testing.assert_array_equal(mapper_of(slice(0, 2), 2)(row)[0], x)


def test_named_columns_are_listed_once_for_all_that_are_selected_by_position():
    class Row(dict[str, Any]):
        def values(self) -> Any:
            listed.append(self)
            return super().values()

    listed: list[Row] = []
    row = Row({name: np.full(2, at) for at, name in enumerate("abcde")})
    (x,) = mapper_of([3, -1, "b", 0])(row)
    np.testing.assert_array_equal(x, [[3, 4, 1, 0]] * 2)
    assert len(listed) == 1


def test_arrays_of_several_columns_stay_several_inputs():
    row = {"image": MATRIX, "text": MATRIX + 1, "label": LABELS}
    x, _ = mapper_of(["image", "text"], "label")(row)
    assert isinstance(x, tuple)
    np.testing.assert_array_equal(x[1], MATRIX + 1)


def test_values_by_position_of_a_tuple():
    row = (LABELS, np.zeros(3), np.ones(3), np.ones(3))
    x, y = mapper_of(slice(1, None), 0)(row)
    assert x.shape == (3, 3)
    np.testing.assert_array_equal(y, LABELS)


def test_dtypes_by_name_are_of_fields_of_structs_too():
    row: dict[str, Any] = {"s": {"a": np.arange(3), "b": np.ones(3), "c": LISTS}, "label": LABELS}
    dtypes = {"s.a": "float16", "label": "int8"}
    features = {"a": "s.a", "b": "s.b", "c": "s.c"}
    x, y = mapper_of(features, "label", dtypes)(row)
    found = [x["a"].dtype, x["b"].dtype, x["c"].values.dtype, y.dtype]
    assert found == [np.float16, np.float32, np.float32, np.int8]
    assert row["s"]["a"].dtype == np.int64


def test_a_mapping_keeps_or_adds_the_same_rows_of_each_array():
    row = ((MATRIX, MATRIX), LABELS, np.ones(3))
    some = mapper_of(map_fn=lambda x, y, w: ({"a": x[0][:2], "b": x[1][:2]}, y[:2], w[:2]))(row)
    assert [len(some[0]["a"]), len(some[1]), len(some[2])] == [2, 2, 2]
    lists = Ragged(np.ones(3), np.array([0, 2, 2, 3]))
    assert len(mapper_of(map_fn=lambda x, y, w: (lists, y, w))(row)) == 3
    for mapping, text in (
        (lambda x, y, w: (x[0], y[:1], w), r"3 rows of features and 1 of labels; keep"),
        (lambda x, y, w: (x, y[:1], w), r"1 rows of labels and 3 of weights; keep"),
        (lambda x, y, w: (lists, y, w[:2]), "3 rows of features and 2 of weights"),
    ):
        with pytest.raises(SettingsError, match=text):
            mapper_of(map_fn=mapping)(row)


def test_a_mapping_may_give_features_that_are_no_rows():
    """As all values of lists, with the row of each."""
    mapper = mapper_of(map_fn=lambda x, y: ((x[0].ravel(), np.repeat([0, 1, 2], 4)), y))
    (values, rows), y = mapper(((MATRIX, MATRIX), LABELS))
    assert (len(values), len(rows), len(y)) == (12, 12, 3)


def test_dtypes_and_mapping():
    mapper = mapper_of(dtypes=("float16", "int8"), map_fn=lambda x, y: (x / 2, y + 1))
    x, y = mapper((MATRIX, LABELS))
    assert (x.dtype, y.dtype) == (np.float16, np.int8)
    np.testing.assert_array_equal(y, LABELS + 1)
    np.testing.assert_array_equal(x, MATRIX / 2)
    assert mapper_of(map_fn=lambda x: x)(MATRIX)[0].shape == (3, 4)
    nested = mapper_of(dtypes="float32")(({"a": MATRIX}, LABELS))
    assert nested[0]["a"].dtype == np.float32


TEXT = np.array(["a", "b", "c"], object)


def test_a_part_whose_dtype_is_none_stays_as_it_is():
    wide = MATRIX.astype("float64"), LABELS.astype("float64")
    found = [
        tuple(part.dtype.name for part in mapper_of(dtypes=dtypes)(wide))
        for dtypes in (None, (None,), (None, None), (None, "int8"))
    ]
    assert found == [
        ("float32", "float32"),
        ("float64", "float32"),
        ("float64", "float64"),
        ("float64", "int8"),
    ]


def test_a_column_of_weights():
    row = {"a": LABELS, "y": LABELS, "w": np.array([0.5, 1, 2])}
    x, y, weights = mapper_of("a", "y", weight_col="w")(row)
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights, [0.5, 1, 2])
    np.testing.assert_array_equal(x, y)


def test_text_stays_text_beside_numbers():
    row = {"word": TEXT, "a": LABELS, "b": np.zeros(3)}
    word, a = mapper_of(["word", "a"], dtypes="float32")(row)[0]
    assert (word.dtype, a.dtype) == (object, np.float32)
    assert mapper_of("word")(row)[0].tolist() == ["a", "b", "c"]


def test_inputs_by_name_and_fields_of_structs():
    row = {"word": TEXT, "s": {"a": LABELS, "b": np.zeros(3)}}
    (x,) = mapper_of({"text": "word", "numbers": ["s.a", "s.b"]})(row)
    assert list(x) == ["text", "numbers"]
    assert x["numbers"].tolist() == [[1, 0], [0, 0], [1, 0]]


@pytest.mark.parametrize(
    ("dtype", "values", "shown"),
    [
        ("int32", [5, 2**32 + 5], "numbers from 5 to 4294967301"),
        ("uint8", [-1, 7], "numbers from -1 to 7"),
        ("int64", [2.0**63], r"numbers from 9\S+ to 9\S+"),
        ("int32", [float("nan"), 1.0], "NaN or infinite numbers"),
        ("bool", [float("nan"), 1.0], "NaN or infinite numbers"),
    ],
)
def test_numbers_that_an_integer_dtype_would_make_others_are_refused(dtype, values, shown):
    """The ids 5 and 2^32 + 5 would train one row."""
    ids = np.array(values)
    with pytest.raises(SettingsError, match=f"has {shown}, which dtypes='{dtype}' cannot hold"):
        mapper_of(dtypes=dtype)((ids, LABELS))
    ragged = Ragged(ids, np.array([0, 0, len(ids)]))
    for column in (ids, ragged):
        with pytest.raises(SettingsError, match=f"has {shown} of s.id, which dtypes='{dtype}'"):
            mapper_of("s.id", "y", {"s.id": dtype})({"s": {"id": column}, "y": LABELS})


@pytest.mark.parametrize(
    ("values", "dtype", "shown"),
    [
        (np.array([1.0, 70000.0]), "float16", "from 1.0 to 70000.0, .*infinite in float16"),
        (np.array([1, -70000]), "float16", "from -70000 to 1, .*infinite in float16"),
        (np.array([np.nan, np.inf, 1e39]), None, r"from 1e\+39 to 1e\+39, .*infinite in float32"),
        (np.array([np.inf, 3.4e38]), "bfloat16", r"from 3.4e\+38 to .*infinite in bfloat16"),
    ],
)
def test_a_finite_number_that_would_become_infinite_is_refused(values, dtype, shown):
    """It was trained as an infinite one, with a warning of numpy's in the thread that reads."""
    with pytest.raises(SettingsError, match=f"a batch has numbers {shown}.*dtypes='float64'"):
        mapper_of(dtypes=dtype)((values, LABELS))
    told = r"numbers from .* of u\.v, of which some .*dtypes={'u\.v': 'float64'}.* in map_fn"
    for features in (None, "u", "u.v", {"x": ["u.v", "w"]}, 0, slice(0, None)):
        with pytest.raises(SettingsError, match=told):
            mapper_of(features, dtypes={"u.v": dtype or "float32"})(
                {"u": {"v": values}, "w": values}
            )


def test_a_column_that_nobody_selects_may_have_any_numbers():
    """Beside dtypes by name it was refused, though nothing is trained of it."""
    rows = {"x": np.ones(3), "y": LABELS, "s": {"a": np.ones(3), "least": np.full(3, -1.7e308)}}
    x, y = mapper_of(["x", "s.a"], "y", {"y": "int8"})(rows)
    assert (x.dtype, y.dtype) == (np.float32, np.int8)
    for features in (None, "s", ["x", "s.least"], {"a": "s.least"}):
        with pytest.raises(
            SettingsError, match=r"-1\.7e\+308 of s\.least, of which some become inf"
        ):
            mapper_of(features, features and "y", {"y": "int8"})(rows)


@pytest.mark.parametrize("kind", [object, "U", "S"])
def test_texts_of_numbers_are_told_like_numbers(kind):
    texts = np.array(["1", "1e39"], kind)
    with pytest.raises(SettingsError, match=r"numbers from 1\.0 to 1e\+39 of x, of which some"):
        mapper_of("x", dtypes={"x": "float32"})({"x": texts})


def test_floats_keep_what_is_infinite_and_round_the_others():
    given = np.array([np.inf, np.nan, 65504.0, 1e-300])
    (x,) = mapper_of(dtypes="float16")((given,))
    np.testing.assert_array_equal(x, np.array([np.inf, np.nan, 65504, 0], np.float16))


def test_numbers_that_an_integer_dtype_holds_are_converted():
    for values in ([-(2**31), 2**31 - 1], [-1.5, 2.0], [True, False], []):
        found = mapper_of(dtypes="int32")((np.array(values), LABELS))[0]
        assert found.tolist() == [int(each) for each in values]
        assert found.dtype == np.int32


def test_dtypes_by_column():
    row = {"a": LABELS, "b": np.zeros(3), "c": np.zeros(3)}
    a, b, c = mapper_of("a", "b", {"a": "uint8", "c": "float64"}, weight_col="c")(row)
    assert (a.dtype, b.dtype, c.dtype) == (np.uint8, np.float32, np.float64)


def test_lists_of_any_length_stay_lists_with_the_dtype_asked_for():
    def found(mapper, *row):
        lists = mapper(*row)[0]
        assert isinstance(lists, Ragged)
        assert lists.offsets is LISTS.offsets
        return lists.values

    assert found(mapper_of(), (LISTS, LABELS)).dtype == np.float32
    assert found(mapper_of(dtypes="int64"), (LISTS, LABELS)).tolist() == [1, 2, 3]
    row = {"items": LISTS, "user": LABELS}
    assert found(mapper_of("items", "user"), row).dtype == np.float32
    assert found(mapper_of("items", "user", {"items": "int32"}), row).dtype == np.int32
    assert found(mapper_of("items", "user", {"user": "int8"}), row).dtype == np.float32
    named = mapper_of({"items": "items", "user": "user"})(row)[0]
    assert isinstance(named["items"], Ragged)
    assert isinstance(mapper_of(["user", "items"])(row)[0][1], Ragged)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"feature_cols": "z"}, r"^feature_cols='z', but the rows have \['a'\]"),
        ({"feature_cols": "a", "label_cols": "z"}, r"^label_cols='z', but the rows"),
        ({"label_cols": "a"}, r"^label_cols='a' without feature_cols; .*feature_cols=slice"),
        ({"weight_col": "a"}, r"^weight_col='a' without feature_cols; "),
        (
            {"feature_cols": "a", "weight_col": "a"},
            r"^weight_col='a' without label_cols, whose loss",
        ),
        (
            {"feature_cols": "a", "label_cols": "a", "weight_col": "z"},
            r"^weight_col='z', but the rows have",
        ),
    ],
)
def test_what_is_refused_has_the_name_that_the_caller_gave_it(given, sentence):
    mapper = RowMapper(ColumnRoles(**given), "float32")
    with pytest.raises(SettingsError, match=sentence):
        mapper({"a": LABELS})


@pytest.mark.parametrize(
    ("mapper", "row", "sentence"),
    [
        (mapper_of(), (1, 2, 3, 4), "rows have 4 values"),
        (mapper_of(labels=0), MATRIX, "label_cols=0 without feature_cols"),
        (mapper_of("pixels", 0), MATRIX, "select by position"),
        (mapper_of([0, 9], 1), MATRIX, "rows have 4 values"),
        (mapper_of("b", "a"), {"a": LABELS}, r"feature_cols='b', but the rows have \['a'\]"),
        (mapper_of(0, 5), (MATRIX, LABELS), "label_cols=5, but the rows have 2 values"),
        (mapper_of([], 0), (MATRIX, LABELS), "feature_cols selects nothing"),
        (
            mapper_of([0, 1, 0], 1),
            (LABELS, LABELS),
            r"feature_cols=\[0, 1, 0\] has a column twice",
        ),
        (mapper_of({"a": ["x", "x"]}, "x"), {"x": LABELS}, "feature_cols=.* has a column twice"),
        (
            mapper_of(),
            ("text", LABELS),
            "the batch holds str, not an array; map_fn=... must return arrays or tensors",
        ),
        (mapper_of(), (MATRIX, LISTS), "the labels are lists of 0 to 2 values.* map_fn"),
        (mapper_of(), (LISTS, LABELS, LISTS), "the weights are lists of 0 to 2 values.* map_fn"),
        (mapper_of(0, 1), LISTS, r"feature_cols=0, but each row is one list.*\(list, label\)"),
        (mapper_of("a", weight_col="w"), {"a": LABELS}, "weight_col='w' without label_cols"),
        (
            mapper_of("a", "a", weight_col="w"),
            {"a": LABELS},
            r"weight_col='w', but the rows have \['a'",
        ),
        (mapper_of("s.z"), {"s": {"a": LABELS}}, r"'z', but the rows have \['a'\]"),
        (mapper_of([0, 2]), {"a": LABELS, "b": LABELS}, r"=2, but the rows have \['a', 'b'\]"),
        (mapper_of(dtypes={"z": "int8"}), {"a": LABELS}, r"dtypes='z', but the rows have \['a'\]"),
        (mapper_of(dtypes={"z": "int8"}), (LABELS,), "values without names"),
    ],
)
def test_rows_that_do_not_have_what_is_asked(mapper, row, sentence):
    with pytest.raises(SettingsError, match=sentence):
        mapper(row)


def test_arguments_that_cannot_work():
    with pytest.raises(SettingsError, match="numpy dtypes such as 'float32', got 'floaty'"):
        mapper_of(dtypes=("floaty",))
    with pytest.raises(SettingsError, match=r"such as 'float32', got <class 'numpy\.float32'>"):
        mapper_of(dtypes=np.float32)
    with pytest.raises(SettingsError, match="map_fn must be a function"):
        mapper_of(map_fn=3)


@pytest.mark.parametrize("selector", [["a", "b", "carrier"], slice(0, 3)])
def test_text_among_numbers_names_its_column(selector):
    columns = {
        "a": np.array([1.0, 2.0]),
        "b": np.array([3.0, 4.0]),
        "carrier": np.array(["AA", "DL"], object),
        "late": np.array([0, 1]),
    }
    with pytest.raises(SettingsError, match=r"'carrier' is text among numbers.*\['a', 'b'\]"):
        mapper_of(selector, "late")(columns)
