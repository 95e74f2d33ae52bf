"""Worker process: accepts rows from the start, runs main_fun once the roster is there.

Covers: listening for feeders, the environment of main_fun, every end of main_fun, and the transfer
of its event files to a remote log directory.
Does not: read feeds (tfos.worker.feeds), save (tfos.worker.run_saves), exchange parameters (ps),
report to the driver (tfos.node.supervisor).
Runs in: a child of the supervisor; main_fun runs in the main thread.
Threads: `tfos-orders` carries out orders, those that wait on a short-lived thread each;
`tfos-progress` reports numbers; the listener has its own.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import msgspec

from feeding.errors import FeedClosed, FeedError
from feeding.protocol.messages import LIMITS
from rpc.auth.handshake import Identity, Role
from rpc.server.listener import Call, Listener
from tfos.collectives.offers import Offers
from tfos.console import missing_packages
from tfos.control import messages, return_values
from tfos.errors import NoResultError, RankLost, SettingsError
from tfos.native import legacy_keras
from tfos.native.collective import before_collective, may_follow_from_peer
from tfos.native.environment import after_strategy, announce_to_tensorflow, tf_config
from tfos.native.reserved_port import ReservedPort, wanted_port
from tfos.node import failure
from tfos.node.child_link import ChildLink, Progress, Raised, aside, start_order_thread
from tfos.node.child_log import start_log
from tfos.node.process_exit import forks_end, leave
from tfos.node.spec import ChildSpec
from tfos.topology import PS_ROLE
from tfos.worker import spark_files
from tfos.worker.context import NodeContext
from tfos.worker.feeds import FeedOrder, WorkerFeeds
from tfos.worker.import_ahead import (
    collector_paused,
    compiled_again,
    import_ahead,
    will_import,
)
from tfos.worker.reports.activity import WorkerActivity
from tfos.worker.reports.epoch_reports import EpochReports
from tfos.worker.reports.log_mirror import LogMirror
from tfos.worker.reports.progress_meter import ProgressMeter
from tfos.worker.run_saves import RunSaves

PROGRESS_S = 1.0
_MAX_MESSAGE_CHARS = 16_000
_MAX_TRACEBACK_CHARS = 128_000
_LAST_LOGS_S = 2.0
"""Seconds to send the event files of a training that failed or is stopped."""
_CAUSE_S = 2.0
"""Seconds for the failure of a lost rank to reach the driver before those that follow from it."""
_LAST_ANSWERS_S = 0.5
"""Seconds for feed tasks to receive the error of main_fun before the driver receives it."""

_logger = logging.getLogger(__name__)


class WorkerProcess:
    """One run of main_fun and everything around it.

    Args:
        spec: start document of the child.
        link: link to the supervisor.
    """

    def __init__(self, spec: ChildSpec, link: ChildLink[messages.Order]) -> None:
        self._spec = spec
        self._link = link
        bundle = spec.bundle
        self._credentials = bundle.data_credentials
        self._offers = Offers(bundle.node.rank)
        self._listener = Listener(
            self._answer,
            self._credentials,
            Identity(Role.WORKER, bundle.node.rank, spec.attempt),
            on_connect=self._offers.connected,
            on_disconnect=self._disconnected,
            limits=LIMITS,
        )
        self._roster: tuple[messages.RosterEntry, ...] = ()
        self._started = threading.Event()
        self._stop: messages.Stop | None = None
        self._stopped = threading.Event()
        self._meter = ProgressMeter()
        self._feeds = WorkerFeeds(spec, link.send, self._meter, self._stopped)
        self._activity = WorkerActivity(
            lambda phase: link.send(messages.PhaseChanged(phase)), self._meter.read
        )
        self._in_user_code = self._in_collective = False
        self._epochs = EpochReports(link.send)
        self._saves = RunSaves(bundle.settings, self._feeds.trained, self._epochs, link.send)
        self._reserved_port: ReservedPort | None = None
        self._places = threading.Lock()
        """Lock held while the endpoints of nodes change, or become those of `ctx`."""
        self._context: NodeContext | None = None
        self._joining: messages.Joining | None = None
        """Place where this worker joins others that train; None: all begin together."""
        self._training_stop = ""
        """Reason why main_fun was asked to stop training; empty: it was not."""

    def run(self) -> int:
        """Serve, wait for the roster, run main_fun; returns the exit code."""
        self._listener.bind_tcp(self._spec.executor.host)
        self._listener.bind_unix(self._spec.socket_dir)
        self._listener.start()
        start_order_thread(self._link, self._carry_out)
        threading.Thread(target=self._report_progress, name="tfos-progress", daemon=True).start()
        self._activity.enter("importing")
        legacy_keras.follow(os.environ, self._spec.bundle.settings.legacy_keras)
        if not self._spec.bundle.node.is_evaluator:  # it does not train
            before_collective(self._joins_collective)
        if self._spec.bundle.node.is_chief and self._spec.bundle.settings.has_tensorflow_servers:
            after_strategy(lambda: self._link.send(messages.StrategyBuilt()))
        try:
            # Before the node counts as ready: a module that is missing here fails the start.
            with collector_paused():
                main_fun, args = cloudpickle.loads(self._spec.bundle.main_fun)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the driver must read it
            return self._raised(error)
        self._reserved_port = ReservedPort(wanted_port(os.environ))
        self._link.send(messages.Listening(self._listener.endpoint, self._reserved_port.port))
        try:
            self._import_for(main_fun, args)
        except BaseException as error:  # noqa: BLE001 - an interrupt, when the node is stopped
            return self._raised(error)
        self._activity.enter("waiting for roster")
        self._started.wait()
        if self._stop is not None:
            return 0
        return self._run_main_fun(main_fun, args)

    def close(self) -> None:
        """Stop listening and release every wait for a feed or a rank."""
        self._feeds.channel.close()
        self._offers.end("has ended")
        if self._reserved_port is not None:
            self._reserved_port.release()
        self._listener.finish_calls(_LAST_ANSWERS_S)
        self._listener.close(timeout_s=1.0)

    def _answer(self, call: Call) -> None:
        """Answer feeders, and the ranks of collective calls; both refuse everybody else."""
        if call.peer.role is Role.WORKER:
            self._offers.handle(call)
        else:
            self._feeds.channel.handler(call)

    def _disconnected(self, peer: Identity) -> None:
        self._offers.disconnected(peer)
        self._feeds.channel.on_disconnect(peer)

    def _import_for(self, main_fun: Callable[[Any, Any], Any], args: Any) -> None:
        """Import what main_fun imports first; rows arrive and other nodes start meanwhile."""
        names = will_import(main_fun, args)
        if names:
            # Only the chief warns: the others' environment is the same.
            if self._spec.bundle.node.is_chief and (advice := compiled_again(names)):
                _logger.warning("%s", advice)
            self._activity.enter(f"importing {' and '.join(names)}")
            self._call(lambda: import_ahead(names))

    def _run_main_fun(self, main_fun: Callable[[Any, Any], Any], args: Any) -> int:
        with self._places:
            context = self._context = self._make_context()
        mirror: LogMirror | None = None
        try:
            self._prepare_environment(context)
            with contextlib.suppress(OSError):  # whatever writes there gets the error
                os.makedirs(context.log_dir, exist_ok=True)
            mirror = self._mirror_logs(context.cluster_log_dir)
            sys.argv = list(args) if isinstance(args, list) else [self._spec.bundle.name]
            self._saves.begin(context)
            self._activity.enter("main_fun")
            returned = _as_message(self._call(lambda: main_fun(args, context)))
            self._activity.enter("finishing")
            saver = self._saves.end()
            self._feeds.channel.drain()
            trained_rows = self._feeds.channel.train_rows()
            if trained_rows:
                context.servers.check_seeded(f"main_fun has taken {trained_rows} rows of train()")
            self._feeds.trained.end()
            if saver is not None:
                self._feeds.trained.closed(self._saves.close(saver))
            context.servers.finish(has_joined=self._in_collective)
            self._activity.enter("sending the output")
            context.send_output()
            if mirror is not None:
                mirror.close(self._spec.bundle.settings.config.abort_s)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the driver must read it
            code = self._raised(error)
            if mirror is not None:
                mirror.close(_LAST_LOGS_S)
            return code
        self._send_progress()
        value_fd = self._spec.value_fd
        self._link.send(
            msgspec.structs.replace(
                returned,
                feeds=self._feeds.counts(),
                progress=self._meter.read(),
                hands_over=value_fd >= 0 and os.fstat(value_fd).st_size > 0,
            )
        )
        if self._spec.bundle.settings.feeds:
            self._stopped.wait()  # feeders may still connect; their rows are counted as dropped
        return 0

    def _shard_served(self, context: NodeContext) -> None:
        """Note that the workers serve the parameters themselves from now on."""
        self._link.send(messages.ServesShard())
        self._saves.begin_late(context)

    def _joins_collective(self, num_workers: int) -> None:
        """Note that TensorFlow here waits for all workers of its strategy from now on."""
        if not self._in_collective:
            self._in_collective = True
            self._link.send(messages.InCollective(num_workers))

    def _call(self, user_code: Callable[[], Any]) -> Any:
        self._in_user_code = True
        try:
            with forks_end():
                return user_code()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
            return None
        finally:
            self._in_user_code = False

    def _raised(self, error: BaseException) -> int:
        if self._stop is not None and isinstance(error, KeyboardInterrupt | FeedClosed):
            _logger.info("main_fun was interrupted: %s", self._stop.reason)
            return 0
        is_in_collective = self._in_collective and may_follow_from_peer(error)
        if isinstance(error, RankLost) or is_in_collective:
            self._stopped.wait(_CAUSE_S)
        name = failure.type_name(error)
        ours = frozenset({__file__, cloudpickle.__file__})
        text = failure.user_traceback(error, ours)[-_MAX_TRACEBACK_CHARS:]
        message = failure.text_of(error)[:_MAX_MESSAGE_CHARS]
        message += legacy_keras.advice(error) or missing_packages.advice(f"{name}: {message}")
        self._feeds.channel.fail(message, error_type=name, remote_traceback=text)
        with contextlib.suppress(Exception):  # main_fun may have closed or replaced it
            sys.stderr.write(text)
            sys.stderr.flush()
        self._link.send(Raised(name, message, text))
        return 1

    def _carry_out(self, order: messages.Order) -> None:
        if isinstance(order, FeedOrder):
            self._feeds.carry_out(order)
            return
        match order:  # servers act on the other orders
            case messages.Start():
                self._begin(order)
            case messages.ServerMoved():
                self._server_moved(order)
            case messages.SaveNow():
                aside(self._saves.save_now, order)
            case messages.StopTraining():
                self._ask_to_stop(order)
            case messages.Stop():
                self._begin_stop(order)

    def _begin(self, order: messages.Start) -> None:
        """Learn where the other nodes are, and where this worker begins among them."""
        self._roster, self._joining = order.roster, order.joining
        for feed, epoch in order.joining.feeds if order.joining is not None else ():
            self._feeds.channel.begin_at(feed, epoch)
        self._started.set()

    def _server_moved(self, order: messages.ServerMoved) -> None:
        rank, endpoint = order.rank, order.endpoint
        _logger.warning("ps:%d was restarted and is at %s now", rank, endpoint)
        with self._places:
            self._roster = tuple(
                msgspec.structs.replace(entry, endpoint=endpoint)
                if (entry.node.role, entry.rank) == (PS_ROLE, rank)
                else entry
                for entry in self._roster
            )
            if self._context is not None:
                self._context.servers.moved(rank, endpoint)

    def _ask_to_stop(self, order: messages.StopTraining) -> None:
        """Note that main_fun has to stop training; it goes on until it asks."""
        if not self._spec.bundle.node.is_evaluator:  # for it this is the normal end
            _logger.warning("the training was asked to stop: %s", order.reason)
        self._training_stop = order.reason

    def _begin_stop(self, stop: messages.Stop) -> None:
        """Stop main_fun: close its feeds, then interrupt it; the supervisor kills it last."""
        if self._stop is not None:
            return
        self._stop = stop
        self._started.set()
        self._stopped.set()
        self._feeds.channel.close(stop.reason)
        timer = threading.Timer(stop.grace_s / 2, self._interrupt)
        timer.daemon = True
        timer.start()

    def _interrupt(self) -> None:
        main_thread = threading.main_thread().ident
        if self._in_user_code and main_thread is not None:
            # A signal, unlike a Python exception, also ends a blocking system call.
            signal.pthread_kill(main_thread, signal.SIGINT)

    def _report_progress(self) -> None:
        while not self._stopped.wait(PROGRESS_S):
            self._activity.look()
            self._send_progress()

    def _send_progress(self) -> None:
        self._link.send(Progress(self._meter.read(), self._feeds.counts()))

    def _make_context(self) -> NodeContext:
        return NodeContext(
            self._spec,
            self._roster,
            feeds=self._feeds,
            credentials=self._credentials,
            on_progress=self._meter.note,
            epochs=self._epochs,
            offers=self._offers,
            on_shard=self._shard_served,
            reserved_port=self._reserved_port,
            stop_asked=lambda: bool(self._training_stop),
            joining=self._joining,
        )

    def _mirror_logs(self, directory: str) -> LogMirror | None:
        """Begin to send event files to the log directory, unless they are written there."""
        board = self._spec.bundle.settings.tensorboard
        url = board.log_dir
        if "://" not in url or url.startswith("file://"):
            return None
        try:
            fetches = board.is_wanted and self._spec.bundle.node.is_chief  # its host shows them
            mirror = LogMirror(directory, url, fetches=fetches)
        except (FeedError, OSError) as error:
            _logger.warning("no log files in %s: %s; training goes on", url, error)
            return None
        mirror.start()
        return mirror

    def _prepare_environment(self, context: NodeContext) -> None:
        on_tensorflow = self._spec.bundle.settings.has_tensorflow_servers
        announce_to_tensorflow(
            os.environ, context.cluster_spec, has_tensorflow_servers=on_tensorflow
        )
        os.environ["TF_CONFIG"] = tf_config(
            context.cluster_spec,
            context.job_name,
            context.task_index,
            has_tensorflow_servers=on_tensorflow,
        )


def main(body: bytes) -> None:
    """Run the worker that this document describes; the process ends with main_fun's exit code."""
    spec = msgspec.msgpack.decode(body, type=ChildSpec)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start_log()
    spark_files.announce(spec.executor.spark_files)
    link: ChildLink[messages.Order] = ChildLink(socket.socket(fileno=spec.link_fd), messages.Order)
    worker = WorkerProcess(spec, link)
    try:
        exit_code = worker.run()
    except BaseException as error:  # noqa: BLE001 - e.g. the port cannot be bound
        text = failure.user_traceback(error, frozenset())
        message = failure.text_of(error)[:_MAX_MESSAGE_CHARS]
        link.send(Raised(failure.type_name(error), message, text))
        exit_code = 1
    worker.close()
    leave(exit_code)


def _as_message(returned: Any) -> messages.Done:
    """Return the report of what main_fun returned; a value that cannot travel is not a failure."""
    if inspect.iscoroutine(returned):  # of a decorated `async def`, which start() cannot tell
        returned.close()
        raise SettingsError(
            f"main_fun returned the coroutine {returned.__qualname__}(), none of whose lines has "
            "run. Use a plain function; one that calls asyncio.run() may await."
        )
    try:
        return messages.Done(result=return_values.encode(returned))
    except NoResultError as error:
        return messages.Done(no_result=str(error))
