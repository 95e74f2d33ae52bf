"""Scan task: a Spark task that reads one server's rows of a table.

Covers: Arrow batches of (id, row).
Does not: connect (tfos.serving.task_servers), make the DataFrame (tfos.driver.table_calls).
Runs in: Python workers of Spark.      Threads: the task's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ps.errors import ServerUnavailable
from tfos.serving.task_servers import TaskServers


@dataclass(frozen=True)
class ScanTask:
    """Used as `frame.mapInArrow(task, schema)`, where each row of the frame is a server's rank."""

    table: str
    servers: TaskServers

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the servers whose ranks come in."""
        for batch in batches:
            ranks = batch.column(0).to_pylist()
            try:
                yield from self._rows(ranks) if ranks else ()
            except ServerUnavailable as error:
                error.add_note(
                    "The DataFrame has the servers' addresses of when it was made. If a server was "
                    f"started again since then, call cluster.rows({self.table!r}) again"
                )
                raise

    def _rows(self, ranks: Sequence[int]) -> Iterator[pa.RecordBatch]:
        with self.servers.connected() as client:
            for ids, rows in client.tables.scan(self.table, servers=ranks):
                ends = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
                lists = pa.ListArray.from_arrays(ends, pa.array(rows.reshape(-1)))
                yield pa.record_batch([pa.array(ids.view(np.int64)), lists], ["id", "row"])
