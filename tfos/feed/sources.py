"""Sources of a feed: which RDD or DataFrame the Spark job of one epoch runs over.

Covers: which source fits the data; RDDs of rows; RDDs whose rows Spark stores as pickled batches,
which are fed as batches.
Does not: read DataFrames (tfos.feed.dataframe) or batches (feeding.encode.pickled), start the job,
watch it or count (tfos.feed.epoch_feeder), carry rows (feeding.sender.task).
Runs in: the driver; `reports` on the job's own thread. Imports pyspark only inside functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from feeding.encode.pickled import PickledPacker
from feeding.sender.task import FeedReport, FeedTask, InferenceTask
from tfos.errors import SettingsError
from tfos.feed.dataframe import FrameSource, as_dataframe
from tfos.feed.dataframe_inference import answered, is_frame
from tfos.feed.request import FeedRequest
from tfos.feed.task_process import lasting_imports
from tfos.spark.jobs import Waves, collect_in_order

Loads: TypeAlias = Callable[[bytes], Sequence[Any]]


def raw_batches(rdd: Any) -> tuple[Any, Loads | None]:
    """Return an RDD of pickled batches and its unpickling function, or the RDD itself and None.

    Only parallelized and cached RDDs qualify: Spark already stores their bytes. Python functions
    compute the rows of any other RDD, and a second pass over bytes would only slow them down.
    """
    from pyspark.core.rdd import RDD
    from pyspark.serializers import (
        BatchedSerializer,
        CloudPickleSerializer,
        CPickleSerializer,
        NoOpSerializer,
    )

    is_pipelinable = getattr(rdd, "_is_pipelinable", None)
    serializer = getattr(rdd, "_jrdd_deserializer", None)
    if is_pipelinable is not None and is_pipelinable():
        return rdd, None
    if not isinstance(serializer, BatchedSerializer):
        return rdd, None
    if type(serializer.serializer) not in (CPickleSerializer, CloudPickleSerializer):
        return rdd, None
    return RDD(rdd._jrdd, rdd.ctx, NoOpSerializer()), serializer.serializer.loads


class FeedSource(Protocol):
    """Rows that can be fed any number of times."""

    def reports(self, task: FeedTask, waves: Waves | None = None) -> list[FeedReport]:
        """Run the partitions of `task.order` in Spark, in this order.

        Args:
            task: feeds a partition.
            waves: splits them into several jobs; None: they are one.

        Returns:
            The report of each partition.
        """


@dataclass(frozen=True)
class RowTask:
    """Used as `rdd.mapPartitionsWithIndex(task)`."""

    task: FeedTask | InferenceTask

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[Any]:
        """Run the task on the rows of a partition.

        Args:
            partition: its number.
            rows: the partition's rows.

        Raises:
            FeedError: as from the task.
        """
        with lasting_imports():
            yield from self.task(partition, rows)


class RddSource:
    """An RDD."""

    def __init__(self, rdd: Any) -> None:
        self._rdd = rdd

    def reports(self, task: FeedTask, waves: Waves | None = None) -> list[FeedReport]:
        """See FeedSource."""
        rdd, loads = raw_batches(self._rdd)
        if loads is not None:
            task = dataclasses.replace(task, packer=functools.partial(PickledPacker, loads=loads))
        fed = rdd.mapPartitionsWithIndex(RowTask(task))
        found: list[FeedReport]
        if waves is not None:
            return waves.collect(fed, task.order)
        found = fed.collect() if task.feeds_all_in_order else collect_in_order(fed, task.order)
        return found


def source_of(request: FeedRequest) -> FeedSource:
    """Return the source for the data of a call; reads no row.

    Raises:
        SettingsError: the data cannot be fed; names the column of a DataFrame.
    """
    data = request.data
    if is_frame(data):
        return FrameSource(request)
    if not hasattr(data, "mapPartitionsWithIndex"):
        raise _no_data(data)
    if request.columns is not None or request.nulls != "error":
        raise SettingsError("columns= and nulls= are for a DataFrame; an RDD's rows are fed whole")
    return RddSource(data)


def answers_of(request: FeedRequest, task: InferenceTask) -> Any:
    """Return a lazy collection of one result per row, in order: an RDD or a DataFrame.

    Args:
        request: the call's arguments.
        task: runs in Spark's tasks.

    Raises:
        SettingsError: the data is neither, or an argument does not fit it.
    """
    data = request.data
    if is_frame(data):
        return answered(request, task)
    if not hasattr(data, "mapPartitionsWithIndex"):
        raise _no_data(data)
    if (request.columns, request.nulls, request.output) != (None, "error", None):
        raise SettingsError(
            "columns=, nulls= and output= are for a DataFrame; an RDD's rows are fed whole, and "
            "their results are the elements of another RDD"
        )
    return data.mapPartitionsWithIndex(RowTask(task))


def _no_data(data: Any) -> SettingsError:
    kind = type(data)
    advice = as_dataframe(data) or "sc.parallelize(rows) or spark.createDataFrame(rows, schema)"
    return SettingsError(
        f"data must be an RDD or a Spark DataFrame, got {kind.__module__}.{kind.__qualname__}. "
        f"Use {advice}."
    )
