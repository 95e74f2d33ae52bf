"""Groups of map_train: which partition has the rows of which group."""

from __future__ import annotations

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
