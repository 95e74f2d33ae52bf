"""Split of a fit: which rows train and which validate, the same ones in every epoch.

Covers: the flag of a row, and the rows as they were when it was drawn.
Does not: check columns (tfos.estimators.columns) or feed (tfos.feed).
Runs in: the driver. Imports pyspark inside functions only.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

from tfos.errors import SettingsError
from tfos.estimators.columns import ColumnPlan
from tfos.feed.dataframe import chosen
from tfos.feed.dataframe_columns import positions_of

_FLAG = "validates"


@contextlib.contextmanager
def divided(frame: Any, plan: ColumnPlan, share: float, seed: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield the rows to train and those that validate; None in their place: there are none.

    Spark computes a DataFrame again for every epoch, and a value may differ then: the order of a
    collected list, the last bit of a mean. A row could then train in one epoch and validate in
    another. So the rows are kept with their flags until the block ends, on disk if memory is
    short. Rows that Spark already keeps are not kept twice.

    Args:
        frame: the user's rows.
        plan: its columns.
        share: share of the rows that validates; 0: as the plan says.
        seed: seed of the draw.

    Raises:
        SettingsError: both share and plan name rows that validate.
    """
    rows = chosen(frame, plan.used)
    if plan.validation is None and not share:
        yield rows, None
        return
    from pyspark.sql import functions as f

    plain = rows.toDF(*(f"c{position}" for position in range(len(rows.columns))))
    # Equal queries share one entry of Spark's cache: a concurrent fit would remove it.
    own = f.lit(uuid.uuid4().hex).isNotNull()
    marked = plain.withColumn(_FLAG, _flag(plain, rows.columns, plan, share, seed) & own)
    is_kept = frame.storageLevel.useDisk
    if not is_kept:
        from pyspark import StorageLevel

        marked.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield tuple(
            marked.filter(flag).drop(_FLAG).toDF(*rows.columns)
            for flag in (~f.col(_FLAG), f.col(_FLAG))
        )
    finally:
        if not is_kept and frame.sparkSession.sparkContext._jsc is not None:  # it is not stopped
            marked.unpersist()


def _flag(plain: Any, names: list[str], plan: ColumnPlan, share: float, seed: int) -> Any:
    """Return the column that is true where a row validates.

    Args:
        plain: the rows, under names that differ in more than their case.
        names: the user's names, in the same order.
        plan: the columns, by the user's names.
        share: share of the rows that validates.
        seed: seed of the draw.
    """
    from pyspark.sql import functions as f

    if plan.validation is None:
        return _place(plain, names, plan, seed) < share
    if share:
        raise SettingsError(
            f"validationSplit={share} and validationCol={plan.validation!r}; set one of them"
        )
    (position,) = positions_of(names, [plan.validation])
    return f.coalesce(f.col(plain.columns[position]).cast("boolean"), f.lit(False))


def _place(plain: Any, names: list[str], plan: ColumnPlan, seed: int) -> Any:
    """Return a column in [0, 1) that depends only on the row's own values.

    DataFrame.randomSplit sorts the rows of each partition, so by class or by number. For rows
    without a fixed order it draws again in every job, so that rows both train and validate.
    """
    from pyspark.sql import functions as f

    fed = [plain.columns[position] for position in positions_of(names, plan.fed)]
    bits = f.shiftrightunsigned(f.xxhash64(f.lit(seed), *fed), 11)
    return bits / f.lit(float(1 << 53))
