"""Tables at the driver: single rows by id, and whole tables as DataFrames, read and loaded.

Covers: `cluster.lookup()`, `cluster.rows()` and `cluster.load_rows()`.
Does not: touch whole tables in the driver: Spark's tasks do (tfos.serving.table_tasks).
Runs in: the driver.      Threads: any.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tfos.control.coordinator import Coordinator
from tfos.control.state.cluster_view import ClusterView
from tfos.driver.reservation import Reservation
from tfos.driver.shutdown import Shutdown
from tfos.errors import (
    ManifestMismatch,
    NoServersError,
    RequestTimeout,
    ServerGone,
    ServerPhaseError,
    SettingsError,
)
from tfos.phases import ClusterPhase, require
from tfos.spark.facts import num_free_slots
from tfos.spark.interruptible import InterruptibleCall
from tfos.spark.task_secrets import TaskCredentials, give_credentials

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from ps.client.client import PSClient
    from ps.manifest.table_spec import TableSpec
    from rpc.endpoint import Endpoint
    from tfos.serving.table_tasks import TaskServers

_ELEMENT = {"float32": "float", "float64": "double"}
_ID_TYPES = ("tinyint", "smallint", "int", "bigint", "string", "binary")
_SERVE_S = 60.0
"""Seconds for servers that are started again; as long as for an answer of a running one."""
_logger = logging.getLogger("tfos")


class TableCalls:
    """Methods of TFCluster for the tables of a running cluster."""

    _reserved: Reservation
    _ending: Shutdown

    def lookup(self, table: str, ids: Any) -> Any:
        """Return rows by id; creates none.

        Args:
            table: its name.
            ids: integers of any shape; strings or bytes, for a table that was trained with them,
                are hashed as the Keras layer does.

        Returns:
            [*shape of the ids, dim]; an id without a row has the table's `unseen` vector.

        Raises:
            IdError: ids that are not integers, out of range, or strings for a table of integers.
            ManifestMismatch: there is no such table.
            NodeFailedError: a node failed; its own traceback is the cause.
            NoServersError: the cluster has no parameter servers.
            PhaseError: the cluster does not run.
            RequestTimeout: the servers hold no parameters yet, or do not answer; a server may be
                    restarting.
            ServerGone: a server cannot be reached for 10 s; where servers are started again, for
                    a minute.
        """
        import numpy as np

        from ps.string_ids.ids import ids_of

        with self._of_one_failure(), ExitStack() as stack:
            client = self._client("lookup()", stack)
            spec = _spec(client, table)
            routed = client.tables.route({table: ids_of(spec, ids)})[table]
            found = np.empty((routed.unique.size, spec.dim), spec.dtype)
            client.tables.lookup_into({table: (routed, found)}, training=False)
            return routed.expand(found)

    def rows(self, table: str) -> DataFrame:
        """Return a table as a DataFrame (id bigint, row array<float> or array<double>).

        Lazy: each action, in this thread, reads the rows that the servers hold then, so the
        cluster must run; after a server has been started again elsewhere, call this again. A task
        per server reads its rows; none passes through the driver. If rows are evicted meanwhile,
        an id may come twice. A task whose server is started again while it reads fails, and Spark
        runs it again; with `local[n]` or spark.task.maxFailures=1 it fails the action, which you
        repeat. Ids above 2^63 - 1 are the signed numbers with the same bits.

        Args:
            table: its name.

        Raises:
            ManifestMismatch: there is no such table.
            NodeFailedError: a node failed; its own traceback is the cause.
            NoServersError: the cluster has no parameter servers.
            PhaseError: the cluster does not run.
            RequestTimeout: the servers hold no parameters yet, or do not answer; a server may be
                    restarting.
            ServerGone: see lookup.
        """
        from pyspark.sql import SparkSession

        from tfos.serving.table_tasks import ScanTask

        with self._of_one_failure():
            with ExitStack() as stack:
                spec = _spec(self._client("rows()", stack), table)
            servers = self._servers_of_tasks("rows()")
        spark = SparkSession(self._reserved.sc)
        ranks = spark.range(0, len(servers.endpoints), 1, len(servers.endpoints))
        return ranks.mapInArrow(
            ScanTask(table, servers), f"id bigint, row array<{_ELEMENT[spec.dtype]}>"
        )

    def load_rows(self, table: str, frame: DataFrame) -> int:
        """Create rows of a table from a DataFrame: its tasks bring them to the servers.

        Call it while the workers wait, for example for `train`: an id that has a row keeps it, also
        one that was trained meanwhile. So loading rows a second time changes nothing.
        New rows have the rule's initial slots, and are in every later checkpoint. With checkpoints
        the chief saves them before this returns; a warning says if it did not, as between the
        batches of a stream.

        Args:
            table: its name.
            frame: columns id (integers; strings and binary are hashed as the Keras layer does) and
                row (array<float>; array<double> for a table of float64).

        Returns:
            Number of new rows; fewer than the frame has if ids had a row, or come again in another
                Arrow batch: one of their rows is kept. It is a lower bound: rows whose answer was
                lost with its connection are not counted.

        Raises:
            ManifestMismatch: there is no such table.
            NodeFailedError: a node failed; its own traceback is the cause.
            NoServersError: the cluster has no parameter servers.
            PhaseError: the cluster does not run.
            RequestTimeout: the servers hold no parameters yet, or do not answer; a server may be
                    restarting.
            ServerGone: see lookup.
            ServerPhaseError: a server was started again meanwhile, from a checkpoint without the
                rows; call it again.
            SettingsError: the frame has other columns or types.
            pyspark.errors.PySparkException: a row does not fit, an id comes twice in one Arrow
                batch, or the table is full; the text names it, and rows before it are loaded.
        """
        from tfos.serving.table_tasks import LoadTask

        with self._of_one_failure():
            with ExitStack() as stack:
                client = self._client("load_rows()", stack)
                spec, starts = _spec(client, table), _starts(client)
            _check_columns(frame, spec)
            task = LoadTask(table, self._servers_of_tasks("load_rows()"))
            loading = frame.select("id", "row").mapInArrow(task, "given bigint, added bigint")
            given, added = loading.selectExpr("sum(given)", "sum(added)").first() or (0, 0)
            self._save_loaded(table)
            with ExitStack() as stack:
                _check_held(table, starts, _starts(self._client("load_rows()", stack)))
        _logger.info(
            "table %r: loaded %d of the DataFrame's %d rows", table, added or 0, given or 0
        )
        return int(added or 0)

    def _save_loaded(self, table: str) -> None:
        """Have the chief save loaded rows; say so if it does not."""
        plan = self._reserved.config.checkpoints
        if plan is None:
            return  # no server is started again
        save = functools.partial(self._reserved.job.save, plan.timeout_s)
        saved = InterruptibleCall("tfos-load_rows()", save).result()
        if not saved.is_done:
            _logger.warning(
                "table %r: its rows are loaded, but not in a checkpoint yet: %s. A server that is "
                "started again before the next save lacks them; then call load_rows again",
                table,
                saved.text,
            )

    @contextlib.contextmanager
    def _of_one_failure(self) -> Iterator[None]:
        """Raise the failure of a node instead of what the block raises because of it."""
        with self._ending.raising():
            try:
                yield
            except Exception:  # the servers', Spark's: each may be the symptom of a failed cluster
                self._ending.raise_failure()
                raise

    def _servers_of_tasks(self, call: str) -> TaskServers:
        from tfos.serving.table_tasks import TaskServers

        reserved = self._reserved
        workers = reserved.coordinator.read(lambda state: len(state.workers))
        endpoints = _endpoints(reserved.coordinator, call)
        credentials = reserved.feeder_credentials
        give_credentials(reserved.sc, credentials)
        if not num_free_slots(reserved.sc):
            _logger.warning(
                "%s: its Spark tasks wait until a slot is free: running tasks hold all of them, "
                "those of this cluster's nodes included. Have one more slot than nodes, or use "
                "InputMode.SPARK, in which workers leave theirs",
                call,
            )
        return TaskServers(endpoints, TaskCredentials(credentials.cluster_id), workers)

    def _client(self, call: str, stack: ExitStack) -> PSClient:
        """Return a client of the servers; wait for those that are started again.

        A frozen one is lost, and has another place, only after a while: each try asks anew where
        the servers are, and whether the cluster still runs.
        """
        from ps.client.client import PSClient
        from rpc.auth.handshake import Identity, Role

        reserved = self._reserved
        until_s = time.monotonic() + (_SERVE_S if reserved.config.replaces_servers else 0.0)
        while True:
            endpoints = _endpoints(reserved.coordinator, call)
            if not endpoints:
                raise NoServersError(f"{call} needs parameter servers; reserve with num_ps >= 1")
            workers = reserved.coordinator.read(lambda state: len(state.workers))
            identity = Identity(Role.DRIVER, 0)
            with ExitStack() as tried:
                client = tried.enter_context(
                    PSClient(endpoints, reserved.credentials, identity, num_workers=workers)
                )
                try:
                    client.attach()
                except ServerGone:
                    if time.monotonic() >= until_s:
                        raise
                    continue
                stack.enter_context(tried.pop_all())
                return client


def _check_columns(frame: DataFrame, spec: TableSpec) -> None:
    """Refuse a DataFrame whose columns are not an id and a row of the table's dtype."""
    found = dict(frame.dtypes)
    if spec.id_source == "integers" and found.get("id") in ("string", "binary"):
        raise SettingsError(
            f"table {spec.name!r} was trained with integer ids, but the DataFrame's id is "
            f"{found['id']}, so its rows would never be looked up; cast it: "
            "df.selectExpr('cast(id as bigint) as id', 'row')"
        )
    row = f"array<{_ELEMENT[spec.dtype]}>"
    if found.get("id") in _ID_TYPES and found.get("row") == row:
        return
    got = ", ".join(f"{name} {kind}" for name, kind in frame.dtypes)
    raise SettingsError(
        f"table {spec.name!r} takes the columns id ({', '.join(_ID_TYPES)}) and row {row}; the "
        f"DataFrame has {got}; select and cast them: df.selectExpr('… as id', 'cast(… as {row}) as "
        "row')"
    )


def _endpoints(coordinator: Coordinator, call: str) -> Sequence[Endpoint]:
    """Return where each server listens, by rank; wait for those that are started again.

    Raises:
        PhaseError: the cluster does not run.
        RequestTimeout: names those that do not serve in time.
    """
    require(call, coordinator.phase, ClusterPhase.RUNNING)

    def all_serve(state: ClusterView) -> bool:
        return all(each.endpoint is not None for each in state.servers)

    def is_over(state: ClusterView) -> bool:
        return all_serve(state) or state.phase is not ClusterPhase.RUNNING

    if not coordinator.read(all_serve):
        wait = functools.partial(coordinator.wait, is_over, _SERVE_S)
        InterruptibleCall(f"tfos-{call}", wait).result()
        require(call, coordinator.phase, ClusterPhase.RUNNING)
    found = coordinator.read(lambda state: {each.name: each.endpoint for each in state.servers})
    if away := [name for name, endpoint in found.items() if endpoint is None]:
        raise RequestTimeout(
            f"{call}: {', '.join(away)} did not serve within {_SERVE_S:.0f} s; a server that is "
            "started again restores its rows first. Call it again"
        )
    return [endpoint for endpoint in found.values() if endpoint is not None]


def _starts(client: PSClient) -> dict[int, int]:
    """Return which start of each server answers."""
    return {each.server: each.start for each in client.stats()}


def _check_held(table: str, before: dict[int, int], now: dict[int, int]) -> None:
    """Refuse to count rows as loaded that a server has lost.

    Args:
        table: table of the rows.
        before: which start of each server was there when the load began.
        now: which start is there after the load.
    """
    changed = [rank for rank in before if now.get(rank) != before[rank]]
    if changed:
        names = ", ".join(
            f"ps:{rank} (start {before[rank]}, now {now.get(rank)})" for rank in changed
        )
        raise ServerPhaseError(
            f"{names} was started again while rows were loaded into table {table!r}, and has only "
            "those of its checkpoint. Call load_rows again: rows that are there stay as they are",
            {"table": table, "servers": ",".join(map(str, changed))},
        )


def _spec(client: PSClient, name: str) -> TableSpec:
    tables = client.manifest.tables
    for spec in tables:
        if spec.name == name:
            return spec
    known = ", ".join(repr(spec.name) for spec in tables) or "none"
    raise ManifestMismatch(f"no table {name!r}; the manifest has {known}")
