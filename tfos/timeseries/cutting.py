"""Cutting of sorted rows into windows, for many series at a time, without a loop over rows.

Covers: Arrow batches, sorted by series and time, to tables of windows; rows carried from one batch
to the next.
Does not: sort, or know Spark (tfos.timeseries.window_frame).
Runs in: Spark's tasks.      Threads: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tfos.errors import DataError

TIME, VALUE = "_tfos_time", "_tfos_value"
"""Columns of the rows, next to the user's columns that name a series."""
_DAY_US = 86_400_000_000
_TABLE_VALUES = 1 << 24
"""Most values in the windows of one table, 64 MiB; an Arrow list counts them in 32 bits."""
_LEAST_ROWS = 64
"""Rows that are cut at once however long a window is: each cut reads the carried rows again."""
_MOST_ROUNDED = 0.1
"""Part of `every` that rounding of times may account for: a column that rounds more tells no steps
apart, and any time would pass for a multiple."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """How rows become windows.

    A run is a stretch of one series without a gap or a missing value. Windows lie within a run.
    """

    series: tuple[str, ...]
    """Columns that name a series; none: all rows are one series."""
    lookback: int
    horizon: int
    step: int
    """Rows between the starts of two windows, counted from the start of the run."""
    every: float | None
    """Difference of neighbouring times: in microseconds for timestamps and dates, in the column's
    unit for numbers; None: any."""
    averages_duplicates: bool
    time_name: str
    """Name of the user's column, for messages."""

    @property
    def length(self) -> int:
        """Number of rows of a window."""
        return self.lookback + self.horizon


def cut(batches: Iterable[pa.RecordBatch], plan: WindowPlan) -> Iterator[pa.Table]:
    """Yield tables of windows: the series' columns, TIME, `past` and `future`.

    Args:
        batches: rows of one partition in the order of series and time: the series' columns, TIME
            (timestamps, dates or numbers) and VALUE (float64).
        plan: how to cut.

    Raises:
        DataError: times of a series are equal, missing or out of step; names it.
    """
    carried: pa.Table | None = None
    carried_positions = np.zeros(0, np.int64)
    for batch in _parts(batches, plan):
        rows = pa.Table.from_batches([batch])
        if carried is not None:
            rows = pa.concat_tables([carried, rows])
        rows = rows.combine_chunks()
        positions = _positions(rows, plan, carried_positions)
        # The first carried row was checked against the row before it, which is gone.
        found = _windows(rows, positions, plan, len(carried_positions))
        if found.num_rows:
            yield found
        kept = min(rows.num_rows, plan.length - 1)
        carried = rows.slice(rows.num_rows - kept)
        carried_positions = positions[rows.num_rows - kept :]


def _parts(batches: Iterable[pa.RecordBatch], plan: WindowPlan) -> Iterator[pa.RecordBatch]:
    """Yield batches in parts whose windows fit a table: those of all rows may be far larger."""
    most = max(_LEAST_ROWS, _TABLE_VALUES // plan.length)
    for batch in batches:
        for start in range(0, batch.num_rows, most):
            yield batch.slice(start, most)


def _positions(rows: pa.Table, plan: WindowPlan, known: np.ndarray) -> np.ndarray:
    """Return each row's position in its run from 0; -1 for a missing value (int64).

    Args:
        rows: carried and new rows.
        plan: how to cut.
        known: positions of the carried rows.
    """
    is_missing = ~np.isfinite(_values(rows))
    begins = np.ones(rows.num_rows, bool)
    begins[1:] = ~_continues(rows, plan) | is_missing[1:] | is_missing[:-1]
    index = np.arange(rows.num_rows)
    starts = np.maximum.accumulate(np.where(begins, index, 0))
    positions = index - starts
    if len(known):
        # The run of the first carried row began earlier.
        positions[starts == 0] += known[0]
    positions[is_missing] = -1
    return positions


def _values(rows: pa.Table) -> np.ndarray:
    """Return values as in windows (float32): a value that is too large becomes infinite."""
    with np.errstate(over="ignore"):
        found: np.ndarray = rows[VALUE].to_numpy().astype(np.float32)
        return found


def _continues(rows: pa.Table, plan: WindowPlan) -> np.ndarray:
    """Return for each row except the first whether it continues the previous row (bool)."""
    same = np.ones(rows.num_rows - 1, bool)
    for name in plan.series:
        column = rows[name].combine_chunks()
        later, earlier = column[1:], column[:-1]
        # As in Spark's grouping, nulls are one series, and so are NaNs.
        equal = pc.fill_null(pc.equal(later, earlier), False)
        equal = pc.or_(equal, pc.and_(pc.is_null(later), pc.is_null(earlier)))
        if pa.types.is_floating(column.type):
            both_nan = pc.and_(pc.is_nan(later), pc.is_nan(earlier))
            equal = pc.or_(equal, pc.fill_null(both_nan, False))
        same &= equal.to_numpy(zero_copy_only=False)
    at, is_missing = _times(rows[TIME].combine_chunks())
    _refuse(rows, plan, is_missing, "a row without a time; filter such rows out")
    gap = np.diff(at)
    equal_times = np.concatenate([[False], same & (gap == 0)])
    advice = 'pass duplicates="mean", or remove one of them'
    _refuse(rows, plan, equal_times, f"two rows with the time {{time}}; {advice}")
    if plan.every is None:
        return same
    steps = gap / plan.every
    whole = np.rint(steps)
    tolerance = 1e-6 + min(_rounding(at, rows[TIME].type) / plan.every, _MOST_ROUNDED)
    is_whole = np.abs(steps - whole) <= tolerance
    off = np.concatenate([[False], same & ~is_whole])
    text = "a time, {time}, that is no multiple of every= after the one before"
    if pa.types.is_timestamp(rows[TIME].type) and rows[TIME].type.tz:
        text += (
            "; if every= is in days, a change of the clocks makes one of 23 or 25 hours: use dates "
            "or timestamps without a zone"
        )
    _refuse(rows, plan, off, text)
    almost_equal = np.concatenate([[False], same & (whole == 0)])
    text = f"two rows with the time {{time}}, but for less than {tolerance:.1g} of every="
    text += "; round the times"
    _refuse(rows, plan, almost_equal, text)
    follows: np.ndarray = same & (whole == 1)
    return follows


def _times(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return times as numbers, and which are missing; timestamps and dates in microseconds.

    Integers stay integers: as float64, seconds since 1970 are off by more than a millionth of steps
    of 100 ms, and a timestamp without a zone has no zone-independent seconds since 1970.
    """
    is_missing = column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_date(column.type):
        days = column.cast(pa.int32()).fill_null(0).to_numpy(zero_copy_only=False)
        return days.astype(np.int64) * _DAY_US, is_missing
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    at = column.fill_null(0).to_numpy(zero_copy_only=False)
    if at.dtype.kind == "f":
        return at.astype(np.float64), is_missing | ~np.isfinite(at)
    return at.astype(np.int64), is_missing


def _rounding(at: np.ndarray, kind: pa.DataType) -> float:
    """Return by how much the difference of two times may be off because the column rounds them."""
    if at.dtype.kind == "i":
        return 0.0
    # `at` is float64, also of a column of float32.
    dtype = np.float32 if pa.types.is_float32(kind) else np.float64
    return 4 * float(np.spacing(np.abs(at).max().astype(dtype)))


def _refuse(rows: pa.Table, plan: WindowPlan, wrong: np.ndarray, text: str) -> None:
    if not wrong.any():
        return
    row = int(np.argmax(wrong))
    series = ", ".join(f"{name}={rows[name][row].as_py()!r}" for name in plan.series)
    what = text.format(time=rows[TIME][row].as_py())
    whose = f"the series {series}" if series else "the series"
    raise DataError(f"{whose} has {what} (column {plan.time_name!r})")


def _windows(rows: pa.Table, positions: np.ndarray, plan: WindowPlan, num_old: int) -> pa.Table:
    """Return the windows whose last row is new."""
    before = positions - (plan.length - 1)
    is_end = (before >= 0) & (before % plan.step == 0)
    is_end[:num_old] = False
    ends = np.flatnonzero(is_end)
    if len(ends):
        views = np.lib.stride_tricks.sliding_window_view(_values(rows), plan.length)
        found = views[ends - (plan.length - 1)]
    else:
        found = np.zeros((0, plan.length), np.float32)
    origins = pa.array(ends - plan.horizon)  # the last known row
    columns = {name: rows[name].take(origins) for name in plan.series}
    columns[TIME] = rows[TIME].take(origins)
    columns["past"] = _lists(found[:, : plan.lookback])
    columns["future"] = _lists(found[:, plan.lookback :])
    return pa.table(columns)


def _lists(values: np.ndarray) -> pa.ListArray:
    """Return rows as lists (array<float>)."""
    count, length = values.shape
    offsets = np.arange(count + 1, dtype=np.int32) * length
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel()))
