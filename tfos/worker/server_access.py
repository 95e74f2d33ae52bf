"""Server access: this worker and the parameter servers, from the first client to the last message.

Covers: clients of the servers, also after a server has moved; the workers' own shards (num_ps=0);
the chief's saver; refusing a training that does not use the servers; leaving the training.
Does not: push or pull (ps.client), serve (tfos.worker.own_shard), save (tfos.worker.saver).
Runs in: the worker's process.
Threads: `client` and `new_client` from any; `moved` from `tfos-orders`; the rest from main_fun's.
`_lock` guards the client, the endpoints and what has to be notified of a change.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rpc.auth.handshake import Credentials, Identity
from rpc.endpoint import Endpoint
from tfos.control.messages import RosterEntry
from tfos.errors import CollectiveTimeout, NoServersError, NotDistributed, PSError, SettingsError
from tfos.files.checkpoint_storage import Storages
from tfos.native.environment import is_connected_to_servers
from tfos.node.child_link import aside
from tfos.node.spec import ChildSpec
from tfos.worker.evaluator import check_trains
from tfos.worker.roster import server_endpoints, training_nodes

if TYPE_CHECKING:
    from ps.client.client import PSClient
    from ps.client.metadata import RunNotes
    from ps.manifest.manifest import Consistency
    from tfos.collectives.group import RankGroup
    from tfos.worker.own_shard import OwnShard
    from tfos.worker.saver import ChiefSaver

RESTART_S = 50.0
"""Seconds until a restarted server listens, below the client's timeout. Then it reports itself that
it restores. One that does not restart ends the cluster earlier."""

_logger = logging.getLogger(__name__)


class ServerAccess:
    """The parameter servers as one worker reaches them.

    Args:
        spec: start document of this process.
        roster: every node of the cluster with its endpoint.
        identity: identity of this worker on the data plane.
        credentials: credentials of the data plane.
        storages: storages that open checkpoint directories.
        rank_group: function that returns all workers, which serve together if there are no servers.
        on_own_shard: function called once the workers serve the parameters themselves.
    """

    def __init__(  # noqa: PLR0913 - what the context has, by keyword
        self,
        spec: ChildSpec,
        roster: Sequence[RosterEntry],
        *,
        identity: Identity,
        credentials: Credentials,
        storages: Storages,
        rank_group: Callable[[], RankGroup],
        on_own_shard: Callable[[], None],
    ) -> None:
        settings = spec.bundle.settings
        self._node, self._name = spec.bundle.node, spec.bundle.name
        self._config, self._num_workers = settings.config, settings.num_workers
        self._is_fed = bool(settings.feeds)
        self._are_tensorflows = settings.has_tensorflow_servers
        has_others = settings.is_mirrored and self._num_workers > 1
        self._tells_of_others = has_others and self._node.is_chief
        self._workers = training_nodes(roster, has_tensorflow_servers=self._are_tensorflows)
        uses_none = self._are_tensorflows or self._node.is_evaluator
        self._endpoints = [] if uses_none else server_endpoints(roster)
        """Endpoints of the shards in rank order; empty until a cluster without servers has some."""
        self._identity, self._credentials, self._storages = identity, credentials, storages
        self._place = (spec.executor.host, spec.socket_dir)
        self._rank_group, self._on_own_shard = rank_group, on_own_shard
        self._own_shard: OwnShard | None = None
        self._saver: ChiefSaver | None = None
        self._clients: weakref.WeakSet[PSClient] = weakref.WeakSet()
        self._client: PSClient | None = None
        self._run_notes: RunNotes | None = None
        """Notes that any client of this process has set for the run."""
        self._lock = threading.RLock()

    @property
    def count(self) -> int:
        """Number of shards that this worker trains through, those of the workers included."""
        return len(self._endpoints)

    @property
    def resumes_rate(self) -> bool:
        """Whether a fit takes the learning rate that it had when an earlier run was interrupted."""
        plan = self._config.checkpoints
        return plan is not None and plan.resumes_epochs and bool(self._endpoints)

    @property
    def resumes_epochs(self) -> bool:
        """Whether fed epochs go on where an interrupted run stopped; the servers keep a record."""
        has_own = self._own_shard is not None  # its record would come after the first rows
        return self.resumes_rate and not has_own

    def client(self) -> PSClient:
        """Return this process's connection to the servers, the same for every call.

        Raises:
            NoServersError: the cluster has none.
        """
        check_trains(self._node, "parameter servers")
        if self._are_tensorflows:
            raise NoServersError(
                f"{self._name}: this cluster's servers are TensorFlow's (ps='tensorflow'), but "
                "ctx.distribute, tables and checkpoints need servers of tfos. Leave "
                "ps='tensorflow' out of reserve(), or train with ParameterServerStrategy"
            )
        if not self._endpoints:
            raise NoServersError(
                f"{self._name}: this cluster has num_ps=0, so no parameters are shared before "
                'ctx.distribute(model, consistency="sync"), which keeps them in the workers. Call '
                "that first, use TFCluster.reserve(..., num_ps=1), or train without them"
            )
        with self._lock:
            if self._client is None:
                self._client = self.new_client()
            return self._client

    def new_client(self) -> PSClient:
        """Return another connection to the servers, which its caller closes."""
        from ps.client.client import DEFAULT_RECONNECT_S, PSClient
        from ps.client.metadata import RunNotes
        from ps.client.retry import READY_TIMEOUT_S

        restarts = self._config.replaces_servers and self._own_shard is None
        plan = self._config.checkpoints
        with self._lock:
            endpoints = tuple(self._endpoints)
            if self._run_notes is None:
                self._run_notes = RunNotes()
        client = PSClient(
            endpoints,
            self._credentials,
            self._identity,
            num_workers=self._num_workers,
            reconnect_s=RESTART_S if restarts else DEFAULT_RECONNECT_S,
            restore_s=READY_TIMEOUT_S if plan is None else plan.restart_s,
            open_storage=self._storages,
            run_notes=self._run_notes,
        )
        with self._lock:
            self._clients.add(client)
            for rank, endpoint in enumerate(self._endpoints):
                if endpoint != endpoints[rank]:  # it has moved since
                    client.server_moved(rank, endpoint)
        return client

    def moved(self, rank: int, endpoint: Endpoint) -> None:
        """Use another endpoint for a server from now on: it was lost and started again.

        Args:
            rank: rank of the server.
            endpoint: the endpoint at which it listens.
        """
        with self._lock:
            self._endpoints[rank] = endpoint
            clients = list(self._clients)
            for client in clients:
                client.server_moved(rank, endpoint)
        if rank == 0:
            for client in clients:
                aside(client.bring_answers)

    def saver(self) -> ChiefSaver | None:
        """Return a new saver of the cluster's checkpoints; None on workers that do not save."""
        from tfos.worker.saver import ChiefSaver

        plan, joins = self._config.checkpoints, self._identity.generation > 0
        if plan is None or not self._node.is_chief or not self._endpoints:
            return None
        self._saver = ChiefSaver(plan, self.new_client, self._storages, joins=joins)
        return self._saver

    def save_now(self) -> str | None:
        """Save what has changed, in one try; return why that failed, empty if it did not.

        None on workers that do not save, and without checkpoints.
        """
        return None if self._saver is None else self._saver.save_once()

    def serve_where_none_are(self, model: Any, consistency: Consistency) -> None:
        """In a cluster without servers, serve one shard per worker, in the workers.

        Args:
            model: the model to distribute.
            consistency: the mode that the user asks for.

        Raises:
            SettingsError: the mode needs servers of the cluster.
            CollectiveTimeout: another worker does not make this call.
            CollectiveError: another worker was lost, or ended.
        """
        if self._endpoints or self._are_tensorflows:
            return
        check_trains(self._node, "parameter servers")
        if consistency != "sync":
            raise SettingsError(
                f"{self._name}: this cluster has num_ps=0, so its workers keep the parameters. "
                f'That works with consistency="sync", got {consistency!r}. Write ctx.distribute('
                f'model, consistency="sync"), or TFCluster.reserve(..., num_ps=1) for '
                f"{consistency!r}"
            )
        from tfos.keras.fit.distribute import check_model
        from tfos.keras.step.attach import ATTACH_TIMEOUT_S
        from tfos.worker.own_shard import OwnShard

        check_model(model)
        self._own_shard = OwnShard(
            self._rank_group(),
            self._credentials,
            generation=self._identity.generation,
            open_storage=self._storages,
        )
        try:
            self._endpoints = self._own_shard.serve(*self._place, timeout_s=ATTACH_TIMEOUT_S)
        except CollectiveTimeout as error:
            late = ", ".join(self._workers[rank].node.name for rank in error.late)
            raise CollectiveTimeout(
                f"{self._name} has waited {ATTACH_TIMEOUT_S:g} s for {late} to call ctx.distribute("
                'model, consistency="sync"). Every worker must make this call; with '
                "MirroredStrategyRunner, model.fit() does. Check what that worker does first, and "
                "let all workers read or make their data in about the same time",
                error.late,
            ) from None
        self._on_own_shard()

    def check_used(self, what: str) -> None:
        """Refuse a training that does not use the cluster's servers.

        Args:
            what: the training, as the beginning of a sentence: "fit() trains this model".

        Raises:
            NotDistributed: there are servers, and this process has not asked for their client.
        """
        if self._leaves_tensorflow_out:
            raise NotDistributed(
                f"{what} on {self._name} alone: the other nodes run TensorFlow's servers, but "
                "main_fun has not built a strategy that uses them. Build strategy = "
                "tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver."
                "TFConfigClusterResolver()) first, or leave ps='tensorflow' out of reserve() and "
                "add the line model = ctx.distribute(model) after model.compile(...)"
            )
        if not self._leaves_servers_out:
            return
        raise NotDistributed(
            f"{what} on {self._name} alone: the cluster has {self.count} parameter "
            f"server{'s' if self.count > 1 else ''} and this worker does not use "
            f"{'them' if self.count > 1 else 'it'}, so each worker would train a model of its own "
            "on its part of the rows. Add the line model = ctx.distribute(model) between "
            "model.compile(...) and model.fit(...). If main_fun pushes itself, call "
            "ctx.ps_client() first. If every worker should train its own model, use num_ps=0"
        )

    def check_seeded(self, what: str) -> None:
        """Refuse what check_used refuses, unless another worker has seeded the servers.

        Args:
            what: as for `check_used`.

        Raises:
            NotDistributed: as for `check_used`.
        """
        is_empty = self._leaves_servers_out and self._are_empty()
        if is_empty or self._leaves_tensorflow_out:
            self.check_used(what)

    def finish(self, *, has_joined: bool = False) -> None:
        """Leave the training for good: barriers no longer wait for this worker.

        A worker that never used the servers also does this: the others' epochs wait for it.

        Args:
            has_joined: whether TensorFlow in this process has joined that of the other workers.
        """
        if self._tells_of_others and not has_joined and not self._endpoints:
            _logger.warning(
                "%s ends, but main_fun has not built a strategy in this process that joins the %d "
                "workers: whatever it trained is its own model. Build strategy = "
                "tf.distribute.MultiWorkerMirroredStrategy() and the model in its scope. Without "
                "use_custom_strategy=True, MirroredStrategyRunner distributes fit; without "
                "ps='tensorflow', ctx.distribute(model, consistency='sync') does",
                self._name,
                self._num_workers,
            )
        if self._leaves_tensorflow_out:
            _logger.warning(
                "%s ends, but main_fun has not built a strategy that uses TensorFlow's servers: "
                "whatever it trained is its own model. tf.distribute.ParameterServerStrategy uses "
                "them; without ps='tensorflow', ctx.distribute(model) trains on servers of tfos",
                self._name,
            )
        if not self._endpoints:
            self._tell_unsaved()
            return
        was_used = self._client is not None
        if not was_used and not self._is_fed and self._are_empty():
            _logger.warning(
                "%s ends, but no worker has put parameters on the cluster's servers: whatever it "
                "trained is its own model. Call ctx.distribute(model) after model.compile(...) to "
                "train one model together, or use num_ps=0 if you need no servers",
                self._name,
            )
        client = self.client()
        with self._lock:
            self._client = None
        try:
            client.finish()
        except Exception as error:
            if was_used:
                raise
            _logger.info("%s leaves without a message to the servers: %s", self._name, error)
        finally:
            client.close()
        if self._own_shard is not None:
            self._own_shard.end()

    def _tell_unsaved(self) -> None:
        """Say that the plan of checkpoints was for nothing: no servers, and no shards either."""
        plan = self._config.checkpoints
        if plan is None or not self._node.is_chief:
            return
        _logger.warning(
            "%s ends, and tfos has saved nothing in %s and restored nothing from there: with "
            "num_ps=0 both begin with ctx.distribute(model, consistency='sync'), which main_fun "
            "has not called. Call it after model.compile(...), use num_ps >= 1, or save in "
            "main_fun and leave checkpoints out of ClusterConfig",
            self._name,
            plan.directory,
        )

    @property
    def _leaves_servers_out(self) -> bool:
        return bool(self._endpoints) and self._client is None

    @property
    def _leaves_tensorflow_out(self) -> bool:
        return self._are_tensorflows and not is_connected_to_servers()

    def _are_empty(self) -> bool:
        from ps.protocol.permissions import ServerPhase

        try:
            with self.new_client() as client:
                return all(server.phase == ServerPhase.EMPTY for server in client.describe())
        except PSError as error:  # a lost server fails the cluster on its own
            _logger.info("%s does not know whether the servers were seeded: %s", self._name, error)
            return False
