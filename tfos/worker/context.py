"""Context of main_fun (`ctx`): rank, roster, paths, feeds, servers.

Covers: what main_fun calls, in one place; each call delegates to feeds (tfos.worker.feeds), servers
(tfos.worker.server_access), files (tfos.files) or the Keras binding (tfos.keras).
TensorFlowOnSpark's other names: tfos.worker.ported_context.
Does not: do any of that work.
Runs in: the worker's process.      Threads: `report_progress` from any; the rest from main_fun's.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rpc.auth.handshake import Identity, Role
from tfos.control.messages import METRIC, MOST_METRICS, Joining, RosterEntry
from tfos.errors import PhaseError, UnsupportedModel
from tfos.files import paths
from tfos.files.checkpoint_storage import Storages
from tfos.files.worker_files import WorkerInputs, WorkerOutput
from tfos.node import whole_files
from tfos.node.spec import ChildSpec
from tfos.topology import EVALUATOR_ROLE
from tfos.worker.evaluator import check_trains, evaluate_checkpoints
from tfos.worker.ported_context import PortedContext
from tfos.worker.reports.seen_progress import SeenProgress
from tfos.worker.roster import cluster_spec, rank_on_host, training_nodes
from tfos.worker.server_access import ServerAccess

if TYPE_CHECKING:
    import keras

    from feeding.receiver.data_feed import DataFeed
    from ps.client.client import PSClient
    from ps.compression.format import Compression
    from ps.manifest.manifest import Consistency
    from rpc.auth.handshake import Credentials
    from tfos.collectives.group import RankGroup
    from tfos.collectives.offers import Offers
    from tfos.keras.data.columns import Dtypes, Selector
    from tfos.keras.data.feed_dataset import FeedDataset
    from tfos.native.reserved_port import ReservedPort
    from tfos.reading.reading import Reading
    from tfos.worker.feeds import WorkerFeeds
    from tfos.worker.reports.epoch_reports import EpochReports


class NodeContext(PortedContext):
    """The second argument of main_fun: this worker's place, rows, servers and files.

        def main_fun(args, ctx):
            model = ...  # compiled
            ctx.distribute(model)
            model.fit(ctx.dataset(batch_size=64), epochs=3, callbacks=ctx.callbacks())
            if ctx.is_chief:
                ctx.export(model, "hdfs:///models/digits.keras")

    For tfos itself, not for programs: `servers`, `fit_place`, `feed_channel`, `trained_feeds`,
    `epochs`, `seen_progress`, `resumes_…`, `check_servers_used`, `save_now`, `new_ps_client`,
    `hand_over`, `report_numbers`, `send_output`.

    Attributes:
        job_name: `chief`, `master`, `worker` or `evaluator`.
        task_index: index among the nodes of this job, from 0.
        executor_id: Spark's id of the executor.
        rank: rank among all workers, from 0; `worker_num` and `worker_rank` are aliases.
        num_workers: number of workers that train together, the chief included; 1 on the
            evaluator, which is alone with rank 0: `ctx.read` has all rows there.
        is_chief: whether this worker has rank 0, seeds the servers and exports.
        cluster_spec: job name -> `host:port` of each node by index; TF_CONFIG has the workers,
            too. A worker's port is free for a server that main_fun starts, such as
            TensorFlow's; see `release_port`.
        defaultFS: Hadoop's default file system, the local one as `file://`.
        working_dir: the executor's working directory; the base of relative local paths.
        log_dir: local directory of this worker's logs and event files, even if they are copied
            to a URL; TensorBoard shows it as runs `worker-N/…`.
        cluster_log_dir: the directory above, with the runs of the cluster itself.
        staging_dir: a local directory for files before their transfer.
        inputs: by name of the job's inputs, the paths of this worker's files.
        servers: the parameter servers as this worker reaches them.
        fit_place: where the fits of a restarted worker begin; None: at the start.
        feed_channel: the received rows; `get_data_feed` and `dataset` read it.
        trained_feeds: record of the trained epochs of fed rows.
        epochs: receiver of the metrics of each epoch of `fit`.
        seen_progress: receiver of the progress of a `fit` whose model is not distributed.

    Args:
        spec: start document of this process.
        roster: every node of the cluster with its endpoint.
        feeds: the received rows, and which of them are trained.
        credentials: credentials of the data plane.
        on_progress: function called with the numbers of `report_progress`, by name.
        offers: what answers the other ranks of `rank_group()`.
        on_shard: function called once the workers serve the parameters themselves.
        reserved_port: this worker's port in `cluster_spec`; None: it holds none.
        stop_asked: whether somebody outside has asked for the end of the training.
        joining: the place where this worker joins others that train; None: all begin together.
        epochs: what sends epochs' metrics to the driver.
    """

    def __init__(  # noqa: PLR0913 - what the process has, by keyword
        self,
        spec: ChildSpec,
        roster: Sequence[RosterEntry],
        *,
        feeds: WorkerFeeds,
        credentials: Credentials,
        on_progress: Callable[[dict[str, float]], None],
        epochs: EpochReports,
        offers: Offers,
        on_shard: Callable[[NodeContext], None] = lambda _: None,
        reserved_port: ReservedPort | None = None,
        stop_asked: Callable[[], bool] = bool,
        joining: Joining | None = None,
    ) -> None:
        bundle, settings = spec.bundle, spec.bundle.settings
        self._node, self._name, self._config = bundle.node, bundle.name, settings.config
        self.job_name = bundle.node.role
        self.task_index = bundle.node.index
        self.executor_id = spec.executor.executor_id
        self.rank = 0 if self._node.is_evaluator else bundle.node.rank
        self.num_workers = 1 if self._node.is_evaluator else settings.num_workers
        self.is_chief = bundle.node.is_chief
        self.fit_place = joining.fit if joining is not None else None
        self.cluster_spec = cluster_spec(roster)
        self._workers = training_nodes(
            roster, has_tensorflow_servers=settings.has_tensorflow_servers
        )
        self.defaultFS = settings.default_fs
        self.working_dir = spec.executor.cwd
        self.staging_dir = spec.executor.scratch_dir
        self.cluster_log_dir = spec.log_dir
        place = EVALUATOR_ROLE if self._node.is_evaluator else f"worker-{self.rank}"
        self.log_dir = os.path.join(spec.log_dir, place)
        self.inputs, self._output = self._own_files(Path(spec.files_dir))
        self._storages = Storages(self.staging_dir)
        self._feeds = feeds
        self.feed_channel, self.trained_feeds, self.epochs = feeds.channel, feeds.trained, epochs
        self.seen_progress = SeenProgress(on_progress)
        self._stop_asked = stop_asked
        self._reserved_port, self._shows_port = reserved_port, not settings.release_port
        self._value_fd = spec.value_fd
        self._credentials, self._offers = credentials, offers
        self._identity = Identity(Role.WORKER, bundle.node.rank, spec.attempt)
        self._rank_group: RankGroup | None = None
        self._distributed: tuple[weakref.ref[keras.Model], str] | None = None
        """The model that `distribute` got, and its name; None: none yet."""
        self.servers = ServerAccess(
            spec,
            roster,
            identity=self._identity,
            credentials=credentials,
            storages=self._storages,
            rank_group=self.rank_group,
            on_own_shard=lambda: on_shard(self),
        )

    def __repr__(self) -> str:
        return f"NodeContext({self._name}, {self.num_workers} workers, {self.servers.count} ps)"

    @property
    def attempt(self) -> int:
        """Number of this attempt: 0, or larger for a node that was lost and started again."""
        return self._identity.generation

    @property
    def local_rank(self) -> int:
        """Number of this worker among those on its host, from 0; 0 on the evaluator."""
        if self._node.is_evaluator:
            return 0
        return rank_on_host(self._workers, self.rank)

    @property
    def worker_rank(self) -> int:
        """`rank`, as the Keras binding calls it."""
        return self.rank

    @property
    def stop_asked(self) -> bool:
        """Whether somebody has asked for the end of the training (`tfos stop`, the job's page).

        On the evaluator: whether the training is over.
        A distributed `fit` ends with its epoch, and `should_stop()` of `get_data_feed` ends the
        feed. Any other loop of main_fun checks this property and returns.
        """
        return self._stop_asked()

    def absolute_path(self, path: str) -> str:
        """Return `path` with scheme and directory, resolved against `defaultFS`."""
        return paths.absolute_path(path, default_fs=self.defaultFS, working_dir=self.working_dir)

    @property
    def output_dir(self) -> str:
        """Local directory whose files go to the job's output once main_fun has returned.

        Raises:
            SettingsError: the job has no output.
        """
        return self._output.directory

    def send_output(self) -> str:
        """Send the files of `output_dir`; return their location, empty if there are none."""
        return self._output.send()

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> DataFeed:
        """Return TensorFlowOnSpark's DataFeed over the rows that arrive here.

        Args:
            train_mode: False: a batch ends with its partition, for inference.
            qname_in: name of the feed, one of `reserve(queues=…)`.
            qname_out: accepted for compatibility, no effect: results return to the senders of
                their rows.
            input_mapping: column name to tensor name; batches are then dicts of lists.

        Raises:
            SettingsError: the cluster has no such feed, or two columns share a tensor name.
        """
        return self._feeds.open(train_mode, qname_in, qname_out, input_mapping, self._stop_asked)

    @property
    def resumes_epochs(self) -> bool:
        """See ServerAccess."""
        return self.servers.resumes_epochs

    @property
    def resumes_rate(self) -> bool:
        """See ServerAccess."""
        return self.servers.resumes_rate

    def ps_client(self) -> PSClient:
        """Return this process's connection to the parameter servers, the same for every call.

        tfos closes it when main_fun has returned. A `with` block would close it earlier, and for
        the model and the saves as well.

        Raises:
            NoServersError: the cluster has none.
        """
        return self.servers.client()

    def check_servers_used(self, what: str) -> None:
        """Refuse a training, `what`, that leaves the servers out; see ServerAccess.check_used."""
        self.servers.check_used(what)

    def rank_group(self) -> RankGroup:
        """Return the collective calls of this cluster's workers, the same on every call.

        They are for clusters whose workers all run to the end: a lost rank is not replaced.
        """
        check_trains(self._node, "ranks")
        if self._rank_group is None:
            from tfos.collectives.group import RankGroup, RankPeer

            peers = {
                rank: RankPeer(Identity(Role.WORKER, rank, each.node.attempt), each.endpoint)
                for rank, each in self._workers.items()
                if rank != self.rank
            }
            self._rank_group = RankGroup(self._identity, self._credentials, self._offers, peers)
        return self._rank_group

    def hand_over(self, value: bytes) -> None:
        """Give bytes to this node's Spark task, which returns them as its result.

        Args:
            value: the bytes; they replace those of an earlier call.

        Raises:
            PhaseError: the task does not wait for this node, because `train` feeds its rows.
        """
        if self._value_fd < 0:
            raise PhaseError(
                f"the Spark task of {self._name} has ended and takes no value. Use the return "
                "value of main_fun and cluster.results(), or InputMode.TENSORFLOW"
            )
        whole_files.replace(self._value_fd, value)

    def save_now(self) -> str | None:
        """See ServerAccess.save_now."""
        return self.servers.save_now()

    def new_ps_client(self) -> PSClient:
        """Return another connection to the servers, which its caller closes."""
        return self.servers.new_client()

    def dataset(  # noqa: PLR0913 - what a user may say about rows, all but one by keyword
        self,
        batch_size: int,
        *,
        feed: str = "input",
        feature_cols: Selector | None = None,
        label_cols: Selector | None = None,
        weight_col: Selector | None = None,
        dtypes: Dtypes = None,
        map_fn: Callable[..., Any] | None = None,
    ) -> FeedDataset:
        """Return the rows that arrive here as data for `model.fit`, one epoch per fed epoch.

        Args:
            batch_size: rows per batch, at least 1; only an epoch's last batch may be smaller.
            feed: name of the feed, one of `reserve(queues=…)`, or "validation".
            feature_cols: values of a row that are x: a position or a slice, a name, a list of
                these (numbers side by side as one matrix [batch, n], integers beside floats as
                floats; arrays and text as several inputs), or a dict from the model's input names.
                None, without `label_cols`: rows are (x, y) or (x, y, weight).
            label_cols: values that are y, as for `feature_cols`.
            weight_col: value that is the sample weight, float[batch].
            dtypes: numpy dtype names: one for x; one each for x, y and weight (None leaves a part
                as it is); or by column. An integer dtype cuts off fractions and refuses numbers
                that it cannot hold. None: float64 becomes Keras' floatx. Finite numbers that would
                become infinite are refused.
            map_fn: `map_fn(x, y) -> (x, y)` (and the weight, if there is one) on numpy arrays of a
                whole batch, [batch, …]; runs in the thread that reads ahead.

        Raises:
            SettingsError: the cluster has no such feed, or an argument cannot work.
        """
        self._feeds.check(feed)
        from tfos.keras.data.columns import ColumnRoles
        from tfos.keras.data.feed_dataset import FeedDataset

        columns = ColumnRoles(
            feature_cols=feature_cols,
            label_cols=label_cols,
            weight_col=weight_col,
            dtypes=dtypes,
            map_fn=map_fn,
        )
        return FeedDataset(self, batch_size, columns, feed=feed)

    @property
    def read(self) -> Reading:
        """Files that this worker reads itself: `ctx.read.parquet(paths).dataset(64)`."""
        from tfos.reading.reading import Reading

        return Reading(self)

    def distribute(  # noqa: PLR0913 - options of one user's call, by keyword
        self,
        model: keras.Model,
        *,
        consistency: Consistency = "async",
        reduction: Literal["mean", "sum"] = "mean",
        staleness_bound: int | None = None,
        staleness_aware: bool | None = None,
        on_nonfinite: Literal["error", "skip"] = "error",
        pipeline: int | None = None,
        compression: Compression = "none",
    ) -> keras.Model:
        """Move a compiled model's parameters to the servers; `fit` then trains together.

        Call it on every worker between `compile` and `fit`, with the same model. All begin with the
        chief's weights. Later `set_weights` and `load_weights` count, with two limits: with tables,
        only before the first step; if the servers' parameters were already trained, only after it.

        Args:
            model: a compiled Keras model (Sequential, functional, subclassed, own `train_step`).
            consistency: "async" applies each gradient when it arrives; "ssp" too, and keeps every
                worker within `staleness_bound` steps of the slowest; "sync" reduces one gradient
                per worker, in rank order, and applies it once; "hybrid" does so with dense
                parameters, and applies gradients of tables' rows when they arrive.
            reduction: at a barrier of sync or hybrid: "mean" weighted by batches' rows, or "sum".
            staleness_bound: number of steps, 0 or more, required for ssp. Larger: less waiting,
                older gradients. hybrid: batches of rows that a worker has in progress, default 1.
            staleness_aware: whether to divide a gradient's learning rate by 1 + the updates by
                others that its worker had not seen. None: yes, except in sync and hybrid, where
                there are none, and for Adagrad and Ftrl. False ruins training with rules like Adam.
            on_nonfinite: effect of a NaN or infinite gradient: "error" raises, "skip" drops it.
            pipeline: async only: number of steps, 0 to 64, that `fit` computes while a push is in
                flight: a step's parameters lack that many of this worker's own updates. None: 1 for
                models with tables and Adagrad or Ftrl, else 0.
            compression: format of pushed float32 gradients: "bf16", "fp16" (half), "int8" (1/4).

        Returns:
            The same model object.

        Raises:
            NoServersError: the cluster has TensorFlow's servers.
            NotCompiled, UnsupportedOptimizer, UnsupportedModel: an obstacle; a second model.
            SettingsError: arguments are incompatible, also num_ps=0 with a mode other than "sync".
            CollectiveError: num_ps=0, and another worker does not make this call.
        """
        self.servers.serve_where_none_are(self._only(model), consistency)
        from tfos.keras.fit.distribute import distribute

        distribute(
            model,
            self,
            consistency=consistency,
            reduction=reduction,
            staleness_bound=staleness_bound,
            staleness_aware=staleness_aware,
            on_nonfinite=on_nonfinite,
            pipeline=pipeline,
            compression=compression,
        )
        return self._trained(model)

    def _trained(self, model: keras.Model) -> keras.Model:
        """Note the model that the cluster trains; return it."""
        self._distributed = (weakref.ref(model), str(model.name))
        return model

    def _only(self, model: Any) -> Any:
        """Return the model; refuse a second one, which would get the first one's trained values."""
        if self._distributed is None or self._distributed[0]() is model:
            return model
        raise UnsupportedModel(
            f"a cluster trains one model, and this one trains {self._distributed[1]!r}; "
            f"{getattr(model, 'name', model)!r} would begin with its trained weights. For "
            "independent models, such as those of a k-fold loop, use tfos.map_train or a cluster "
            "for each. To continue this training, call fit of the first model again"
        )

    def load_rows(self, table: str, rows: Iterable[tuple[Any, Any]]) -> int:
        """Load rows that a table begins with; call it on every worker, between distribute and fit.

        The chief reads and loads them; the others wait for it. New rows have the rule's initial
        slots; an id that has a row keeps it. Every later checkpoint has them, and a training that
        resumes from one loads nothing. With checkpoints, the chief saves them before this returns,
        and loads them again if a server restarts before that save. A table is loaded once: join
        several sources as `[*a, *b]`, or with an object whose `__iter__` yields their batches.

        Args:
            table: name of the table.
            rows: batches of (ids, rows): [n] integers or strings, each once, and [n, dim] of the
                table's dtype. A generator can be read only once, so a restart loses rows, and the
                log says so. `tfos.serving.read_rows` yields those of an export,
                `tfos.keras.rows_of` those of a plain Keras model.

        Returns:
            Number of rows that this call has created, each id once; 0 on the other workers. It is a
            lower bound: rows whose answer was lost with its connection are not counted.

        Raises:
            NoServersError: the cluster has none.
            ServerPhaseError: no model is distributed yet, or it was never built.
            ManifestMismatch: there is no such table.
            IdError, ShapeError, NonFiniteGradient: rows do not fit; earlier rows are loaded.
            SettingsError: the ids are row numbers of `rows_of` without a lookup, and the table's
                are strings.
            TableFull: the table has no room for the rows.
        """
        from tfos.keras.embedding.loading import load_rows

        return load_rows(self.ps_client(), table, rows, is_chief=self.is_chief, save=self.save_now)

    @property
    def all_epochs(self) -> int:
        """For `fit(epochs=ctx.all_epochs)` on `ctx.dataset(…)`: until the feed ends."""
        from tfos.keras.data.epoch_length import AllEpochs

        return AllEpochs()

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Return the callbacks for this worker's `fit`: progress for the driver, TensorBoard files.

        Put your own before them, `[*mine, *ctx.callbacks()]`: the report then has what yours add.
        A failure in one of these callbacks never stops the training.
        """
        from tfos.keras.fit.callbacks import callbacks

        return list(callbacks(self))

    def evaluate_checkpoints(  # noqa: PLR0913 - Keras' arguments of evaluate, by keyword
        self,
        model: keras.Model,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
        steps: int | None = None,
        directory: str | None = None,
        poll_s: float = 5.0,
    ) -> dict[int, dict[str, float]]:
        """Evaluate the cluster's checkpoints while it trains; for `evaluator:0` (eval_node=True).

        It takes the newest one each time, and ends when the training is over and the last one is
        evaluated. The driver (`cluster.evaluations()`) and TensorBoard's run `evaluator` get the
        metrics as `val_…`. Rows of Embeddings need this process's memory.

        Args:
            model: the compiled model, built as the workers build it; do not distribute it.
            x: arrays, a tf.data.Dataset or a dataset of `ctx.read`; read once per checkpoint.
            y: targets, if x has none.
            batch_size: rows per batch of arrays.
            sample_weight: weights of arrays' rows.
            steps: batches per evaluation; None: all.
            directory: directory of the checkpoints; None: that of ClusterConfig(checkpoints=...).
            poll_s: seconds between two looks at it.

        Returns:
            The metrics by the checkpoints' steps, in the order of their evaluation.

        Raises:
            PhaseError: this node is not the evaluator.
            NotCompiled, UnsupportedModel, SettingsError: the text says what does not fit.
        """
        data = {"x": x, "y": y, "sample_weight": sample_weight}
        return evaluate_checkpoints(
            self,
            model,
            {**data, "batch_size": batch_size, "steps": steps},
            node=self._node,
            directory=directory,
            plan=self._config.checkpoints,
            storages=self._storages,
            poll_s=poll_s,
        )

    def export(
        self,
        model: keras.Model,
        path: str | os.PathLike[str],
        *,
        tables: Literal["inside", "beside"] | None = None,
        since: str | os.PathLike[str] | None = None,
    ) -> str:
        """Save the model with the servers' parameters as a plain Keras model or SavedModel.

        Call it on one worker, usually `if ctx.is_chief:`. The new export replaces an older one at
        this path once it is complete. A directory that holds anything else is refused.

        Args:
            model: any built Keras model, distributed or not.
            path: a path or a URL such as `hdfs://nn:8020/models/digits.keras`. `.keras` at the end
                means one file, anything else a directory for TensorFlow Serving (SavedModel).
                Relative paths resolve like `ctx.absolute_path`.
            tables: placement of the rows of a model with `tfos.keras.Embedding`. "inside", the
                default: the rows become layers of Keras in the plain model, up to 2 GiB a table.
                "beside": a directory with the dense model and the rows as Parquet, which
                `tfos.serving.load` opens.
            since: with "beside", an earlier whole export: only rows that have changed since then,
                and the ids of those that are gone, are written.

        Returns:
            The absolute path or URL. `tfos.keras.load_model` opens a `.keras` file there,
            `tf.saved_model.load` a SavedModel on this host, `tfos.serving.load` one with the tables
            beside the model.

        Raises:
            SettingsError: the model is not a Keras model, was never built, or would become a
                SavedModel although only its layers were called; or the path is refused.
            UnsupportedModel: the rows cannot be inside; the text names the reason.
            ExportError: `since` is not a whole export of the same tables.
            ServerPhaseError: servers were started again in each of several scans of a table.
            OSError: the disk or the file system failed.
        """
        from tfos.keras.fit.table_export import export_with_tables

        return export_with_tables(model, path, self, tables=tables, since=since)

    def report_progress(
        self,
        step: int,
        rows: int,
        loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Report training progress to the driver; cheap, replaces the last report, never raises.

        Args:
            step: number of steps that this worker has trained.
            rows: number of rows that this worker has trained.
            loss: the newest loss; None: unknown.
            metrics: further numbers by any name; `cluster.status()`, `tfos status` and the page
                show the first 20.
        """
        own = dict(itertools.islice((metrics or {}).items(), MOST_METRICS))
        named = {f"{METRIC}{name}": value for name, value in own.items()}
        self.report_numbers({**named, "steps": step, "rows": rows, "loss": loss})

    def report_numbers(self, numbers: Mapping[str, float | None]) -> None:
        """Report what a loop of tfos has counted; never raises.

        Args:
            numbers: by name, with `steps`, `rows` and `loss`; see ProgressMeter.
        """
        self.seen_progress.report(numbers)

    def _own_files(self, directory: Path) -> tuple[WorkerInputs, WorkerOutput]:
        """Return this worker's part of the job's inputs and output, with copies in `directory`."""
        config, name = self._config, os.path.basename(self.log_dir)
        inputs = WorkerInputs(
            config.inputs, self.rank, self.num_workers, directory / "inputs", self.absolute_path
        )
        return inputs, WorkerOutput(config.output or "", name, directory / "output")
