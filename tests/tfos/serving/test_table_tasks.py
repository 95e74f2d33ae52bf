"""Table tasks: what rows of a DataFrame that do not fit are called."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tests.support.tables import table, with_tables
from tfos.errors import SettingsError
from tfos.serving.table_tasks import LoadTask

DIM = 4
GOOD = [1.0] * DIM


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([GOOD, [1.0], None], r"key green has 1 values, 0 of them null; each row needs"),
        ([[1.0, 2.0], GOOD, GOOD], r"key red has 2 values, 0 of them null"),
        ([GOOD, None, [1.0]], r"key green is null"),
        ([GOOD, GOOD, [*GOOD[1:], None]], rf"key blue has {DIM} values, 1 of them null"),
        ([[], GOOD, GOOD], r"key red has 0 values"),
    ],
)
def test_the_first_row_that_does_not_fit_is_named_as_the_dataframe_names_it(rows, text):
    column = pa.array([GOOD, *rows], pa.list_(pa.float32())).slice(1)
    batch = pa.record_batch([pa.array(["red", "green", "blue"]), column], ["id", "row"])
    client = SimpleNamespace(manifest=with_tables(table()))
    servers: Any = SimpleNamespace(connected=lambda: nullcontext(client))
    with pytest.raises(SettingsError, match=text):
        list(LoadTask("user", servers)(iter([batch])))
