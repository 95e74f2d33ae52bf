"""Tables at the driver: single rows by id, and whole tables as DataFrames.

Covers: `cluster.lookup()` and `cluster.rows()`.
Does not: read whole tables in the driver: Spark's tasks do (tfos.serving.scan_task).
Runs in: the driver.      Threads: any.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tfos.control.coordinator import Coordinator
from tfos.driver.reservation import Reservation
from tfos.errors import ManifestMismatch, NoServersError
from tfos.phases import ClusterPhase, require

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from ps.client.client import PSClient
    from ps.manifest.table_spec import TableSpec
    from rpc.endpoint import Endpoint


class TableCalls:
    """Methods of TFCluster for the tables of a running cluster."""

    _reserved: Reservation

    def lookup(self, table: str, ids: Any) -> Any:
        """Return rows by id; creates none.

        Args:
            table: its name.
            ids: integers of any shape; strings or bytes are hashed as the Keras layer does.

        Returns:
            [*shape of the ids, dim]; an id without a row has the table's `unseen` vector.

        Raises:
            IdError: ids that are no integers, or out of range.
            ManifestMismatch: there is no such table.
            NoServersError: the cluster has no parameter servers.
            PhaseError: the cluster does not run.
            RequestTimeout: the servers hold no parameters yet, or do not answer.
        """
        import numpy as np

        from tfos.serving.string_ids import with_hashed_strings

        with ExitStack() as stack:
            client = self._client("lookup()", stack)
            spec = _spec(client, table)
            routed = client.tables.route({table: with_hashed_strings(ids)})[table]
            found = np.empty((routed.unique.size, spec.dim), spec.dtype)
            client.tables.lookup_into({table: (routed, found)}, training=False)
            return routed.expand(found)

    def rows(self, table: str) -> DataFrame:
        """Return a table as a DataFrame (id bigint, row array<float> or array<double>).

        Lazy: each action reads the rows that the servers hold then, so the cluster must run. A task
        per server reads its rows; none passes through the driver. Where rows are evicted meanwhile,
        an id may come twice. Ids above 2^63 - 1 are the signed numbers with the same bits.

        Args:
            table: its name.

        Raises:
            ManifestMismatch: there is no such table.
            NoServersError: the cluster has no parameter servers.
            PhaseError: the cluster does not run.
            RequestTimeout: the servers hold no parameters yet, or do not answer.
        """
        from pyspark.sql import SparkSession

        from tfos.serving.scan_task import ScanTask

        with ExitStack() as stack:
            spec = _spec(self._client("rows()", stack), table)
        reserved = self._reserved
        endpoints = _endpoints(reserved.coordinator)
        workers = reserved.coordinator.read(lambda state: len(state.workers))
        task = ScanTask(table, endpoints, reserved.feeder_credentials, workers)
        element = "float" if spec.dtype == "float32" else "double"
        spark = SparkSession(reserved.sc)
        ranks = spark.range(0, len(endpoints), 1, len(endpoints))
        return ranks.mapInArrow(task, f"id bigint, row array<{element}>")

    def _client(self, call: str, stack: ExitStack) -> PSClient:
        from ps.client.client import PSClient
        from rpc.auth.handshake import Identity, Role

        reserved = self._reserved
        require(call, reserved.coordinator.phase, ClusterPhase.RUNNING)
        endpoints = _endpoints(reserved.coordinator)
        if not endpoints:
            raise NoServersError(f"{call} needs parameter servers; reserve with num_ps >= 1")
        workers = reserved.coordinator.read(lambda state: len(state.workers))
        client = stack.enter_context(
            PSClient(endpoints, reserved.credentials, Identity(Role.DRIVER, 0), num_workers=workers)
        )
        client.attach()
        return client


def _endpoints(coordinator: Coordinator) -> Sequence[Endpoint]:
    servers = coordinator.read(lambda state: list(state.servers))
    return [each.endpoint for each in servers if each.endpoint is not None]


def _spec(client: PSClient, name: str) -> TableSpec:
    tables = client.manifest.tables
    for spec in tables:
        if spec.name == name:
            return spec
    known = ", ".join(repr(spec.name) for spec in tables) or "none"
    raise ManifestMismatch(f"no table {name!r}; the manifest has {known}")
