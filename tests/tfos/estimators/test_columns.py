"""Columns of a fit: what ctx.dataset selects, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from tfos.errors import SettingsError
from tfos.estimators.columns import ColumnPlan, named
from tfos.predict.signature import TensorInfo


class Kind:
    """A type of Spark's, by its names."""

    def __init__(self, name, item=None):
        self.elementType = item
        self._name = name

    def typeName(self):
        return self._name

    def simpleString(self):
        return (
            f"{self._name}<{self.elementType.simpleString()}>" if self.elementType else self._name
        )


DOUBLE, STRING = Kind("double"), Kind("string")
FLOAT, TEXT = TensorInfo("float32", ()), TensorInfo("object", ())
INTEGER, IDS = TensorInfo("int64", ()), TensorInfo("int64", (), is_id=True)
LISTS = TensorInfo("int64", (None,), is_ragged=True)
FIELDS = [
    ("x", Kind("vectorudt")),
    ("n", DOUBLE),
    ("word", STRING),
    ("y", DOUBLE),
    ("day", Kind("date")),
    ("ys", Kind("array", DOUBLE)),
    ("held", Kind("boolean")),
]


@pytest.mark.parametrize(
    ("plan", "inputs", "outputs", "expected"),
    [
        (ColumnPlan(features=("x",), labels=("y",)), ["a"], ["b"], ("x", "y")),
        (ColumnPlan(features=("n", "y"), labels=("y",)), ["a"], ["b"], (["n", "y"], "y")),
        (
            ColumnPlan(features=("n", "word"), labels=("y", "n")),
            ["a", "b"],
            ["c", "d"],
            ({"a": "n", "b": "word"}, {"c": "y", "d": "n"}),
        ),
        (ColumnPlan(features=("n", "word"), labels=("y",)), [], [], (["n", "word"], "y")),
    ],
)
def test_columns_go_to_the_inputs_in_their_order(plan, inputs, outputs, expected):
    found = plan.selectors(inputs, outputs)
    assert (found["feature_cols"], found["label_cols"]) == expected
    plan.check(FIELDS)


def test_every_column_is_fed_once_and_flags_are_not():
    plan = ColumnPlan(features=("x", "n"), labels=("y",), weight="n", validation="held")
    plan.check(FIELDS)
    assert plan.fed == ["x", "n", "y"]
    assert plan.selectors((), ())["weight_col"] == "n"


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            ColumnPlan(features=(), labels=("y",)),
            r"featuresCols names no column; the DataFrame has",
        ),
        (ColumnPlan(features=("z",), labels=("y",)), "featuresCols: 'z': .* has no such column"),
        (ColumnPlan(features=("x",), labels=("twice",)), "labelCols: 'twice': .* has 2 of them"),
        (ColumnPlan(features=("x",), labels=("word",)), "label column 'word' is word: string"),
        (ColumnPlan(features=("x",), labels=("day",)), "label column 'day' is day: date"),
        (
            ColumnPlan(features=("x",), labels=("y",), weight="ys"),
            "'ys' is ys: array<double>.*per row",
        ),
        (
            ColumnPlan(features=("x",), labels=("y",), validation="y"),
            "'y' is double; it must be bool",
        ),
    ],
)
def test_columns_without_a_place_are_refused(plan, text):
    with pytest.raises(SettingsError, match=text):
        plan.check([*FIELDS, ("twice", DOUBLE), ("twice", DOUBLE)])


def test_columns_that_do_not_fit_the_model_are_refused():
    plan = ColumnPlan(features=("n", "word"), labels=("y",))
    plan.check_model(FIELDS, [], 0)
    plan.check_model(FIELDS, [FLOAT, TEXT], 1)
    with pytest.raises(
        SettingsError, match=r"the model has 3 inputs, featuresCols is \['n', 'word'\]"
    ):
        plan.check_model(FIELDS, [FLOAT] * 3, 1)
    with pytest.raises(SettingsError, match=r"the model has 2 outputs, labelCols is \['y'\]"):
        plan.check_model(FIELDS, [FLOAT, TEXT], 2)
    with pytest.raises(SettingsError, match="feature column word: string: the model takes float32"):
        plan.check_model(FIELDS, [FLOAT], 1)
    with pytest.raises(SettingsError, match="feature column n: double: the model takes string"):
        plan.check_model(FIELDS, [TEXT, TEXT], 1)


@pytest.mark.parametrize("kind", [Kind("timestamp"), Kind("array", Kind("timestamp_ntz"))])
def test_timestamps_that_floats_would_round_are_refused(kind):
    plan = ColumnPlan(features=("at",), labels=("y",))
    fields = [*FIELDS, ("at", kind)]
    with pytest.raises(SettingsError, match=r"feature column at: .*takes float32.*F\.hour"):
        plan.check_model(fields, [FLOAT], 1)
    plan.check_model(fields, [INTEGER], 1)


@pytest.mark.fault("F49")
@pytest.mark.parametrize("kind", [DOUBLE, Kind("float"), Kind("decimal"), Kind("array", DOUBLE)])
def test_floats_that_would_be_ids_are_refused(kind):
    fields = [("n", Kind("long")), ("f", kind), ("y", DOUBLE)]
    plan = ColumnPlan(features=("n", "f"), labels=("y",))
    plan.check_model(fields, [IDS, INTEGER], 1)
    for inputs in ([IDS, TensorInfo("int32", (), is_id=True)], [IDS]):
        with pytest.raises(SettingsError, match=r"column f: .*: the model takes ids of int.*long"):
            plan.check_model(fields, inputs, 1)


def test_several_columns_for_lists_of_any_length_are_refused():
    plan = ColumnPlan(features=("n", "y"), labels=("y",))
    plan.check_model(FIELDS, [INTEGER], 1)
    with pytest.raises(SettingsError, match=r"2 columns are given for the model's input of int64"):
        plan.check_model(FIELDS, [LISTS], 1)
    ColumnPlan(features=("n",)).check_model(FIELDS, [LISTS], 1)


def test_one_name_or_several():
    assert (named("c", "a"), named("c", ["a", "b"]), named("c", None)) == (("a",), ("a", "b"), ())


class Column:
    """As that of Spark, which can be made with a SparkContext alone."""

    def __iter__(self):
        raise TypeError("Column is not iterable")


@pytest.mark.parametrize("given", [[1], 5, Column(), {"a": "b"}, {}])
def test_what_is_no_name_is_no_column(given):
    with pytest.raises(SettingsError, match=r"must be a name or a list of names, got .*"):
        named("feature_cols", given)
