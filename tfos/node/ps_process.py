"""PS process of a node: one shard under the supervisor's orders.

Covers: binding, reporting its address, counters for the heartbeat, losing workers, stopping.
Does not: hold or update parameters (ps.server), unpickle anything.
Runs in: a child of the supervisor; never imports tensorflow, keras or pyspark.
Threads: `tfos-orders` carries out orders; the main thread reports and waits for the end.
"""

from __future__ import annotations

import logging
import socket
import time

import msgspec

from ps.checkpoint.restore import RestoreOptions
from ps.collector import StartFreeze
from ps.manifest.manifest import WorkerRank
from ps.server.loss_report import LossReport
from ps.server.server import PSServer, ServerSettings
from tfos.control import messages
from tfos.files.checkpoint_storage import Storages
from tfos.node.child_link import ChildLink, Progress, start_order_thread
from tfos.node.server_main import run_server
from tfos.node.spec import ChildSpec

PROGRESS_S = 1.0
CLOSE_TIMEOUT_S = 1.0

_logger = logging.getLogger(__name__)


class ServerProcess:
    """One parameter server between its supervisor and its clients.

    Args:
        spec: the child's document.
        link: to the supervisor.
    """

    def __init__(self, spec: ChildSpec, link: ChildLink[messages.Order]) -> None:
        self._spec = spec
        self._link = link
        bundle = spec.bundle
        settings = ServerSettings(
            rank=bundle.node.rank,
            num_servers=bundle.settings.num_ps,
            num_workers=bundle.settings.num_workers,
            # The barrier goes on with those that are there until the new attempt joins.
            on_lost="continue" if bundle.settings.config.restarts.workers else "fail",
        )
        credentials = bundle.data_credentials
        generation = (spec.attempt << 16) + spec.restart
        storages = Storages(spec.executor.scratch_dir)
        self._server = PSServer(settings, credentials, generation=generation, open_storage=storages)
        self._losses = LossReport()
        self._freeze = StartFreeze()

    def run(self) -> None:
        """Serve until the supervisor or a permitted client stops the server."""
        with self._server:
            self._listen()
            if self._spec.restart or self._spec.attempt:
                self._restore()
            else:
                self._server.start()
                self._tell_address()
            self._link.send(messages.PhaseChanged("serving"))
            start_order_thread(self._link, self._carry_out)
            while not self._server.wait_stopped(PROGRESS_S):
                self._freeze.poll(self._server.phase)
                self._send_progress()
        self._send_progress()
        self._link.send(messages.Done())

    def _listen(self) -> None:
        if self._spec.listen_fds:
            tcp, unix = (socket.socket(fileno=fd) for fd in self._spec.listen_fds)
            self._server.adopt(tcp, unix)
        else:
            self._server.bind_tcp(self._spec.executor.host)
            self._server.bind_unix(self._spec.socket_dir)

    def _tell_address(self) -> None:
        self._link.send(messages.Listening(self._server.endpoint))

    def _tell_restore(self) -> None:
        self._tell_address()
        self._link.send(messages.PhaseChanged("restoring"))

    def _restore(self) -> None:
        """Listen, and restore this run's last checkpoint; another run's checkpoint does not count.

        Workers hear where it listens before it is filled: they wait longer for a server that
        answers than for one that does not.
        """
        plan = self._spec.bundle.settings.config.checkpoints
        directory = plan.directory if plan is not None else ""
        step = self._server.start_restoring(
            directory,
            like=RestoreOptions(job=self._spec.bundle.settings.cluster_id),
            listening=self._tell_restore,
        )
        _logger.warning("%s resumes from step %d of %s", self._server, step, directory)

    def _send_progress(self) -> None:
        stats = self._server.stats()
        self._link.send(Progress({}, stats=msgspec.msgpack.encode(stats)))
        lost = self._losses.poll(stats, time.monotonic())
        if lost:
            self._link.send(messages.UpdatesLost(lost))

    def _carry_out(self, order: messages.Order) -> None:
        match order:
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


def main(body: bytes) -> None:
    """Run the parameter server that this document describes."""
    run_server(body, ServerProcess)
