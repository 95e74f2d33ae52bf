"""The columns that a DataFrame's feed has."""

from __future__ import annotations

import pytest
from pyspark.sql.types import LongType

from feeding.columnar.schema import MAX_COLUMNS
from rpc.errors import SettingsError
from tfos.feed.dataframe_columns import leaves


@pytest.mark.attack("A10")
def test_a_dataframe_has_a_limited_number_of_columns():
    fields = [(f"c{number}", LongType()) for number in range(MAX_COLUMNS + 1)]
    assert len(leaves(fields[:-1])) == MAX_COLUMNS
    with pytest.raises(SettingsError, match=rf"{MAX_COLUMNS + 1} columns, a feed carries .*array"):
        leaves(fields)
