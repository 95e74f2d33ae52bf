"""What windows() refuses before Spark does anything."""

from __future__ import annotations

import datetime

import numpy as np
import pytest

from tfos.errors import SettingsError
from tfos.timeseries import windows


class Frame:
    mapInArrow = None
    dtypes = (
        ("plane", "string"),
        ("leaves", "timestamp"),
        ("delay", "double"),
        ("past", "string"),
        ("parts", "array<string>"),
        ("_TFOS_time", "string"),
        ("shop", "string collate UTF8_LCASE"),
        ("nothing", "void"),
    )


WRONG = [
    ({"lookback": 0}, "lookback must be an int >= 1, got 0"),
    ({"horizon": 1.5}, "horizon must be an int >= 1, got 1.5"),
    ({"step": True}, "step must be an int >= 1, got True"),
    ({"duplicates": "last"}, "duplicates must be"),
    ({"value": "dely"}, "'dely': the DataFrame has no such column: it has"),
    ({"value": "plane"}, "'plane'.* must be different columns"),
    ({"value": "past"}, "value column 'past' must be of numbers, it is string"),
    ({"time": "plane", "id": "leaves"}, "time column 'plane' must be of timestamps"),
    ({"id": ["plane", "past"]}, "column 'past' is also a column of the result"),
    ({"id": "_TFOS_time"}, "column '_TFOS_time' is also a column of the result"),
    ({"id": "parts"}, "id column 'parts' must be of texts, numbers or times, it is array<string>"),
    ({"id": "shop"}, r"id column 'shop' is a string collate UTF8_LCASE, .*cast\('string'\)"),
    ({"id": ["plane", "nothing"]}, r"id column 'nothing' is void: .*Leave it out, or .*cast"),
    ({"id": (), "value": "leaves"}, "must be different columns"),
    ({"id": np.array(["plane", "parts"], object)}, "id column 'parts' must be of texts"),
    ({"every": 60}, "every must be a positive timedelta"),
    ({"every": datetime.timedelta(0)}, "every must be a positive timedelta"),
    ({"time": "delay", "value": "leaves"}, "value column 'leaves' must be of numbers"),
]


@pytest.mark.parametrize(("changed", "text"), WRONG, ids=[text for _, text in WRONG])
def test_what_cannot_work_is_refused_at_the_call(changed, text):
    given = {"id": "plane", "time": "leaves", "value": "delay", "lookback": 3, "horizon": 1}
    with pytest.raises(SettingsError, match=text):
        windows(Frame(), **{**given, **changed})


@pytest.mark.parametrize(
    "given", [type("DataFrame", (), {"__module__": "pandas.core.frame"})(), [("a", 1, 0.5)], None]
)
def test_rows_that_are_no_dataframe_of_spark_are_refused(given):
    """They ended in an error about their dtypes."""
    text = r"must be a Spark DataFrame, got .*; use .*spark\.createDataFrame"
    with pytest.raises(SettingsError, match=text):
        windows(given, "plane", "leaves", "delay", 3, 1)
