"""PS process of a node: one shard under the supervisor's orders.

Covers: binding, reporting its address, counters for the heartbeat, losing workers, stopping.
Does not: hold or update parameters (ps.server), unpickle anything.
Runs in: a child of the supervisor; never imports tensorflow, keras or pyspark.
Threads: `tfos-orders` carries out orders; the main thread reports and waits for the end, also while
`ps-restore` (ps.server.server) fills a restarted server.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import time
from collections.abc import Callable

import msgspec

from ps.checkpoint.choice import RestoreOptions
from ps.collector import StartFreeze
from ps.errors import CheckpointError
from ps.manifest.manifest import WorkerRank
from ps.protocol.permissions import ServerPhase
from ps.server.loss_report import LossReport
from ps.server.server import PSServer, ServerSettings
from ps.stats.server_stats import ServerStats
from tfos.config import ClusterConfig
from tfos.control import messages
from tfos.files.checkpoint_storage import Storages
from tfos.node.child_link import ChildLink, HasBegun, Progress, ToServer, start_order_thread
from tfos.node.server_main import run_server
from tfos.node.spec import ChildSpec

PROGRESS_S = 1.0
_STOP_LOOK_S = 0.1
"""How often a server that waits to know whether it restores checks for a stop."""
CLOSE_TIMEOUT_S = 1.0

_logger = logging.getLogger(__name__)


class ServerProcess:
    """One parameter server between its supervisor and its clients.

    Args:
        spec: the child's document.
        link: link to the supervisor.
    """

    def __init__(self, spec: ChildSpec, link: ChildLink[ToServer]) -> None:
        self._spec = spec
        self._link = link
        bundle = spec.bundle
        settings = ServerSettings(
            rank=bundle.node.rank,
            num_servers=bundle.settings.num_ps,
            num_workers=bundle.settings.num_workers,
            on_lost="continue" if _others_go_on(bundle.settings.config) else "fail",
        )
        credentials = bundle.data_credentials
        generation = (spec.attempt << 16) + spec.restart
        storages = Storages(spec.executor.scratch_dir)
        self._server = PSServer(settings, credentials, generation=generation, open_storage=storages)
        self._losses = LossReport()
        self._freeze = StartFreeze()
        self._begun: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run(self) -> None:
        """Serve until the supervisor or a permitted client stops the server."""
        with self._server:
            self._listen()
            # Before it is filled: it must know who is fenced when it serves, and may have to stop.
            start_order_thread(self._link, self._carry_out)
            if (self._spec.restart or self._spec.attempt) and self._has_begun():
                self._server.restore_beside(self._restore)
            elif not self._server.wait_stopped(0.0):
                self._begin()
            if not self._server.wait_stopped(0.0):
                self._link.send(messages.PhaseChanged("serving"))
            while not self._server.wait_stopped(PROGRESS_S):
                self._freeze.poll(self._server.phase)
                self._send_progress(self._losses.poll)
        self._send_progress(lambda stats, _: self._losses.last(stats))
        self._link.send(messages.Done())

    def _listen(self) -> None:
        if self._spec.listen_fds:
            tcp, unix = (socket.socket(fileno=fd) for fd in self._spec.listen_fds)
            self._server.adopt(tcp, unix)
        else:
            self._server.bind_tcp(self._spec.executor.host)
            self._server.bind_unix(self._spec.socket_dir)

    def _begin(self) -> None:
        """Listen, and report where, unless a stop comes first."""
        try:
            self._server.start()
        except Exception:
            if not self._server.wait_stopped(0.0):
                raise
            return  # the stop has closed its sockets
        self._tell_address()

    def _tell_address(self) -> None:
        self._link.send(messages.Listening(self._server.endpoint))

    def _tell_restore(self) -> None:
        self._tell_address()
        self._link.send(messages.PhaseChanged("restoring"))

    def _has_begun(self) -> bool:
        """Wait for the supervisor's word whether the cluster has begun; False on a stop.

        Before that nothing was trained, so a server that was started again begins as the first.
        """
        while not self._server.wait_stopped(0.0):
            with contextlib.suppress(queue.Empty):
                return self._begun.get(timeout=_STOP_LOOK_S)
        return False

    def _restore(self) -> None:
        """Listen, and restore this run's last checkpoint; another run's checkpoint does not count.

        Workers hear where it listens before it is filled: they wait longer for a server that
        answers than for one that does not.

        Raises:
            CheckpointError: the cluster has no checkpoints, or `start_restoring` raises it.
        """
        bundle = self._spec.bundle
        plan = bundle.settings.config.checkpoints
        if plan is None:  # Spark repeats a task whatever the cluster can use
            raise CheckpointError(
                f"{bundle.name} was started again (attempt {self._spec.attempt}): the parameters "
                "of its last attempt are lost, and the cluster has no checkpoints to go on "
                "from. Set ClusterConfig(checkpoints=...), from which a server goes on, and start "
                "the cluster again"
            )
        step = self._server.start_restoring(
            plan.directory,
            like=RestoreOptions(job=bundle.settings.cluster_id),
            listening=self._tell_restore,
        )
        age_s = self._server.stats().lost_s
        resumes = "%s resumes from step %d of %s, as it was %.0f s ago"
        _logger.warning(resumes, self._server, step, plan.directory, age_s)
        if self._server.skipped_step >= 0:
            told = _older(self._server, step, plan.directory)
            self._link.send(messages.UpdatesLost(told))

    def _send_progress(self, losses: Callable[[ServerStats, float], str]) -> None:
        stats = self._server.stats()
        self._link.send(Progress({}, stats=msgspec.msgpack.encode(stats)))
        lost = losses(stats, time.monotonic())
        if lost:
            self._link.send(messages.UpdatesLost(lost))

    def _carry_out(self, order: ToServer) -> None:
        try:
            self._follow(order)
        except Exception:
            # The barrier that the order has completed failed, and waiting workers get the reason.
            if self._server.phase is not ServerPhase.FAILED:
                raise

    def _follow(self, order: ToServer) -> None:
        match order:
            case HasBegun(yes):
                self._begun.put(yes)
            case messages.FenceWorker(rank=rank, generation=generation, reason=reason):
                _logger.info("worker rank %d, attempt %d is lost: %s", rank, generation, reason)
                self._server.worker_lost(WorkerRank(rank), generation)
            case messages.WorkerDone(rank=rank):
                self._server.worker_done(WorkerRank(rank))
            case messages.Stop(reason=reason):
                _logger.info("stopping: %s", reason)
                self._server.close(CLOSE_TIMEOUT_S)
            case _:
                pass  # the roster and the feeds are the workers'


def _others_go_on(config: ClusterConfig) -> bool:
    """Whether a barrier goes on without a lost worker: for good, or until its new attempt joins."""
    return config.restarts.workers > 0 or config.tolerate_lost_workers


def main(body: bytes) -> None:
    """Run the parameter server that this document describes."""
    run_server(body, ServerProcess)


def _older(server: PSServer, step: int, directory: str) -> str:
    """Return what the driver hears of a server that could not take the newest step."""
    return (
        f"{server}: it goes on from step {step}, as its part of step {server.skipped_step} is "
        "damaged. Servers that were lost with it go on from their own newest undamaged "
        "step, so the parameters may be of several steps from here on. To go back to one, "
        f"end the job, remove the steps above {step} from {directory}, and run it again with "
        "Checkpoints(resume=True)"
    )
