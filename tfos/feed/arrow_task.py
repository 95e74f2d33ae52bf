"""A feed task as `mapInArrow` calls it: batches of rows in, one report out, as bytes.

Covers: which partition this is, how a report travels through a DataFrame.
Does not: feed (feeding.sender.task).
Runs in: a Spark task; `reports_of` in the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from feeding.sender.task import FeedReport, FeedTask

REPORT = "report"
REPORT_SCHEMA = f"{REPORT} binary"


@dataclass(frozen=True)
class ArrowTask:
    """Used as `df.mapInArrow(task, REPORT_SCHEMA)`."""

    task: FeedTask

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Feed all batches of this partition.

        Raises:
            FeedError: as the task.
        """
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            raise RuntimeError("an ArrowTask runs in a Spark task")
        for report in self.task(context.partitionId(), batches):
            data = pa.array([msgspec.msgpack.encode(report)], pa.binary())
            yield pa.record_batch([data], names=[REPORT])


def reports_of(rows: Iterable[Any]) -> list[FeedReport]:
    """Return the reports of the collected rows of a job."""
    return [_REPORTS.decode(bytes(row[0])) for row in rows]


_REPORTS = msgspec.msgpack.Decoder(FeedReport)
