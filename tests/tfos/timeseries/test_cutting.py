"""Windows of sorted rows: the same however the rows are cut into batches."""

from __future__ import annotations

import dataclasses
import datetime
import math
import zoneinfo

import numpy as np
import pyarrow as pa
import pytest

from tfos.errors import DataError
from tfos.timeseries import cutting
from tfos.timeseries.cutting import TIME, VALUE, WindowPlan, cut

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
HOUR = datetime.timedelta(hours=1)


def plan_of(lookback=2, horizon=1, *, step=1, every=None):
    return WindowPlan(("series",), lookback, horizon, step, every, False, "day")


def rows_of(*rows):
    series, at, value = zip(*rows, strict=True)
    return batch_of(series, pa.array(at), value)


def batch_of(series, times, values):
    return pa.RecordBatch.from_pydict(
        {"series": list(series), TIME: times, VALUE: pa.array(values, pa.float64())}
    )


def windows_of(batch, plan, batch_rows=1000):
    parts = [batch.slice(start, batch_rows) for start in range(0, batch.num_rows, batch_rows)]
    found = [row for table in cut(parts, plan) for row in table.to_pylist()]
    return [(row["series"], row[TIME], row["past"], row["future"]) for row in found]


def series(name, values, start=0):
    return [(name, start + number, value) for number, value in enumerate(values)]


def test_windows_stay_within_a_series_and_name_the_last_known_time():
    batch = rows_of(*series("a", [1, 2, 3, 4]), *series("b", [5, 6]), *series("c", [7, 8, 9]))
    assert windows_of(batch, plan_of()) == [
        ("a", 1, [1, 2], [3]),
        ("a", 2, [2, 3], [4]),
        ("c", 1, [7, 8], [9]),
    ]


def test_the_windows_of_a_large_batch_come_in_several_tables(monkeypatch):
    """All at once they are as many times larger than the rows as a window is long."""
    monkeypatch.setattr(cutting, "_TABLE_VALUES", 8_000)
    batch = rows_of(*series("a", range(300)), *series("b", range(200)))
    plan = plan_of(lookback=90, horizon=10)
    tables = list(cut([batch], plan))
    assert max(table.num_rows for table in tables) * plan.length <= 8_000
    found = [row["past"][0] for table in tables for row in table.to_pylist()]
    assert found == [*range(201), *range(101)]


def test_rows_without_a_name_of_a_series_are_one():
    plan = dataclasses.replace(plan_of(), series=())
    batch = pa.RecordBatch.from_pydict({TIME: [0, 1, 2, 3], VALUE: [1.0, 2.0, 3.0, 4.0]})
    parts = [batch.slice(start, 2) for start in (0, 2)]
    found = pa.concat_tables(cut(parts, plan)).to_pylist()
    assert found == [
        {TIME: 1, "past": [1.0, 2.0], "future": [3.0]},
        {TIME: 2, "past": [2.0, 3.0], "future": [4.0]},
    ]
    twice = pa.RecordBatch.from_pydict({TIME: [0, 0], VALUE: [1.0, 2.0]})
    with pytest.raises(DataError, match=r"^the series has two rows with the time 0"):
        list(cut([twice], plan))


def test_no_window_has_a_missing_value_or_spans_a_gap():
    batch = rows_of(*series("a", [1, 2, math.nan, 3, 4, 5]), ("a", 7, 6), ("a", 8, 7))
    assert [past for _, _, past, _ in windows_of(batch, plan_of())] == [[3, 4], [4, 5], [5, 6]]
    assert [past for _, _, past, _ in windows_of(batch, plan_of(every=1.0))] == [[3, 4]]
    with_null = batch_of("aaaa", pa.array([0, 1, 2, 3]), [None, 1.0, 2.0, 3.0])
    assert windows_of(with_null, plan_of()) == [("a", 2, [1, 2], [3])]


def test_a_value_that_is_too_large_for_float32_is_in_no_window():
    batch = rows_of(*series("a", [1, 2, 1e39, 3, 4, 5]))
    assert [past for _, _, past, _ in windows_of(batch, plan_of())] == [[3, 4]]


@pytest.mark.parametrize("name", [math.nan, None])
def test_series_named_nan_or_null_are_series_like_others(name):
    names = pa.array([1.0, 1.0, 1.0, *5 * [name]], pa.float64())
    batch = pa.RecordBatch.from_pydict(
        {"series": names, TIME: range(8), VALUE: pa.array(range(8), pa.float64())}
    )
    found = windows_of(batch, plan_of())
    assert [past for _, _, past, _ in found] == [[0, 1], [3, 4], [4, 5], [5, 6]]


def test_a_day_between_changes_of_the_clocks_is_explained():
    midnights = [datetime.datetime(2024, 3, 29 + n, tzinfo=BERLIN) for n in range(3)]
    batch = batch_of(
        "aaaa", pa.array([*midnights, datetime.datetime(2024, 4, 1, tzinfo=BERLIN)]), range(4)
    )
    with pytest.raises(DataError, match="a change of the clocks makes one of 23 or 25 hours"):
        windows_of(batch, plan_of(every=86.4e9))


def test_steps_count_from_the_beginning_of_each_run():
    batch = rows_of(*series("a", range(6)), *series("b", range(4)))
    found = windows_of(batch, plan_of(step=2))
    assert [(name, past) for name, _, past, _ in found] == [
        ("a", [0, 1]),
        ("a", [2, 3]),
        ("b", [0, 1]),
    ]


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("step", [1, 3])
def test_batches_do_not_matter(batch_rows, step):
    rng = np.random.default_rng(batch_rows)
    rows = []
    for name in range(12):
        values = rng.normal(size=rng.integers(1, 15))
        values[rng.random(len(values)) < 0.1] = math.nan
        rows += series(f"s{name:02}", values.round(2))
    batch = rows_of(*rows)
    plan = plan_of(3, 2, step=step)
    whole = windows_of(batch, plan)
    assert len(whole) > 3
    assert windows_of(batch, plan, batch_rows) == whole


@pytest.mark.parametrize("batch_rows", [1, 100])
def test_times_that_are_equal_missing_or_out_of_step_are_named(batch_rows):
    equal = rows_of(("a", 1, 1.0), ("b", 1, 1.0), ("b", 1, 2.0))
    with pytest.raises(DataError, match=r"series='b' has two rows with the time 1; .*'day'"):
        windows_of(equal, plan_of(), batch_rows)
    off = rows_of(("a", 1.0, 1.0), ("a", 2.5, 1.0))
    with pytest.raises(DataError, match=r"series='a' has a time, 2.5, that is no multiple"):
        windows_of(off, plan_of(every=1.0), batch_rows)
    missing = rows_of(("a", math.nan, 1.0), ("a", 2.5, 1.0))
    almost = batch_of("a" * 6, pa.array([0, 1, 1.0000000001, 2, 3, 4]), [1.0] * 6)
    text = r"'a' has two rows with the time 1.0000000001, but for less than 1e-06 of every=; round"
    with pytest.raises(DataError, match=text):
        windows_of(almost, plan_of(every=1.0), batch_rows)
    with pytest.raises(DataError, match="a row without a time"):
        windows_of(missing, plan_of(), batch_rows)


@pytest.mark.parametrize(
    ("times", "every"),
    [
        (pa.array([1_700_000_000_000_000 + 100_000 * n for n in range(5)]), 100_000.0),
        (pa.array([1_700_000_000.0 + 0.1 * n for n in range(5)]), 0.1),
        (pa.array([0.1 * n for n in range(20, 25)], pa.float32()), 0.1),
        # Clocks of Europe were changed between the second and the third.
        (
            pa.array([datetime.datetime(2024, 3, 31) + HOUR * n for n in range(5)]),
            HOUR / datetime.timedelta(microseconds=1),
        ),
        (pa.array([datetime.date(2024, 2, 27) + 24 * HOUR * n for n in range(5)]), 86.4e9),
        (pa.array([2**62 + n for n in range(5)]), 1.0),
    ],
    ids=["microseconds", "seconds", "float32", "without a zone", "dates", "large numbers"],
)
def test_times_are_as_exact_as_their_column(times, every):
    batch = batch_of("aaaaa", times, range(5))
    found = windows_of(batch, plan_of(every=every))
    assert [past for _, _, past, _ in found] == [[0, 1], [1, 2], [2, 3]]
    with pytest.raises(DataError, match="that is no multiple"):
        windows_of(batch, plan_of(every=every * 1.001))
    nothing = batch_of("aa", pa.array([None, times[0].as_py()], times.type), [1, 2])
    with pytest.raises(DataError, match="a row without a time"):
        windows_of(nothing, plan_of())


def test_times_that_their_column_holds_too_coarsely_are_no_multiples():
    # Seconds since 1970 are rounded to 128 in float32.
    rounded = pa.array([1_700_000_000.0 + 180 * n for n in range(13)], pa.float32())
    with pytest.raises(DataError, match="that is no multiple"):
        windows_of(batch_of("a" * len(rounded), rounded, range(len(rounded))), plan_of(every=60.0))


def test_times_that_only_the_rounding_of_their_column_tells_apart_are_equal():
    times = pa.array([1_700_000_000.0, 1_700_000_128.0], pa.float32())
    with pytest.raises(DataError, match=r"1700000128.0, but for less than 0\.1 of every="):
        windows_of(batch_of("aa", times, [1, 2]), plan_of(every=3600.0))
