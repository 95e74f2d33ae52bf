"""Context of main_fun (`ctx`): rank, roster, paths, feeds, servers.

Covers: what main_fun calls, in one place; each call leads to what does its work: feeds
(tfos.worker.feeds), servers (tfos.worker.server_access), files (tfos.files), the Keras binding
(tfos.keras). TensorFlowOnSpark's other names: tfos.worker.ported_context.
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
    """The second argument of main_fun: where this worker is, its rows, servers and files.

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
        num_workers: workers that train together, the chief included; 1 on the evaluator, which
            stands alone with rank 0: `ctx.read` has all rows there.
        is_chief: whether this worker has rank 0, seeds the servers and exports.
        cluster_spec: job name -> `host:port` of each node by index; the workers also in
            TF_CONFIG. A worker's port is free for a server that main_fun starts, such as
            TensorFlow's; see `release_port`.
        defaultFS: Hadoop's default file system.
        working_dir: the executor's working directory; the base of relative local paths.
        log_dir: local directory of this worker's logs and event files, also if they are copied to
            a URL; TensorBoard shows it as runs `worker-N/…`.
        cluster_log_dir: the directory above, with the runs of the cluster itself.
        staging_dir: a local directory for files before their transfer.
        inputs: by name of the job's inputs, the paths of this worker's files.
        servers: the parameter servers as this worker reaches them.
        fit_place: where the fits of a restarted worker begin; None: at the start.
        feed_channel: the received rows; `get_data_feed` and `dataset` read it.
        trained_feeds: record of the trained epochs of fed rows.
        epochs: takes the metrics of each epoch of `fit`.
        seen_progress: takes the progress of a `fit` whose model is not distributed.

    Args:
        spec: start document of this process.
        roster: every node of the cluster with its endpoint.
        feeds: the received rows, and what is trained of them.
        credentials: credentials of the data plane.
        on_progress: called with the numbers of `report_progress`, by name.
        offers: answers the other ranks of `rank_group()`.
        on_shard: called once the workers serve the parameters themselves.
        reserved_port: this worker's port in `cluster_spec`; None: it holds none.
        stop_asked: whether somebody outside has asked for the end of the training.
        joining: where this worker begins among others that train; None: all begin together.
        epochs: sends epochs' metrics to the driver.
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
        """0, or larger for a node that was lost and started again."""
        return self._identity.generation

    @property
    def local_rank(self) -> int:
        """Number of this worker among those of its host, from 0; 0 on the evaluator."""
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
        feed; another loop of main_fun asks here and returns.
        """
        return self._stop_asked()

    def absolute_path(self, path: str) -> str:
        """Return `path` with scheme and directory, resolved against `defaultFS`."""
        return paths.absolute_path(path, default_fs=self.defaultFS, working_dir=self.working_dir)

    @property
    def output_dir(self) -> str:
        """A local directory whose files go to the job's output once main_fun has returned.

        Raises:
            SettingsError: the job has no output.
        """
        return self._output.directory

    def send_output(self) -> str:
        """Send the files of `output_dir`; return where they are, empty if there are none."""
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
            qname_out: for compatibility, without effect: results return to the senders of their
                rows.
            input_mapping: column name to tensor name; batches are then dicts of lists.

        Raises:
            SettingsError: the cluster has no such feed.
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
        """Return this process's connection to the parameter servers, the same on every call.

        tfos closes it when main_fun has returned. A `with` block would close it before, for the
        model and the saves as well.

        Raises:
            NoServersError: the cluster has none.
        """
        return self.servers.client()

    def check_servers_used(self, what: str) -> None:
        """Refuse a training, `what`, that leaves the servers out; see ServerAccess.check_used."""
        self.servers.check_used(what)

    def rank_group(self) -> RankGroup:
        """Return the collective calls of this cluster's workers, the same on every call.

        They are for clusters whose workers all run to the end: a rank that was lost is not
        replaced.
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
            value: replaces what was handed over before.

        Raises:
            PhaseError: the task does not wait for this node, because rows come by `train`.
        """
        if self._value_fd < 0:
            raise PhaseError(
                f"{self._name}: its Spark task has ended and takes no value: use the return value "
                "of main_fun and cluster.results(), or InputMode.TENSORFLOW"
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
        """Return the rows that arrive here as data for `model.fit`, one epoch of it per epoch fed.

        Args:
            batch_size: rows per batch, at least 1; only an epoch's last batch may be smaller.
            feed: name of the feed, one of `reserve(queues=…)`, or "validation".
            feature_cols: which values of a row are x: a position or a slice, a name, a list of
                these (numbers side by side as one matrix [batch, n]; arrays and text as several
                inputs), or a dict from the model's input names. None, without `label_cols`: rows
                are (x, y) or (x, y, weight).
            label_cols: which values are y, as for `feature_cols`.
            weight_col: which value is the sample weight, float[batch].
            dtypes: numpy's names of dtypes: one for x; one each for x, y and weight (None leaves a
                part as it is); or by column. None: float64 becomes Keras' floatx.
            map_fn: `map_fn(x, y) -> (x, y)` (and the weight, where there is one) on numpy arrays of
                a whole batch, [batch, …]; runs in the thread that reads ahead.

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
        chief's weights. Later `set_weights` and `load_weights` count: with tables, before the first
        step alone; where the servers' parameters were trained already, after that step alone.

        Args:
            model: a compiled Keras model (Sequential, functional, subclassed, own `train_step`).
            consistency: "async" applies each gradient when it arrives; "ssp" too, and keeps every
                worker within `staleness_bound` steps of the slowest; "sync" reduces one gradient
                per worker, in rank order, and applies it once; "hybrid" does so with dense
                parameters, and applies gradients of tables' rows when they arrive.
            reduction: sync only: "mean" weighted by the rows of the batches, or "sum".
            staleness_bound: ssp, and needed there: steps, 0 or more. Larger: less waiting, older
                gradients. hybrid: batches of rows that a worker has under way, 1 by default.
            staleness_aware: divide a gradient's learning rate by 1 + the updates by others that its
                worker had not seen. None: yes, except in sync and hybrid, where none is, and for
                Adagrad and Ftrl. False ruins a training of several workers with rules like Adam.
            on_nonfinite: a NaN or infinite gradient: "error" raises, "skip" leaves the step out.
            pipeline: async only: steps, 0 to 64, that `fit` computes while a push is in flight: a
                step's parameters lack so many of this worker's own updates. None: 1 for models with
                tables and Adagrad or Ftrl, else 0.
            compression: of pushed float32 gradients: "bf16", "fp16": half the bytes; "int8": 1/4.

        Returns:
            The same model object.

        Raises:
            NoServersError: the cluster has TensorFlow's servers.
            NotCompiled, UnsupportedOptimizer, UnsupportedModel: the obstacle; a second model.
            SettingsError: incompatible arguments, also num_ps=0 and another mode than "sync".
            CollectiveError: num_ps=0, and another worker does not come here.
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
        """Return the model; refuse a second one, to which servers would give the trained values."""
        if self._distributed is None or self._distributed[0]() is model:
            return model
        raise UnsupportedModel(
            f"a cluster trains one model, and this one has {self._distributed[1]!r}, whose trained "
            f"weights {getattr(model, 'name', model)!r} would begin with. For models that do not "
            "depend on each other, such as those of a k-fold loop, use tfos.map_train or a cluster "
            "for each; to go on with this training, call fit of the first model again"
        )

    def load_rows(self, table: str, rows: Iterable[tuple[Any, Any]]) -> int:
        """Let a table begin with given rows: call it on every worker, between distribute and fit.

        The chief reads and loads them, the others wait for it. New rows have the rule's initial
        slots; an id that has a row keeps it. They are in every later checkpoint; a training that
        resumes from one loads nothing. With checkpoints they are saved before this returns, and
        loaded again if a server was started again before that. A table is loaded once: join
        several sources as `[*a, *b]`, or by an object whose `__iter__` gives their batches.

        Args:
            table: its name.
            rows: batches of (ids, rows): [n] integers or strings, each once, and [n, dim] of the
                table's dtype. Of a generator, which is read once, a restart costs rows, and the log
                says so. `tfos.serving.read_rows` gives those of an export,
                `tfos.keras.rows_of` those of a plain Keras model.

        Returns:
            Number of rows that this call has created, each id once; 0 on the other workers. At
            least so many are: rows whose answer was lost with its connection are not counted.

        Raises:
            NoServersError: the cluster has none.
            ServerPhaseError: no model is distributed yet, or it was never built.
            ManifestMismatch: there is no such table.
            IdError, ShapeError, NonFiniteGradient: rows that do not fit; those before are loaded.
            TableFull: there is no room for them.
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

        Add your own to the list. A callback of these that fails never stops the training.
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
        evaluated. Metrics, as `val_…`, go to the driver (`cluster.evaluations()`) and to
        TensorBoard's run `evaluator`. Rows of Embeddings need this process's memory.

        Args:
            model: compiled and built, as the workers build it; do not distribute it.
            x: arrays, a tf.data.Dataset or one of `ctx.read`; read once per checkpoint.
            y: targets, where x has none.
            batch_size: rows per batch of arrays.
            sample_weight: weights of arrays' rows.
            steps: batches per evaluation; None: all.
            directory: where to look; None: that of ClusterConfig(checkpoints=...).
            poll_s: seconds between two looks.

        Returns:
            The metrics by the checkpoints' steps, in the order of their evaluation.

        Raises:
            PhaseError: this node is no evaluator.
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

        Call it on one worker, usually `if ctx.is_chief:`. An older export at this place is replaced
        once the new one is complete; a directory that holds anything else is refused.

        Args:
            model: any built Keras model, distributed or not.
            path: a path or a URL such as `hdfs://nn:8020/models/digits.keras`. Ending in `.keras`:
                one file; otherwise a directory for TensorFlow Serving (SavedModel). Other paths
                mean what `ctx.absolute_path` says.
            tables: of a model with `tfos.keras.Embedding`. "inside", the default: the rows become
                layers of Keras in the plain model, up to 2 GiB a table. "beside": a directory with
                the dense model and the rows as Parquet, which `tfos.serving.load` opens.
            since: "beside": an earlier whole export; rows that have changed since, and the ids of
                those that are gone, are written.

        Returns:
            The absolute path or URL. `tfos.keras.load_model` opens a `.keras` file there,
            `tf.saved_model.load` a SavedModel of this host, `tfos.serving.load` one with the tables
            beside the model.

        Raises:
            SettingsError: not a Keras model, one that was never built, a SavedModel of one of which
                only layers were called, or a path that is refused.
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
            step: steps that this worker has trained.
            rows: rows that this worker has trained.
            loss: the newest loss; None: not known.
            metrics: further numbers by any name, shown by `cluster.status()`, `tfos status` and the
                page, the first 20 of them.
        """
        own = dict(itertools.islice((metrics or {}).items(), MOST_METRICS))
        named = {f"{METRIC}{name}": value for name, value in own.items()}
        self.report_numbers({**named, "steps": step, "rows": rows, "loss": loss})

    def report_numbers(self, numbers: Mapping[str, float | None]) -> None:
        """Report what a loop of tfos' own has counted; never raises.

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
