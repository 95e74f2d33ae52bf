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


def test_a_row_of_another_width_is_named_as_the_dataframe_names_it():
    rows = pa.array([[1.0, 2.0], [1.0]], pa.list_(pa.float32()))
    batch = pa.record_batch([pa.array(["red", "green"]), rows], ["id", "row"])
    client = SimpleNamespace(manifest=with_tables(table()))
    servers: Any = SimpleNamespace(connected=lambda: nullcontext(client))
    with pytest.raises(SettingsError, match=r"rows of 2 and 1 values \(the key green\)"):
        list(LoadTask("user", servers)(iter([batch])))
