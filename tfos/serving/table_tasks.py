"""Table tasks: Spark tasks that read one server's rows of a table, or load rows into it.

Covers: Arrow batches of (id, row), checked when they are loaded, to and from the servers of a
cluster, with the credentials of feed tasks.
Does not: make or look at DataFrames (tfos.driver.table_calls).
Runs in: Python workers of Spark.      Threads: the task's.

A load that Spark repeats changes nothing: an id that has a row keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ps.client.client import PSClient
from ps.errors import ServerUnavailable
from ps.manifest.table_spec import TableSpec
from ps.string_ids.ids import ids_of
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint
from tfos.errors import SettingsError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TaskServers:
    """The servers of a running cluster."""

    endpoints: Sequence[Endpoint]
    """Endpoints of all servers, in the order of ranks."""
    credentials: Callable[[], Credentials]
    """Returns the cluster's credentials; called in the task."""
    num_workers: int

    @contextmanager
    def connected(self) -> Iterator[PSClient]:
        """Give a client that knows the tables; closed after the block."""
        identity = Identity(Role.FEEDER, 0)
        with PSClient(
            self.endpoints, self.credentials(), identity, num_workers=self.num_workers
        ) as client:
            client.attach()
            yield client


@dataclass(frozen=True)
class ScanTask:
    """Used as `frame.mapInArrow(task, schema)`, where each row of the frame is a server's rank."""

    table: str
    servers: TaskServers

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the servers whose ranks are in the batches."""
        for batch in batches:
            ranks = batch.column(0).to_pylist()
            try:
                yield from self._rows(ranks) if ranks else ()
            except ServerUnavailable as error:
                error.add_note(
                    "The DataFrame has the servers' addresses from when it was made. If a server "
                    f"has restarted since then, call cluster.rows({self.table!r}) again"
                )
                raise

    def _rows(self, ranks: Sequence[int]) -> Iterator[pa.RecordBatch]:
        with self.servers.connected() as client:
            for ids, rows in client.tables.scan(self.table, servers=ranks):
                ends = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
                lists = pa.ListArray.from_arrays(ends, pa.array(rows.reshape(-1)))
                yield pa.record_batch([pa.array(ids.view(np.int64)), lists], ["id", "row"])


@dataclass(frozen=True)
class LoadTask:
    """Used as `frame.mapInArrow(task, "given bigint, added bigint")`."""

    table: str
    servers: TaskServers

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Load the rows; yield how many there were, and how many of them are new."""
        with self.servers.connected() as client:
            specs = {spec.name: spec for spec in client.manifest.tables}
            for batch in batches:
                if not batch.num_rows:  # may lack its lists' offsets: reading them crashes
                    continue
                named = batch.column(0)
                ids = _ids(named, specs[self.table])
                rows = _rows(batch.column(1), specs[self.table], named)
                added = client.tables.load_rows(self.table, ids, rows, named=named)
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


def _rows(column: Any, spec: TableSpec, named: pa.Array) -> Array:
    """Return the values as [n, dim]; the servers check their dtype."""
    lengths, values = np.diff(column.offsets.to_numpy()), column.flatten()
    if column.null_count or values.null_count or (lengths != spec.dim).any():
        raise _misfit(column.to_pylist(), spec, named.to_pylist())
    found: Array = values.to_numpy().reshape(len(lengths), spec.dim)
    return found


def _misfit(rows: list[Any], spec: TableSpec, named: list[Any]) -> SettingsError:
    """Return the error of the first row that does not fit."""
    key, row = next(
        (key, row)
        for key, row in zip(named, rows, strict=True)
        if row is None or len(row) != spec.dim or None in row
    )
    what = "is null" if row is None else f"has {len(row)} values, {row.count(None)} of them null"
    return SettingsError(
        f"rows for table {spec.name!r}: the row of the key {key} {what}; each row needs "
        f"{spec.dim} values, without nulls"
    )
