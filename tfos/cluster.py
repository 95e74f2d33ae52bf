"""TFCluster: parameter servers and workers on the executors of a running SparkContext.

Covers: the public calls that reserve, start, feed and end a cluster, their phases and their order.
Does not: decide about nodes (tfos.control.state), feed (tfos.feed), start or end (tfos.driver); the
calls about results, tables, pages and streams are in tfos.driver and tfos.streaming.
Runs in: the driver. Never calls sc.stop(), sys.exit() or signal.signal, and cancels no job but its
own: several clusters and other jobs may share the SparkContext.
Threads: any; shutdown() may come from another thread than train(). A call runs on a thread of its
own (tfos.spark.interruptible), so that Ctrl-C interrupts only the waiting user thread.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from tfos.config import ClusterConfig, InputMode, TensorBoardConfig, config_of
from tfos.driver import preflight, reservation
from tfos.driver.page_calls import PageCalls
from tfos.driver.ported_attributes import PortedAttributes
from tfos.driver.results import ResultCalls
from tfos.driver.shutdown import Shutdown
from tfos.driver.start import start_nodes
from tfos.driver.table_calls import TableCalls
from tfos.errors import SettingsError
from tfos.feed.entry import FeedService
from tfos.feed.request import FeedRequest
from tfos.monitor import reports
from tfos.monitor.prometheus import MetricsRequest
from tfos.monitor.status import cluster_report
from tfos.phases import ClusterPhase, require
from tfos.slots.resources import Placement, Resources, RoleResources
from tfos.spark import pickling
from tfos.spark.interruptible import CancelToken, InterruptibleCall
from tfos.spark.task_secrets import give_credentials, withdraw
from tfos.streaming.dstream import finish_stream
from tfos.streaming.streaming import StreamCalls, Streams
from tfos.topology import ServersOf, plan
from tfos.watch.doors import PageRequest, host_names

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType
    from pyspark.streaming import DStream, StreamingContext

    from tfos.failure import NodeFailure

DEFAULT_SHUTDOWN_S = 259_200.0
"""Three days, as in TensorFlowOnSpark."""
RESERVATION_TIMEOUT_S = 600.0
"""Seconds that `run` waits for its nodes, as in TensorFlowOnSpark."""
Mode: TypeAlias = InputMode
"""The same under a name that the class attribute does not hide."""
Result = TypeVar("Result")


class TFCluster(StreamCalls, PageCalls, ResultCalls, TableCalls, PortedAttributes):
    """A cluster of parameter servers and workers; made by `reserve` or `run`.

        with TFCluster.reserve(sc, cluster_size=3, num_ps=1, input_mode=InputMode.SPARK) as cluster:
            cluster.start(main_fun, args)
            report = cluster.train(df, num_epochs=3)

    A context manager: leaving the block shuts the cluster down, in order after success and at once
    after an exception. Three days after the block's last line it stops a main_fun by force, unless
    that has reported steps meanwhile. If that line is `cluster.shutdown(timeout=None)`, there is no
    such limit.
    """

    InputMode: ClassVar[type[InputMode]] = InputMode

    def __init__(self, reserved: reservation.Reservation) -> None:
        """Hold the pieces that `reserve` has made and checked; users call that."""
        self.cluster_id = reserved.credentials.cluster_id
        self._reserved = reserved
        self._settings = reserved.settings
        self._coordinator = reserved.coordinator
        self._ending = Shutdown(
            reserved.coordinator, reserved.config, reserved.console, reserved.credentials
        )
        self._feed_service = FeedService(reserved, self._ending)
        self._streams = Streams(reserved, self._feed_service, self._ending)
        self._ending.watch(self)

    @classmethod
    def reserve(  # noqa: PLR0913  # the public surface: keywords with defaults
        cls,
        sc: SparkContext | SparkSession,
        cluster_size: int,
        num_ps: int = 1,
        *,
        ps: ServersOf = "tfos",
        tensorboard: bool = False,
        input_mode: Mode = Mode.TENSORFLOW,
        queues: Iterable[str] = ("input", "output", "error"),
        log_dir: str | None = None,
        master_node: str | None = None,
        eval_node: bool = False,
        tensorboard_host: str = "",
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        metrics_token_file: str | None = None,
        page_port: int | None = None,
        page_host: str = "127.0.0.1",
        page_hosts: Iterable[str] = (),
        ps_resources: Resources | None = None,
        worker_resources: Resources | None = None,
        placement: Placement | None = None,
        config: ClusterConfig | None = None,
    ) -> TFCluster:
        """Check everything, count task slots and open the control plane; no node starts yet.

        Args:
            sc: SparkContext or classic SparkSession.
            cluster_size: nodes in total, servers and evaluator included; one task slot each.
            num_ps: parameter servers among them; a worker must remain. 0: workers serve, in "sync".
            ps: "tfos", or "tensorflow", which needs a chief as well (docs/guides/native.md).
            tensorboard: run TensorBoard beside the chief.
            input_mode: SPARK: rows come by `train`. TENSORFLOW: main_fun reads its own data.
            queues: names of the feeds; `output` and `error` are accepted and carry no rows.
            log_dir: TensorBoard's directory or URL (docs/guides/files.md); None: a temporary one.
            master_node: role name of the chief, `chief` or `master`; None: worker:0 is the chief.
            eval_node: one node is `evaluator:0`: main_fun calls `ctx.evaluate_checkpoints` there.
            tensorboard_host: address it binds; empty: loopback on the driver's host, else its own.
            metrics_port: Prometheus page's port, 0: any; None: no page (docs/guides/metrics.md).
            metrics_host: address of that page; any other than loopback needs `metrics_token()`.
            metrics_token_file: file (mode 0600) with that token; None: a new one each time.
            page_port: port of the job's page, 0: any; None: no page (docs/guides/watching.md).
            page_host: address of that page, which has no TLS.
            page_hosts: names of proxies under which browsers reach the page and TensorBoard.
            ps_resources: resources of each parameter server (docs/guides/resources.md).
            worker_resources: resources of each other node.
            placement: nodes of a role on many hosts or few: "spread", "pack"; None: as Spark does.
            config: timeouts and limits.

        Raises:
            SettingsError, NotEnoughSlots: the arguments, settings or slots cannot work; says why.
        """
        nodes = plan(cluster_size, num_ps, master_node=master_node, ps=ps, eval_node=eval_node)
        page = PageRequest(page_port, page_host, host_names(page_hosts))
        board = TensorBoardConfig(bool(tensorboard), tensorboard_host, log_dir or "", page.hosts)
        metrics = MetricsRequest(metrics_port, metrics_host, metrics_token_file)
        resources = RoleResources(ps_resources, worker_resources, placement)
        asked = (nodes, input_mode, queues, board, config_of(config), metrics, page, resources)
        return cls._reserve(sc, reservation.ReservationRequest(*asked))

    @classmethod
    def run(  # noqa: PLR0913  # TensorFlowOnSpark's signature
        cls,
        sc: SparkContext | SparkSession,
        map_fun: Callable[[Any, Any], Any],
        tf_args: Any,
        num_executors: int,
        num_ps: int,
        tensorboard: bool = False,
        input_mode: Mode = Mode.TENSORFLOW,
        log_dir: str | None = None,
        driver_ps_nodes: bool = False,
        master_node: str | None = None,
        reservation_timeout: float = RESERVATION_TIMEOUT_S,
        queues: Iterable[str] = ("input", "output", "error"),
        eval_node: bool = False,
        release_port: bool = True,
        ps: ServersOf = "tfos",
        page_port: int | None = None,
        *,
        config: ClusterConfig | None = None,
    ) -> TFCluster:
        """Reserve and start in one call, with TensorFlowOnSpark's arguments.

        Args:
            sc: SparkContext or classic SparkSession.
            map_fun: called as `map_fun(tf_args, ctx)` on every worker, never on a server.
            tf_args: anything that pickles.
            num_executors: nodes in total, parameter servers included; one task slot each.
            num_ps: how many of them are parameter servers, 0 or more.
            tensorboard: run TensorBoard beside the chief.
            input_mode: SPARK: rows come by `train`. TENSORFLOW: map_fun reads its own data.
            log_dir: TensorBoard's directory or URL; None: one of the chief's own.
            driver_ps_nodes: parameter servers run beside the driver, and take no task slots.
            master_node: role name of the chief, `chief` or `master`; None: worker:0 is the chief.
            reservation_timeout: seconds within which every node must serve.
            queues: names of the feeds; `output` and `error` are accepted and carry no rows.
            eval_node: one of the nodes is `evaluator:0`, as for `reserve`.
            release_port: False: `ctx.tmp_socket` holds this worker's port until it is released.
            ps: as for `reserve`.
            page_port: as for `reserve`.
            config: as for `reserve`: checkpoints, restarts, limits. Its `reservation_timeout_s`
                counts in place of `reservation_timeout`.

        Raises:
            TFOSError: as `reserve` and `start`.
        """
        special = {"eval_node": eval_node, "driver_ps_nodes": driver_ps_nodes}
        nodes = plan(num_executors, num_ps, master_node=master_node, ps=ps, **special)
        request = reservation.ReservationRequest(
            plan=nodes,
            input_mode=input_mode,
            queues=queues,
            tensorboard=TensorBoardConfig(is_wanted=bool(tensorboard), log_dir=log_dir or ""),
            config=_config_of_run(config, reservation_timeout),
            release_port=release_port,
            page=PageRequest(page_port),
        )
        return cls._reserve(sc, request)._started(map_fun, tf_args)

    def start(self, main_fun: Callable[[Any, Any], Any], args: Any = None) -> None:
        """Start all nodes and return once every one of them serves and main_fun runs.

        Args:
            main_fun: called as `main_fun(args, ctx)` on every worker, the chief included.
            args: anything that pickles.

        Raises:
            SettingsError: main_fun does not take (args, ctx), or `batch_size` in args is 0.
            NotPicklable: main_fun or args cannot travel; nothing was started.
            ReservationTimeout: names the nodes that never served.
            NodeFailedError: a node failed while it started.
        """
        try:
            require("start()", self.phase, ClusterPhase.RESERVED)
            preflight.check_main_fun(main_fun)
            preflight.check_batch_size(args)
            pickled = pickling.pickle_main_fun(main_fun, args)
            self._beside(
                "start()",
                lambda: start_nodes(self._reserved, self._ending, pickled),
                lambda: self.abort("start() was interrupted"),
                spark=self._reserved.sc,
            )
        except KeyboardInterrupt:
            self.abort("start() was interrupted")
            raise
        except BaseException:
            if self.phase in (ClusterPhase.FAILED, ClusterPhase.CLOSED):
                self._withdraw()
            raise

    def train(  # noqa: PLR0913 - TensorFlowOnSpark's arguments, and ours by keyword
        self,
        dataRDD: RDD[Any] | DataFrame | DStream[Any],
        num_epochs: int = 0,
        feed_timeout: float = 600,
        qname: str = "input",
        *,
        columns: Sequence[str] | None = None,
        nulls: object = "error",
        seed: int | None = None,
        shuffle_rows: int | None = None,
        exactly_once: bool = False,
        validation: RDD[Any] | DataFrame | None = None,
    ) -> reports.TrainReport | None:
        """Feed an RDD or DataFrame to the workers and return once they have trained every row.

        Args:
            dataRDD: RDD of numbers, tuples, lists, arrays, dicts, Rows, bytes or str; a DataFrame;
                or a DStream, whose batches are fed as they come (returns None at once).
            num_epochs: how often, 0 or more; each epoch reads the data again. 0 means 10, and once
                for each batch of a DStream.
            feed_timeout: seconds without any worker taking a row until a feed task fails. Spark
                repeats it, `spark.task.maxFailures` times in all (4), before feeding fails.
            qname: which feed.
            columns: columns of a DataFrame to feed, in this order; None: all of them.
            nulls: missing values of a DataFrame: "error" refuses them; a value fills the columns
                that it fits, like df.na.fill; a dict has fill values by column.
            seed: feeds partitions, and rows within `shuffle_rows`, in another order in each epoch,
                the same for the same seed; None: in the data's own order.
            shuffle_rows: rows, at least 1, of the windows in which a task shuffles its partition's
                rows; None: 16,384 with a seed. 1: only the order of partitions changes.
            exactly_once: a task that Spark repeats skips the rows that it fed before. Requires the
                same rows in the same order whenever Spark computes a partition.
            validation: RDD or DataFrame, fed after each epoch to the feed "validation", which
                `fit(validation_data=ctx.dataset(n, feed="validation"))` reads.

        Returns:
            A report of the rows of each epoch.

        Raises:
            NodeFailedError: a node failed; its own traceback is the cause.
            FeedError: the data could not be fed.
            FeedTimeout: no worker took rows.
            PoisonRows: workers crashed three times while they had the same rows.
        """
        return self._feed_service.train(
            FeedRequest(
                data=dataRDD,
                num_epochs=num_epochs,
                feed_timeout_s=feed_timeout,
                feed=qname,
                columns=columns,
                nulls=nulls,
                seed=seed,
                shuffle_rows=shuffle_rows,
                exactly_once=exactly_once,
                validation=validation,
            )
        )

    def inference(  # noqa: PLR0913 - TensorFlowOnSpark's arguments, and ours by keyword
        self,
        dataRDD: RDD[Any] | DataFrame | DStream[Any],
        feed_timeout: float = 600,
        qname: str = "input",
        *,
        columns: Sequence[str] | None = None,
        nulls: object = "error",
        output: str | StructType | None = None,
        model: str | None = None,
        batch_size: int | None = None,
    ) -> RDD[Any] | DataFrame | DStream[Any]:
        """Return main_fun's results, one per row, in order, in a collection of the data's kind.

        Lazy: each action on the result feeds the rows. Run it before `shutdown`, in this thread,
        the one that called `reserve`, or a pyspark.InheritableThread of theirs: other threads have
        no credentials.
        With `model` the answers are those of a saved model instead, which Spark's own tasks
        compute: see tfos.predict_column.

        Args:
            dataRDD: as for `train`. A DataFrame keeps its columns and gains the result columns.
                Call it for a DStream before `ssc.start()`, in the same thread.
            feed_timeout: feeding fails if no worker takes a row for this many seconds.
            qname: name of the feed; like feed_timeout, only without `model`.
            columns: columns of a DataFrame that main_fun receives; None: all.
            nulls: missing values in the rows of main_fun, as for `train`; the DataFrame's own
                columns do not change.
            output: for a DataFrame: the result columns, as a name ("prediction", the default, an
                array<float>), as names and types ("digit int, scores array<float>") or as a
                StructType. Results of several columns are dicts, or tuples in this order.
            model: path or URL of a `.keras` file, SavedModel or export, for a DataFrame: `columns`
                fill its inputs as those of predict_column (None: the columns with their names),
                `output` is the name of its only output's column.
            batch_size: rows per call of `model`; None: 1024. main_fun sets its own.

        Raises:
            SettingsError: columns, nulls, output or model do not fit the DataFrame or each other.

        An action fails with a ResultTypeError if a result does not fit its column, with a
        ResultCountError if the number of results differs from that of the rows.
        """
        if model is not None:
            from tfos.predict.column import predicted_by  # Arrow, where it is used

            preflight.check_no_feed(feed_timeout, qname)
            return predicted_by(dataRDD, model, columns, output, nulls, batch_size)
        if batch_size is not None:
            how = "main_fun sets its own batch size with feed.next_batch(n)"
            raise SettingsError(f"batch_size={batch_size} needs model=: {how}")
        return self._feed_service.inference(
            FeedRequest(
                data=dataRDD,
                feed_timeout_s=feed_timeout,
                feed=qname,
                columns=columns,
                nulls=nulls,
                output=output,
            )
        )

    def shutdown(
        self,
        ssc: StreamingContext | None = None,
        grace_secs: float = 0,
        timeout: float | None = DEFAULT_SHUTDOWN_S,
    ) -> None:
        """End the feeds, wait for main_fun to return, stop every node. Idempotent, in any phase.

        It does nothing in a process that the driver has forked, as at the end of a `with` block.

        Args:
            ssc: a StreamingContext. First its stream is trained until it ends, until a main_fun
                calls `feed.terminate()` or returns, or for `timeout`; then it is stopped
                gracefully: the batches that wait are trained, however long that takes. Its
                SparkContext stays.
            grace_secs: seconds between the return of main_fun and the stop of the nodes. Exit
                handlers and threads that main_fun leaves then get the same time again, at least
                5 s; a fed worker starts its exit handlers only then. A process that needs longer is
                killed, with a warning.
            timeout: seconds that a stream may go on, that running micro-batches may take to end and
                be saved, and that main_fun may run after the end of the feeds. Nodes are then
                stopped by force. None: no limit; -1: three days, as at the end of the `with`
                block, which main_fun may exceed while it makes steps.

        Raises:
            NodeFailedError: a node failed and no call has raised that yet.
            FeedJobError: a batch of the stream could not be fed; the stream ended with it.
            ShutdownTimeout: main_fun did not return in time.
        """
        grace_s = preflight.check_timeout("grace_secs", grace_secs or 0, or_zero=True)
        given_s = DEFAULT_SHUTDOWN_S if timeout == -1 else timeout
        timeout_s = math.inf if given_s is None else preflight.check_timeout("timeout", given_s)
        if self._ending.is_forked:  # its copy of the state never changes, and its jobs are ours
            return

        def shutdown() -> None:
            failure = None
            if ssc is not None:
                failure = finish_stream(
                    ssc, self._coordinator, self._reserved.console, timeout_s=timeout_s
                )
            with self._streams.stopped(timeout_s, failure):
                self._ending.shutdown(
                    self._settings.feeds,
                    grace_s=grace_s,
                    timeout_s=timeout_s,
                    from_last_step=given_s == DEFAULT_SHUTDOWN_S,
                )

        try:
            self._beside("shutdown()", shutdown, lambda: self.abort("shutdown() was interrupted"))
        except BaseException:
            self.abort("shutdown() did not finish")  # no effect once it has
            raise
        finally:
            self._withdraw()

    def abort(self, reason: str = "aborted by the driver") -> None:
        """Stop every node at once, without waiting for main_fun. Idempotent, raises nothing.

        Ctrl-C ends the wait for the nodes, not their stop; later calls do not wait.
        """
        if self._ending.is_abandoned:
            return
        stop = InterruptibleCall("tfos-abort", lambda: self._ending.abort(reason))
        try:
            stop.result()
        except BaseException:
            self._ending.leave()
            raise
        finally:
            self._withdraw()

    @property
    def phase(self) -> ClusterPhase:
        """NEW, RESERVED, RUNNING, CLOSED or FAILED."""
        return self._coordinator.phase

    @property
    def failures(self) -> tuple[NodeFailure, ...]:
        """Failures so far, lost workers included, in order of arrival: the first and newest 50.

        With Spark's reason for the end of an executor, once Spark has it.
        """
        return self._coordinator.failures()

    def status(self) -> reports.ClusterReport:
        """Return every node's state and numbers; prints as a table."""
        now_s = self._coordinator.now_s()
        return cluster_report(self.cluster_id, self._coordinator.copied(), now_s)

    def __enter__(self) -> TFCluster:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.shutdown()
        else:
            self.abort(f"the driver's program raised {type(error).__name__}")
            self._ending.tell_failure(is_interrupted=isinstance(error, KeyboardInterrupt))

    def __repr__(self) -> str:
        return f"TFCluster({self.cluster_id!r}, {self._reserved.plan}, {self.phase.name})"

    # ---- inside ----

    @classmethod
    def _reserve(cls, spark: Any, request: reservation.ReservationRequest) -> TFCluster:
        cancel = CancelToken()
        cluster: TFCluster = InterruptibleCall(
            "tfos-reserve", lambda: cls(reservation.reserve(spark, request, cancel)), cancel=cancel
        ).result(lambda: None)
        try:
            # To this thread, and to those that it starts, such as the jobs of a stream.
            give_credentials(cluster._reserved.sc, cluster._reserved.feeder_credentials)
        except BaseException:
            cluster.abort("reserve() failed")
            raise
        return cluster

    def _withdraw(self) -> None:
        """Give the later jobs of this thread no credentials of this cluster."""
        with contextlib.suppress(Exception):  # a JVM that has ended gives nobody anything
            withdraw(self._reserved.sc, self.cluster_id)

    def _started(self, main_fun: Callable[[Any, Any], Any], args: Any) -> TFCluster:
        try:
            self.start(main_fun, args)
        except BaseException:
            self.abort("the start failed")
            raise
        return self

    def _beside(
        self,
        call: str,
        function: Callable[[], Result],
        on_interrupt: Callable[[], object] | None = None,
        *,
        spark: Any = None,
    ) -> Result:
        with self._ending.raising():
            return InterruptibleCall(f"tfos-{call}", function, spark=spark).result(on_interrupt)


def _config_of_run(config: ClusterConfig | None, timeout_s: float) -> ClusterConfig:
    if config is None:
        timeout_s = preflight.check_timeout("reservation_timeout", timeout_s)
        return ClusterConfig(reservation_timeout_s=timeout_s)
    if timeout_s != RESERVATION_TIMEOUT_S:
        raise SettingsError(
            f"reservation_timeout={timeout_s!r} beside config=: write "
            f"ClusterConfig(reservation_timeout_s={timeout_s!r}, …) instead"
        )
    return config_of(config)
