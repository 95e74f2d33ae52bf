"""Groups of map_train: which partition has the rows of which group."""

from __future__ import annotations

import pickle

import pyarrow
import pytest
from pyspark.sql import SparkSession, functions

from tfos.many.groups import group

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(170, func_only=True),
    pytest.mark.parametrize("spark", ["local[4]"], indirect=True),
]


@pytest.mark.long
def test_groups_have_their_places_by_name_whatever_the_order_of_rows(spark):
    """An executor that is lost takes rows along; those computed again come in another order."""
    session = SparkSession(spark).newSession()
    session.conf.set("spark.sql.shuffle.partitions", "2")
    frame = session.range(100).selectExpr("concat('s', id % 7) as series", "double(id) as v")
    found = []
    for order in ("v", "-v"):
        ordered = frame.orderBy(functions.expr(order))
        work = group(ordered.groupBy("series"), 3, with_digests=False)
        found.append(dict(zip(work.names, work.homes, strict=True)))
        work.release()
    assert found[0] == found[1]
    assert {list(found[0].values()).count(home) for home in (0, 1, 2)} == {2, 3}


@pytest.mark.long
@pytest.mark.parametrize("with_digests", [True, False])
def test_groups_are_packed_as_the_large_types_of_arrow_that_the_session_asks_for(
    spark, with_digests
):
    session = SparkSession(spark).newSession()
    session.conf.set("spark.sql.shuffle.partitions", "2")
    session.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    frame = session.range(10).selectExpr("concat('s', id % 2) as series", "id")
    work = group(frame.groupBy("series"), 2, with_digests=with_digests)
    try:
        assert work.names == ("s0", "s1")
        assert [bool(digest) for digest in work.row_digests] == [with_digests] * 2
        packed = {row.item: pickle.loads(row.data) for row in work.frame.collect()}
        tables = {name: pyarrow.ipc.open_stream(data).read_all() for name, data in packed.values()}
        assert {name: table["id"].to_pylist() for name, table in tables.items()} == {
            "s0": [0, 2, 4, 6, 8],
            "s1": [1, 3, 5, 7, 9],
        }
    finally:
        work.release()
