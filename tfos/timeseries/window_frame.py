"""`tfos.timeseries.windows`: turns a DataFrame of (series, time, value) into windows.

Covers: the arguments, Spark's sorting, names and types of the columns.
Does not: cut (tfos.timeseries.cutting).
Runs in: the driver; `WindowTask` in Spark's tasks.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tfos.errors import SettingsError
from tfos.feed.dataframe_columns import positions_of
from tfos.timeseries.cutting import TIME, VALUE, WindowPlan, cut

_NUMBERS = {"tinyint", "smallint", "int", "bigint", "float", "double"}
_TIMES = {"timestamp", "timestamp_ntz", "date"}
_OURS = ("past", "future")
_MAX_ROWS = 1 << 20


def windows(  # noqa: PLR0913 - the public surface: keywords with defaults
    df: Any,
    id: str | Sequence[str] | None,  # noqa: A002 - what such columns are called
    time: str,
    value: str,
    lookback: int,
    horizon: int,
    *,
    step: int = 1,
    every: float | datetime.timedelta | None = None,
    duplicates: Literal["error", "mean"] = "error",
) -> Any:
    """Return the windows of many time series, to train one forecaster for all or one for each.

    Spark sorts the rows and numpy cuts them, many series at a time. A row of the result is one
    window: the columns of `id`, `time` with the time of the last known value, `past` (array<float>,
    `lookback` values) and `future` (array<float>, the next `horizon` values). A series shorter than
    a window has none. No window has a missing value (null, NaN, infinite) or spans a gap.

    Args:
        df: one row per series and time, in any order.
        id: one or more columns that name a series; None: all rows are one series, cut by one task.
        time: a column of timestamps, dates or numbers.
        value: a column of numbers.
        lookback: values that a forecaster sees.
        horizon: values that it predicts.
        step: rows between the starts of two windows.
        every: difference of neighbouring times: a timedelta, or a number if the times are numbers.
            A larger one is a gap; one that is not a multiple is an error. None: consecutive rows
            are neighbours, whatever their times.
        duplicates: "error": equal times in a series fail the job, with the series' name; "mean":
            their values are averaged, without missing ones.

    Raises:
        SettingsError: a column or a number is invalid. Invalid rows raise DataError in Spark's job,
            with the series and the time.
    """
    series = (id,) if isinstance(id, str) else () if id is None else tuple(id)
    for name, number in (("lookback", lookback), ("horizon", horizon), ("step", step)):
        if type(number) is not int or number < 1:
            raise SettingsError(f"{name} must be an int >= 1, got {number!r}")
    if duplicates not in ("error", "mean"):
        raise SettingsError(f'duplicates must be "error" or "mean", got {duplicates!r}')
    kind = _check_columns(df, series, time, value)
    plan = WindowPlan(
        series=series,
        lookback=lookback,
        horizon=horizon,
        step=step,
        every=_every(every, kind),
        averages_duplicates=duplicates == "mean",
        time_name=time,
    )
    return (
        _sorted(df, series, time, value, plan)
        .mapInArrow(WindowTask(plan), _schema(df, series, time))
        .withColumnRenamed(TIME, time)
    )


@dataclass(frozen=True, slots=True)
class WindowTask:
    """Cuts one partition."""

    plan: WindowPlan

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches of windows."""
        names = [*self.plan.series, TIME, VALUE]
        for table in cut((batch.rename_columns(names) for batch in batches), self.plan):
            yield from table.to_batches(_MAX_ROWS)


_COLLATED = " collate "
"""Part of Spark's name for text types that are not compared byte by byte."""
_NESTED = ("array", "struct", "map", "variant")


def _check_columns(df: Any, series: tuple[str, ...], time: str, value: str) -> str:
    """Return the type of the time column."""
    from tfos.feed.dataframe import check_frame  # Spark's tasks, which import this, feed nothing

    check_frame(df)
    kinds = dict(df.dtypes)
    asked = (*series, time, value)
    positions_of([name for name, _ in df.dtypes], asked, f"id={list(series)}, {time=}, {value=}")
    if len({*series, time, value}) < len(series) + 2:
        raise SettingsError(
            f"id={list(series)}, time={time!r} and value={value!r} must be different columns"
        )
    ours = {*_OURS, TIME, VALUE}
    taken = [name for name in (*series, time) if name.casefold() in ours]
    if taken:
        raise SettingsError(f"column {taken[0]!r} is also a column of the result; rename it")
    for name in series:
        if kinds[name].startswith(_NESTED):
            raise SettingsError(
                f"id column {name!r} must be of texts, numbers or times, it is {kinds[name]}; "
                "name its parts, or a text made of them"
            )
        if kinds[name] == "void":
            raise SettingsError(
                f"id column {name!r} is void: it holds only nulls, and names no series. Leave it "
                f"out, or give it a type: df.withColumn({name!r}, col({name!r}).cast('string'))"
            )
        if _COLLATED in kinds[name]:
            # Spark would sort "A" and "a" as one series, but their texts are different series.
            raise SettingsError(
                f"id column {name!r} is a {kinds[name]}, for which different texts may be equal: "
                f"pass df.withColumn({name!r}, col({name!r}).cast('string')), of lower(...) if "
                "they are one series"
            )
    if kinds[value] not in _NUMBERS and not kinds[value].startswith("decimal"):
        raise SettingsError(f"value column {value!r} must be of numbers, it is {kinds[value]}")
    kind: str = kinds[time]
    if kind not in _NUMBERS | _TIMES:
        raise SettingsError(
            f"time column {time!r} must be of timestamps, dates or numbers, it is {kind}"
        )
    return kind


def _every(every: object, kind: str) -> float | None:
    """Return the step in microseconds, or in the unit of a column of numbers."""
    if every is None:
        return None
    if kind in _TIMES:
        if not isinstance(every, datetime.timedelta) or every <= datetime.timedelta(0):
            raise SettingsError(f"every must be a positive timedelta for times, got {every!r}")
        return every / datetime.timedelta(microseconds=1)
    is_number = isinstance(every, int | float) and not isinstance(every, bool)
    if not is_number or not 0 < every < math.inf:  # type: ignore[operator]  # it is a number
        raise SettingsError(f"every must be a number > 0 for times that are numbers, got {every!r}")
    return float(every)  # type: ignore[arg-type]  # it is a number


def _sorted(df: Any, series: tuple[str, ...], time: str, value: str, plan: WindowPlan) -> Any:
    from pyspark.sql import functions

    from tfos.feed.dataframe import chosen

    # Spark reads `a.b` as field b of a, and `T` and `t` as the same name: WindowTask names them.
    names = [f"c{place}" for place in range(len(series))]
    rows = chosen(df, (*series, time, value)).toDF(*names, TIME, VALUE)
    rows = rows.withColumn(VALUE, functions.col(VALUE).cast("double"))
    if plan.averages_duplicates:
        # NaN is not below infinity: Spark treats it as the largest number.
        usable = functions.when(functions.abs(VALUE) < math.inf, functions.col(VALUE))
        rows = rows.groupBy(*names, TIME).agg(functions.avg(usable).alias(VALUE))
    return rows.repartition(*(names or (1,))).sortWithinPartitions(*names, TIME)


def _schema(df: Any, series: tuple[str, ...], time: str) -> Any:
    from pyspark.sql.types import ArrayType, FloatType, StructField, StructType

    fields = [df.schema[name] for name in series]
    floats = ArrayType(FloatType())
    return StructType(
        [
            *fields,
            StructField(TIME, df.schema[time].dataType),
            *(StructField(name, floats) for name in _OURS),
        ]
    )
