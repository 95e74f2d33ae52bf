"""Digest of rows: every change of a value shows, another order of the rows does not."""

from __future__ import annotations

import datetime
import decimal

import pyarrow
import pytest

from tfos.many.row_digest import rows_digest

DAY = datetime.date(2024, 2, 29)
NOON = datetime.datetime(2024, 2, 29, 12)
COLUMNS = [
    (pyarrow.bool_(), [True, False, None], True),
    (pyarrow.int8(), [1, -1, None], 0),
    (pyarrow.int64(), [1 << 60, (1 << 60) + 2, None], (1 << 60) + 1),  # one float64 for all
    (pyarrow.float32(), [0.5, float("nan"), None], 0.0),
    (pyarrow.float64(), [0.1, -0.0, None], 0.1 + 1e-17 + 2**-56),
    (pyarrow.date32(), [DAY, DAY, None], datetime.date(1970, 1, 1)),
    (pyarrow.timestamp("us", "UTC"), [NOON, NOON, None], NOON.replace(microsecond=1)),
    (pyarrow.duration("us"), [datetime.timedelta(1), None, None], datetime.timedelta(0)),
    (pyarrow.decimal128(20, 2), [decimal.Decimal("1.25"), None, None], decimal.Decimal("1.26")),
    (pyarrow.string(), ["a", "", None], "None"),
    (pyarrow.binary(), [b"a\0", b"", None], b"a\0\0"),
    (pyarrow.list_(pyarrow.float64()), [[0.5] * 2000, [], None], [0.5] * 1999 + [0.25]),
    (pyarrow.struct([("x", pyarrow.int64())]), [{"x": 1}, {"x": None}, None], {"x": 2}),
    (pyarrow.map_(pyarrow.string(), pyarrow.int64()), [[("k", 1)], [], None], [("k", 2)]),
    (pyarrow.null(), [None, None, None], None),
]


def table(kind: pyarrow.DataType, values: list[object]) -> pyarrow.Table:
    series = pyarrow.array(["s"] * len(values))
    return pyarrow.table({"series": series, "v": pyarrow.array(values, kind)})


@pytest.mark.parametrize(
    ("kind", "values", "other"), COLUMNS, ids=[str(each[0]) for each in COLUMNS]
)
def test_a_changed_value_of_any_type_shows_and_the_order_of_rows_does_not(kind, values, other):
    digest = rows_digest(table(kind, values))
    assert digest == rows_digest(table(kind, values[::-1]))
    halves = [table(kind, values[1:]), table(kind, values[:1])]
    assert digest == rows_digest(pyarrow.concat_tables(halves))
    if other is not None:
        for place in range(3):
            if values[place] is other:
                continue
            changed = [*values[:place], other, *values[place + 1 :]]
            assert rows_digest(table(kind, changed)) != digest
    assert rows_digest(table(kind, [*values, values[0]])) != digest


def test_values_that_change_places_among_rows_or_columns_show():
    def of(**columns):
        return rows_digest(pyarrow.table(columns))

    digest = of(a=[1, 2], b=[3, 4])
    assert of(a=[1, 2], b=[4, 3]) != digest
    assert of(a=[3, 4], b=[1, 2]) != digest
    assert of(a=[1, 2], c=[3, 4]) != digest
    assert of(a=[1.0, 2.0], b=[3, 4]) != digest
    assert of(a=[1, 1, 2], b=[3, 3, 4]) != of(a=[1, 2, 2], b=[3, 4, 4])


def test_what_lies_under_a_null_does_not_count():
    zeros = pyarrow.array([1, None], pyarrow.int64())
    rest = pyarrow.Array.from_buffers(
        pyarrow.int64(), 2, [zeros.buffers()[0], pyarrow.py_buffer(b"\1" + b"\0" * 7 + b"\7" * 8)]
    )
    digests = {rows_digest(pyarrow.table({"v": values})) for values in (zeros, rest)}
    assert len(digests) == 1
