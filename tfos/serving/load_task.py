"""Load task: a Spark task that loads its rows of a DataFrame into a table.

Covers: Arrow batches of (id, row), checked, to the servers.
Does not: connect (tfos.serving.task_servers), look at the DataFrame (tfos.driver.table_calls).
Runs in: Python workers of Spark.      Threads: the task's.

A task that Spark runs twice changes nothing more: an id that has a row keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ps.manifest.table_spec import TableSpec
from ps.string_ids.ids import ids_of
from tfos.errors import SettingsError
from tfos.serving.task_servers import TaskServers

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LoadTask:
    """Used as `frame.mapInArrow(task, "given bigint, added bigint")`."""

    table: str
    servers: TaskServers

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Load the rows that come in; yield how many they were, and how many are new."""
        with self.servers.connected() as client:
            specs = {spec.name: spec for spec in client.manifest.tables}
            for batch in batches:
                if not batch.num_rows:
                    continue
                ids = _ids(batch.column(0), specs[self.table])
                rows = _rows(batch.column(1), self.table, ids)
                added = client.tables.load_rows(self.table, ids, rows)
                yield pa.record_batch(
                    [pa.array([len(rows)]), pa.array([added])], ["given", "added"]
                )


def _ids(column: pa.Array, spec: TableSpec) -> Array:
    if column.null_count:
        raise SettingsError(
            f"rows for table {spec.name!r}: {column.null_count} of {len(column)} ids of a batch "
            "are null; drop those rows: df.dropna()"
        )
    if pa.types.is_integer(column.type):
        ids: Array = column.to_numpy()
        return ids.view(np.uint64) if spec.id_kind == "uint64" and ids.dtype == np.int64 else ids
    return np.asarray(ids_of(spec, column.to_pylist()))


def _rows(column: Any, table: str, ids: Array) -> Array:
    """Return the values as [n, width]; their dtype and width are the servers' to check."""
    lengths = np.diff(column.offsets.to_numpy())
    values = column.flatten()
    width = int(lengths[0]) if lengths.size else 0
    if column.null_count or values.null_count or (lengths != width).any():
        bad = int(np.argmax(lengths != width))
        raise SettingsError(
            f"rows for table {table!r}: a batch has {column.null_count} rows that are null, "
            f"{values.null_count} values that are null, and rows of {width} and {lengths[bad]} "
            f"values (the key {ids[bad]}); each row needs the table's width, without nulls"
        )
    found: Array = values.to_numpy().reshape(len(lengths), width)
    return found
