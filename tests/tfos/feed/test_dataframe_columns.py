"""The columns that a DataFrame's feed has."""

from __future__ import annotations

import pytest
from pyspark.sql.types import LongType

from feeding.columnar.schema import MAX_COLUMNS
from rpc.errors import SettingsError
from tfos.estimators.columns import ColumnPlan
from tfos.feed.dataframe_columns import Leaf, check_ids, fills, leaves, positions_of, select


@pytest.mark.attack("A10")
def test_a_dataframe_has_a_limited_number_of_columns():
    fields = [(f"c{number}", LongType()) for number in range(MAX_COLUMNS + 1)]
    assert len(leaves(fields[:-1])) == MAX_COLUMNS
    with pytest.raises(SettingsError, match=rf"{MAX_COLUMNS + 1} columns, a feed carries .*array"):
        leaves(fields)


@pytest.mark.attack("A10")
def test_names_too_long_to_travel_together_are_refused_by_the_driver():
    fields = [(f"c{number}".ljust(150, "x"), LongType()) for number in range(2000)]
    with pytest.raises(SettingsError, match=r"2000 columns take up to 792000 bytes, .* 786432"):
        leaves(fields)
    assert len(leaves(fields[:1900])) == 1900


def test_a_name_that_two_columns_have_names_none_of_them():
    assert positions_of(["a", "b", "a", "c"], ["c", "b", "c"]) == (3, 1, 3)
    with pytest.raises(SettingsError, match=r"'a': the DataFrame has 2 of them: .*toDF.* renames"):
        positions_of(["a", "b", "a"], ["b", "a"])
    with pytest.raises(SettingsError, match="'A': the DataFrame has no such column"):
        positions_of(["a"], ["A"])


def test_every_door_words_a_missing_column_alike():
    fields = [("a", LongType()), ("y", LongType())]
    doors = {
        r"columns=\['x'\]": lambda: select(["a", "y"], ["x"]),
        "featuresCols": lambda: ColumnPlan(features=("x",), labels=("y",)).check(fields),
    }
    for what, door in doors.items():
        sentence = rf"^{what}: 'x': the DataFrame has no such column: it has \['a', 'y'\]; name "
        with pytest.raises(SettingsError, match=sentence):
            door()
    with pytest.raises(SettingsError, match="column 'a' exists twice"):
        select(["a", "a"], None)


def test_columns_that_are_no_names_are_told():
    """Spark's Column answers == with another Column, whose truth value pyspark refuses."""

    class Column:
        def __eq__(self, other):
            raise ValueError("cannot convert column into bool")

        __hash__ = object.__hash__

        def __repr__(self):
            return "Column<'a'>"

    with pytest.raises(SettingsError, match=r"must be names, got Column<'a'> \(Column\); .*select"):
        select(["a", "b"], ["b", Column()])


@pytest.mark.parametrize("kind", ["float", "double", "decimal"])
def test_a_column_of_floats_is_no_column_of_ids(kind):
    text = rf"column x: array<{kind}>: the model takes ids of int64 there.*cast\('long'\)"
    with pytest.raises(SettingsError, match=text):
        check_ids(Leaf("x", kind, is_list=True), "int64")
    check_ids(Leaf("x", "long"), "int64")


@pytest.mark.parametrize("value", [1e300, -3.5e38, 10**400])
def test_a_fill_that_would_become_infinite_is_refused(value):
    columns = [Leaf("x", "float"), Leaf("y", "float", is_list=True)]
    for nulls in (value, {"x": value}, {"y": [0.0, value]}):
        with pytest.raises(
            SettingsError, match=r"does not fit column [xy]: .*up to 3\.4028235e\+38"
        ):
            fills(columns, nulls)
    fitting = [3.4028235e38, float("inf"), 5]
    assert fills(columns, {"y": fitting}) == {"y": fitting}
    if value != 10**400:
        assert fills([Leaf("x", "double")], value) == {"x": value}


@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ntz", "date"])
def test_a_fill_that_is_no_time_is_refused(kind):
    """The tasks that fed it ended in an error of Arrow, which names no column."""
    pd = pytest.importorskip("pandas")
    with pytest.raises(SettingsError, match=rf"NaT does not fit column t: {kind}; a datetime\."):
        fills([Leaf("t", kind)], {"t": pd.NaT})
