"""Context of main_fun (`ctx`): rank, roster, paths, feeds, servers.

Covers: TensorFlowOnSpark's `ctx` with its names, and the doors to feeding, ps and Keras.
Does not: do any of their work; it only connects them.
Runs in: the worker's process.      Threads: `report_progress` from any; the rest from main_fun's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfos.control.messages import RosterEntry
from tfos.errors import NoServersError, SettingsError
from tfos.files import paths
from tfos.files.checkpoint_storage import Storages
from tfos.node.spec import ChildSpec

if TYPE_CHECKING:
    from feeding.receiver.channel import FeedChannel
    from feeding.receiver.data_feed import DataFeed
    from ps.client.client import PSClient
    from rpc.auth.handshake import Credentials
    from tfos.reading.reading import Reading
    from tfos.worker.micro_batches import MicroBatches
    from tfos.worker.saver import ChiefSaver

RESTART_S = 50.0
"""A server that is started again and reads its checkpoint may take this long, below the client's
timeout; one that is not coming back ends the cluster before."""

_logger = logging.getLogger(__name__)


class NodeContext:
    """The second argument of main_fun.

    Attributes:
        job_name: `chief`, `master` or `worker`.
        task_index: among nodes of this job.
        executor_id: Spark's id of the executor.
        rank: among all workers, from 0; `worker_num` and `worker_rank` are other names of it.
        num_workers: workers that train together, the chief included.
        is_chief: whether this worker has rank 0, seeds the servers and exports.
        cluster_spec: job name -> `host:port` of each node by index; also in TF_CONFIG.
        defaultFS: Hadoop's default file system.
        working_dir: the executor's working directory; relative local paths mean this one.
        log_dir: where TensorBoard's event files go; a local directory even if they are sent on.
        staging_dir: a local directory for files that are on their way elsewhere.
        feed_channel: the rows that arrive here; `get_data_feed` and `dataset` read it.
        micro_batches: a distributed `fit` reports its trained epochs there.
    """

    def __init__(
        self,
        spec: ChildSpec,
        roster: Sequence[RosterEntry],
        *,
        feed_channel: FeedChannel,
        credentials: Credentials,
        on_progress: Callable[[dict[str, float]], None],
        micro_batches: MicroBatches,
    ) -> None:
        bundle = spec.bundle
        self.job_name = bundle.role
        self.task_index = bundle.index
        self.executor_id = spec.executor.executor_id
        self.rank = bundle.rank
        self.num_workers = bundle.settings.num_workers
        self.is_chief = bundle.is_chief
        self.cluster_spec = _cluster_spec(roster)
        self.defaultFS = bundle.settings.default_fs
        self.working_dir = spec.executor.cwd
        self.log_dir = spec.log_dir
        self.feed_channel = feed_channel
        self.micro_batches = micro_batches
        self._feeds = bundle.settings.feeds
        self._checkpoints = bundle.settings.checkpoints
        self.staging_dir = spec.executor.scratch_dir
        self._storages = Storages(self.staging_dir)
        self._name = bundle.name
        self._attempt = spec.attempt
        self._servers = sorted(
            (entry for entry in roster if entry.node.role == "ps"), key=lambda entry: entry.rank
        )
        self._credentials = credentials
        self._on_progress = on_progress
        self._client: PSClient | None = None
        self._client_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"NodeContext({self._name}, {self.num_workers} workers, {len(self._servers)} ps)"

    @property
    def worker_num(self) -> int:
        """TensorFlowOnSpark's name of `rank`."""
        return self.rank

    @property
    def worker_rank(self) -> int:
        """`rank`, as the Keras binding calls it."""
        return self.rank

    def absolute_path(self, path: str) -> str:
        """Return `path` with scheme and directory, resolved against `defaultFS`."""
        return paths.absolute_path(path, default_fs=self.defaultFS, working_dir=self.working_dir)

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> DataFeed:
        """Return TensorFlowOnSpark's DataFeed over the rows that arrive here.

        Raises:
            SettingsError: the cluster has no such feed.
        """
        from feeding.receiver.data_feed import DataFeed

        self._check_feed(qname_in)
        return DataFeed(self.feed_channel, train_mode, qname_in, qname_out, input_mapping)

    def ps_client(self) -> PSClient:
        """Return this process's connection to the parameter servers, the same on every call.

        Raises:
            NoServersError: the cluster has none.
        """
        if not self._servers:
            raise NoServersError(
                f"{self._name}: this cluster has num_ps=0, so there are no parameters to share; "
                "use TFCluster.reserve(..., num_ps=1) or train without ctx.distribute"
            )
        with self._client_lock:
            if self._client is None:
                self._client = self.new_ps_client()
            return self._client

    def saver(self) -> ChiefSaver | None:
        """Return what saves the parameters by the cluster's plan; None where nobody has to."""
        from tfos.worker.saver import ChiefSaver

        if self._checkpoints is None or not self.is_chief or not self._servers:
            return None
        return ChiefSaver(self._checkpoints, self.new_ps_client, self._storages)

    def new_ps_client(self) -> PSClient:
        """Return another connection to the servers, which its caller closes."""
        from ps.client.client import DEFAULT_RECONNECT_S, PSClient
        from rpc.auth.handshake import Identity, Role

        restarts = self._checkpoints is not None and self._checkpoints.ps_restarts > 0
        return PSClient(
            [entry.endpoint for entry in self._servers],
            self._credentials,
            Identity(Role.WORKER, self.rank, self._attempt),
            num_workers=self.num_workers,
            reconnect_s=RESTART_S if restarts else DEFAULT_RECONNECT_S,
            open_storage=self._storages,
        )

    def dataset(self, batch_size: int, *, feed: str = "input", **options: Any) -> Any:
        """Return the rows that arrive here as data for `model.fit`; see tfos.keras.data.dataset.

        Raises:
            SettingsError: the cluster has no such feed, or an option cannot work.
        """
        self._check_feed(feed)
        from tfos.keras.data.dataset import FeedDataset

        return FeedDataset(self, batch_size, feed=feed, **options)

    @property
    def read(self) -> Reading:
        """Files that this worker reads by itself; see tfos.reading."""
        from tfos.reading.reading import Reading

        return Reading(self)

    def distribute(self, model: Any, **options: Any) -> Any:
        """Move the model's parameters to the servers; see tfos.keras.fit.distribute."""
        from tfos.keras.fit.distribute import distribute

        return distribute(model, self, **options)

    @property
    def all_epochs(self) -> int:
        """For `fit(epochs=ctx.all_epochs)` of a distributed model: until the feed ends."""
        from tfos.keras.data.epoch_length import AllEpochs

        return AllEpochs()

    def callbacks(self) -> list[Any]:
        """Return the callbacks that `model.fit` needs; see tfos.keras.fit.callbacks."""
        from tfos.keras.fit.callbacks import callbacks

        return list(callbacks(self))

    def export(self, model: Any, path: str) -> str:
        """Save the model with the servers' parameters as a plain Keras model or SavedModel.

        Returns:
            The absolute path or URL; `tfos.keras.export.load_model` opens both.
        """
        from tfos.keras.export import export

        return export(model, path, self)

    def report_progress(
        self, step: int, rows: int, loss: float | None = None, **metrics: float
    ) -> None:
        """Tell the driver how far training is; cheap, replaces the last report, never raises."""
        values = {"steps": step, "rows": rows, "loss": loss, **metrics}
        try:
            numbers = {name: float(value) for name, value in values.items() if value is not None}
        except (TypeError, ValueError) as error:
            _logger.warning("report_progress ignored %r: %s", values, error)
            return
        self._on_progress(numbers)

    def release_port(self) -> None:
        """Do nothing: ports are bound once and kept, so there is no reserved one to release."""

    def _check_feed(self, name: str) -> None:
        """Refuse a feed that nobody would ever feed or end: reading it would wait for ever."""
        if not self._feeds:
            raise SettingsError(
                "no rows are fed to this cluster: it was made with InputMode.TENSORFLOW, where "
                "main_fun reads its own data. Pass input_mode=InputMode.SPARK to reserve() or run()"
            )
        if name not in self._feeds:
            raise SettingsError(
                f"{name!r} is no feed of this cluster: {list(self._feeds)}. Name it in queues= of "
                "reserve() or run()"
            )

    def finish(self) -> None:
        """Leave the training for good: nobody waits for this worker any more.

        A worker that never used the servers tells them too: the others' epochs wait for it.
        """
        if not self._servers:
            return
        was_used = self._client is not None
        client = self.ps_client()
        with self._client_lock:
            self._client = None
        try:
            client.finish()
        except Exception as error:
            if was_used:
                raise
            _logger.info("%s leaves without a word to the servers: %s", self._name, error)
        finally:
            client.close()


def _cluster_spec(roster: Sequence[RosterEntry]) -> dict[str, list[str]]:
    spec: dict[str, list[str]] = {}
    for entry in sorted(roster, key=lambda entry: (entry.node.role, entry.node.index)):
        address = f"{entry.endpoint.host}:{entry.endpoint.port}"
        spec.setdefault(entry.node.role, []).append(address)
    return spec
