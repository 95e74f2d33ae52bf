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


def of(*infos):
    """Return inputs by their names, in0 and so on."""
    return {f"in{number}": info for number, info in enumerate(infos)}


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
        (ColumnPlan(features=("n", "y"), labels=("y",)), ["a"], ["b"], ({"n": "n", "y": "y"}, "y")),
        (
            ColumnPlan(features=("n", "word"), labels=("y", "n")),
            ["a", "b"],
            ["c", "d"],
            ({"a": "n", "b": "word"}, {"c": "y", "d": "n"}),
        ),
        (ColumnPlan(features=("n", "word"), labels=("y",)), [], [], (["n", "word"], "y")),
        (
            ColumnPlan(features=("x", "n"), labels=("y", "ys")),
            ["n", "x"],
            ["ys", "y"],
            ({"n": "n", "x": "x"}, {"ys": "ys", "y": "y"}),
        ),
    ],
)
def test_columns_go_to_the_inputs_in_their_order(plan, inputs, outputs, expected):
    found = plan.selectors(inputs, outputs)
    assert (found["feature_cols"], found["label_cols"]) == expected
    plan.check(FIELDS)


@pytest.mark.parametrize(
    ("columns", "inputs", "outputs", "text"),
    [
        (("user", "age"), ["item", "user"], ["b", "c"], "featuresCols=.*'user' would be the input"),
        (("x", "n"), ["i", "j"], ["y", "ys"], r"labelCols=.*'ys'.*the output 'y'.*\['y', 'ys'\]"),
    ],
)
def test_a_column_with_the_name_of_another_input_or_output_is_refused(
    columns, inputs, outputs, text
):
    kinds = [(name, DOUBLE) for name in (*columns, "ys", "w")]
    plan = ColumnPlan(features=columns, labels=("ys", "w"))
    with pytest.raises(SettingsError, match=text):
        plan.check_model(kinds, dict.fromkeys(inputs, FLOAT), outputs)
    with pytest.raises(SettingsError, match=text):
        plan.selectors(inputs, outputs)


def test_what_a_column_must_be_is_said_by_the_input_of_its_name():
    plan = ColumnPlan(features=("x", "word"), labels=("y",))
    fields = [("x", DOUBLE), ("word", STRING), ("y", DOUBLE)]
    plan.check_model(fields, {"word": TEXT, "x": FLOAT}, ["out"])
    with pytest.raises(SettingsError, match="feature column word: string: the model takes float32"):
        plan.check_model(fields, {"word": FLOAT, "x": FLOAT}, ["out"])


@pytest.mark.parametrize(
    ("columns", "inputs", "fits"),
    [
        (("n",), of(TensorInfo("float32", (784,))), False),
        (("y", "n"), of(TensorInfo("float32", (3,))), False),
        (("y", "n"), of(TensorInfo("float32", (None, 3))), False),
        (("y", "n"), of(TensorInfo("float32", (None, 1))), True),
        (("x", "n"), of(TensorInfo("float32", (1,)), TensorInfo("float32", (4,))), False),
        (("y", "n"), of(TensorInfo("float32", (1,)), TensorInfo("float32", ())), True),
        (("y", "n"), of(TensorInfo("float32", (2, 1))), True),
        (("n", "ys"), of(TensorInfo("float32", (5,))), True),
        (("n",), of(TensorInfo("float32", (None,))), True),
        (("y", "n"), of(TensorInfo("float32", (), has_rank=False)), True),
        (("x",), {}, True),
    ],
)
def test_columns_of_one_value_are_as_many_as_the_inputs_values(columns, inputs, fits):
    plan = ColumnPlan(features=columns, labels=("y",))
    if fits:
        plan.check_model(FIELDS, inputs, ["out"])
        return
    with pytest.raises(SettingsError, match=r"feature columns .*: \d values.*float32\[.*\]: name"):
        plan.check_model(FIELDS, inputs, ["out"])


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
        (ColumnPlan(features=("x",), labels=("word",)), "label column word: string; it must"),
        (ColumnPlan(features=("x",), labels=("day",)), "label column day: date; it must"),
        (
            ColumnPlan(features=("x",), labels=("y",), weight="ys"),
            "weight column ys: array<double>; .*per row",
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
    plan.check_model(FIELDS, {}, ())
    plan.check_model(FIELDS, of(FLOAT, TEXT), ["out"])
    text = r"the model has 3 inputs, featuresCols is \['n', 'word'\].*'in2'\]; for a dict, its"
    with pytest.raises(SettingsError, match=text):
        plan.check_model(FIELDS, of(FLOAT, FLOAT, FLOAT), ["out"])
    text = r"the model has 2 outputs, labelCols is \['y'\].*'b'\]; for a dict, its sorted keys"
    with pytest.raises(SettingsError, match=text):
        plan.check_model(FIELDS, of(FLOAT, TEXT), ["a", "b"])
    with pytest.raises(SettingsError, match="feature column word: string: the model takes float32"):
        plan.check_model(FIELDS, of(FLOAT), ["out"])
    with pytest.raises(SettingsError, match="feature column n: double: the model takes string"):
        plan.check_model(FIELDS, of(TEXT, TEXT), ["out"])


@pytest.mark.parametrize("kind", [Kind("timestamp"), Kind("array", Kind("timestamp_ntz"))])
def test_timestamps_that_floats_would_round_are_refused(kind):
    plan = ColumnPlan(features=("at",), labels=("y",))
    fields = [*FIELDS, ("at", kind)]
    with pytest.raises(SettingsError, match=r"feature column at: .*takes float32.*F\.hour"):
        plan.check_model(fields, of(FLOAT), ["out"])
    plan.check_model(fields, of(INTEGER), ["out"])


@pytest.mark.fault("F49")
@pytest.mark.parametrize("kind", [DOUBLE, Kind("float"), Kind("decimal"), Kind("array", DOUBLE)])
def test_floats_that_would_be_ids_are_refused(kind):
    fields = [("n", Kind("long")), ("f", kind), ("y", DOUBLE)]
    plan = ColumnPlan(features=("n", "f"), labels=("y",))
    plan.check_model(fields, of(IDS, INTEGER), ["out"])
    for inputs in (of(IDS, TensorInfo("int32", (), is_id=True)), of(IDS)):
        with pytest.raises(SettingsError, match=r"column f: .*: the model takes ids of int.*long"):
            plan.check_model(fields, inputs, ["out"])


def test_several_columns_for_lists_of_any_length_are_refused():
    plan = ColumnPlan(features=("n", "y"), labels=("y",))
    plan.check_model(FIELDS, of(TensorInfo("int64", (2,))), ["out"])
    with pytest.raises(SettingsError, match=r"2 columns are given for the model's input of int64"):
        plan.check_model(FIELDS, of(LISTS), ["out"])
    ColumnPlan(features=("n",)).check_model(FIELDS, of(LISTS), ["out"])


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
