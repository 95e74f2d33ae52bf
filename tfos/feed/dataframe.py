"""DataFrames as the source of a feed: Arrow from Spark's JVM to the feed task, without row objects.

Covers: the query that runs, its columns, the size of its Arrow batches; the feed task as
`mapInArrow` calls it, and how its report travels back through a DataFrame.
Does not: check columns (tfos.feed.dataframe_columns), feed (feeding.sender.task).
Runs in: the driver; ArrowTask in a Spark task. Imports pyspark only inside functions.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from feeding.arrow.packer import ArrowPacker
from feeding.sender.task import FeedReport, FeedTask
from tfos.errors import SettingsError
from tfos.feed import dataframe_columns
from tfos.feed.request import FeedRequest
from tfos.feed.task_process import lasting_imports, partition_id
from tfos.spark.jobs import Waves, collect_in_order

REPORT = "report"
REPORT_SCHEMA = f"{REPORT} binary"


@dataclass(frozen=True)
class ArrowTask:
    """Used as `df.mapInArrow(task, REPORT_SCHEMA)`."""

    task: FeedTask

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Feed all batches of this partition.

        Raises:
            FeedError: as from the task.
        """
        import pyarrow as pa

        with lasting_imports():
            for report in self.task(partition_id(), batches):
                packed = msgspec.msgpack.encode(report)
                bounds = np.array([0, len(packed)], np.int32)
                # pa.array() would import pandas in each new Python process of Spark.
                buffers = [None, pa.py_buffer(bounds), pa.py_buffer(packed)]
                data = pa.Array.from_buffers(pa.binary(), 1, buffers)
                yield pa.record_batch([data], names=[REPORT])


def reports_of(rows: Iterable[Any]) -> list[FeedReport]:
    """Return the reports of the collected rows of a job."""
    return [_REPORTS.decode(bytes(row[0])) for row in rows]


_REPORTS = msgspec.msgpack.Decoder(FeedReport)

_BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
BATCH_BYTES = 1 << 20
"""Size of an Arrow batch between Spark's JVM and Python, which bounds the memory of a feed task.
Spark's own 64 MiB (or 10,000 rows) are no faster, 128 KiB are slower: measured by `scripts/bench
feed_df`."""
_KILLS_IDLE = "spark.sql.execution.pyspark.udf.killOnIdleTimeout"
"""Would end feed tasks, which send Spark nothing while they wait for workers."""
_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class FrameSource:
    """A DataFrame of a classic session; made only if every column can be fed."""

    def __init__(self, request: FeedRequest) -> None:
        """Check the DataFrame and the request without a Spark job.

        Raises:
            SettingsError: names the column, its type and what to do.
        """
        check_fed(request.data)
        self._frame = request.data
        self._positions, self._packer = fed_columns(self._frame, request.columns, request.nulls)

    def reports(self, task: FeedTask, waves: Waves | None = None) -> list[FeedReport]:
        """See FeedSource."""
        arrow_task = ArrowTask(dataclasses.replace(task, packer=self._packer))
        fed = self._query().mapInArrow(arrow_task, REPORT_SCHEMA)
        if waves is not None:
            return reports_of(waves.collect(fed.rdd, task.order))
        if task.feeds_all_in_order:
            return reports_of(fed.collect())
        return reports_of(collect_in_order(fed.rdd, task.order))

    def _query(self) -> Any:
        """Return a DataFrame of the chosen columns under names that any query can use."""
        frame = with_plain_names(_in_own_session(self._frame))
        columns = frame.columns
        if self._positions == tuple(range(len(columns))):
            return frame
        return frame.select(*(columns[position] for position in self._positions))


def fed_columns(
    frame: Any, columns: object, nulls: object
) -> tuple[tuple[int, ...], functools.partial[ArrowPacker]]:
    """Return the positions of the columns that are fed, and what packs their batches.

    Args:
        frame: a classic DataFrame.
        columns: names of the columns, in the feed's order; None: all.
        nulls: see dataframe_columns.fills.

    Raises:
        SettingsError: names the column, its type and what to do.
    """
    fields = [(field.name, field.dataType) for field in frame.schema.fields]
    positions = dataframe_columns.select([name for name, _ in fields], columns)
    fed = [fields[position] for position in positions]
    fills = dataframe_columns.fills(dataframe_columns.leaves(fed), nulls)
    names = tuple(name for name, _ in fed)
    return positions, functools.partial(ArrowPacker, names=names, fills=fills)


def with_plain_names(frame: Any) -> Any:
    """Return the DataFrame with column names that any query can use: its own, or numbered ones."""
    columns = frame.columns
    plain = all(map(_PLAIN_NAME.fullmatch, columns))
    if plain and len({name.lower() for name in columns}) == len(columns):
        return frame
    # Spark reads `a.b` as field b of a, and `A` and `a` as the same name.
    return frame.toDF(*(f"c{position}" for position in range(len(columns))))


def chosen(frame: Any, names: Sequence[str]) -> Any:
    """Return the DataFrame of some columns; others may have the same names in another case.

    Args:
        frame: a classic DataFrame.
        names: names of columns that it has once each.
    """
    plain = with_plain_names(frame)
    positions = dataframe_columns.positions_of(frame.columns, names)
    return plain.select(*(plain.columns[position] for position in positions)).toDF(*names)


def as_dataframe(data: Any) -> str:
    """Return the call that makes a Spark DataFrame of other data, for a message; empty: unknown.

    Args:
        data: the user's data.
    """
    module = type(data).__module__
    if module.startswith("pyspark.pandas."):
        return "data.to_spark()"
    if module.partition(".")[0] in ("pandas", "pyarrow"):  # what Spark takes as it is
        return "spark.createDataFrame(data)"
    kind = type(data)  # a DataFrame may have columns of these names
    if hasattr(kind, "foreachRDD"):
        return "rdd.toDF([names]) in data.foreachRDD"
    return "data.toDF([names])" if hasattr(kind, "mapPartitionsWithIndex") else ""


def check_classic(frame: Any) -> None:
    """Refuse what is no DataFrame of a classic session.

    Raises:
        SettingsError: it is a DataFrame of Spark Connect, or as for check_frame.
    """
    if type(frame).__module__.startswith("pyspark.sql.connect"):
        raise SettingsError(
            "this DataFrame belongs to Spark Connect, which starts no processes on executors; "
            "create it with a classic session: SparkSession.builder.master(...) without remote()."
        )
    check_frame(frame)


def check_frame(frame: Any) -> None:
    """Refuse rows that are no DataFrame of Spark.

    Raises:
        SettingsError: they are of pandas or pandas-on-Spark, an RDD, an array or anything else.
    """
    kind, call = type(frame), as_dataframe(frame)
    if isinstance(frame, list | tuple | np.ndarray):
        call = "spark.createDataFrame(data, [names])"
    if call or not hasattr(frame, "mapInArrow"):
        raise SettingsError(
            f"the rows must be a Spark DataFrame, got {kind.__module__}.{kind.__qualname__}; "
            f"use {call or 'spark.read or spark.createDataFrame'}"
        )


def check_fed(frame: Any) -> None:
    """Refuse what no job feeds: as `check_classic`, or a stream.

    Raises:
        SettingsError: as for check_classic; or it is a stream.
    """
    check_classic(frame)
    if getattr(frame, "isStreaming", False):
        raise SettingsError(
            "a streaming DataFrame has no end; train it by cluster.stream(df, checkpoint_location) "
            "or by df.writeStream.foreachBatch(cluster.train_batch). An estimator takes spark.read "
            "instead of spark.readStream."
        )


def _in_own_session(frame: Any) -> Any:
    """Return the same DataFrame in a copy of its session, where settings may be changed."""
    from pyspark.sql import DataFrame

    java = frame._jdf
    session = java.sparkSession().cloneSession()
    session.conf().set(_BATCH_BYTES, str(BATCH_BYTES))
    session.conf().set(_KILLS_IDLE, "false")
    classic = frame.sparkSession._jvm.org.apache.spark.sql.classic
    return DataFrame(classic.Dataset.ofRows(session, java.logicalPlan()), frame.sparkSession)
