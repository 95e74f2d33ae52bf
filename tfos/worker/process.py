"""Worker process: accepts rows from the start, runs main_fun once the roster is there.

Covers: listening for feeders, the environment of main_fun, every end of main_fun, and the transfer
of its event files to a remote log directory.
Does not: feed or batch (feeding), exchange parameters (ps), report to the driver
(tfos.node.supervisor).
Runs in: a child of the supervisor; main_fun runs in the main thread.
Threads: `tfos-orders` carries out orders, `tfos-progress` reports numbers, one short-lived thread
per flush waits for its epoch to be consumed, and one per order about a micro-batch for a save; the
listener has its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec

from feeding.config import FeedConfig
from feeding.errors import FeedClosed, FeedError
from feeding.receiver.channel import FeedChannel
from feeding.receiver.feed_queue import FeedStats
from rpc.auth.handshake import Identity, Role
from rpc.server.listener import Call, Listener
from tfos.collectives.offers import Offers
from tfos.console.printable import visible
from tfos.control import messages, return_values
from tfos.errors import NoResultError, RankLost
from tfos.native import legacy_keras
from tfos.native.collective import before_collective, may_follow_from_peer
from tfos.native.environment import announce_to_tensorflow, tf_config
from tfos.native.reserved_port import ReservedPort, wanted_port
from tfos.node import failure
from tfos.node.child_link import ChildLink, Progress, Raised, start_order_thread
from tfos.node.child_log import start_log
from tfos.node.process_exit import leave
from tfos.node.spec import ChildSpec
from tfos.node.supervisor.row_marks import RowMarks
from tfos.topology import PS_ROLE
from tfos.worker import spark_files
from tfos.worker.activity import WorkerActivity
from tfos.worker.context import NodeContext
from tfos.worker.epoch_reports import EpochReports
from tfos.worker.import_ahead import (
    collector_paused,
    compiled_again,
    import_ahead,
    will_import,
)
from tfos.worker.log_mirror import LogMirror
from tfos.worker.progress_meter import ProgressMeter
from tfos.worker.trained_feeds import TrainedFeeds

if TYPE_CHECKING:
    from tfos.worker.saver import ChiefSaver

PROGRESS_S = 1.0
_MAX_MESSAGE_CHARS = 16_000
_MAX_TRACEBACK_CHARS = 128_000
_MAX_SAVED_CHARS = 2000
_FLUSH_WAIT_S = 60.0
_LAST_LOGS_S = 2.0
"""For event files of a training that failed or is stopped."""
_CAUSE_S = 2.0
"""Seconds for the failure of a lost rank to reach the driver before those that follow from it."""
_LAST_ANSWERS_S = 0.5
"""Seconds for feed tasks to receive the error of main_fun, before the driver receives the
failure."""

_logger = logging.getLogger(__name__)


class WorkerProcess:
    """One run of main_fun and everything around it.

    Args:
        spec: the child's document.
        link: to the supervisor.
    """

    def __init__(self, spec: ChildSpec, link: ChildLink[messages.Order]) -> None:
        self._spec = spec
        self._link = link
        bundle = spec.bundle
        self._credentials = bundle.data_credentials
        self._channel = FeedChannel(
            FeedConfig(max_inflight_bytes=bundle.settings.config.max_inflight_bytes),
            worker=bundle.name,
            on_rows=(
                RowMarks(spec.rows_fd, bundle.settings.feeds).note if spec.rows_fd >= 0 else None
            ),
        )
        self._offers = Offers(bundle.node.rank)
        self._listener = Listener(
            self._answer,
            self._credentials,
            Identity(Role.WORKER, bundle.node.rank, spec.attempt),
            on_disconnect=self._disconnected,
        )
        self._roster: tuple[messages.RosterEntry, ...] = ()
        self._started = threading.Event()
        self._stop: messages.Stop | None = None
        self._stopped = threading.Event()
        self._meter = ProgressMeter()
        self._activity = WorkerActivity(
            lambda phase: link.send(messages.PhaseChanged(phase)), self._meter.read
        )
        self._in_user_code = self._in_collective = False
        self._trained_feeds = TrainedFeeds(link.send)
        self._epochs = EpochReports(link.send)
        self._reserved_port: ReservedPort | None = None
        self._saver: ChiefSaver | None = None
        """While main_fun runs, on the chief of a cluster that saves."""
        self._places = threading.Lock()
        """Held while the places of nodes change, or become those of `ctx`."""
        self._context: NodeContext | None = None
        self._joining: messages.Joining | None = None
        """Where this worker begins among others that train; None: all begin together."""
        self._training_stop = ""
        """Why main_fun is asked to train no further; empty: it is not."""

    def run(self) -> int:
        """Serve, wait for the roster, run main_fun; returns the exit code."""
        self._listener.bind_tcp(self._spec.executor.host)
        self._listener.bind_unix(self._spec.socket_dir)
        self._listener.start()
        start_order_thread(self._link, self._carry_out)
        threading.Thread(target=self._report_progress, name="tfos-progress", daemon=True).start()
        self._activity.enter("importing")
        legacy_keras.follow(os.environ, self._spec.bundle.settings.legacy_keras)
        if not self._spec.bundle.node.is_evaluator:  # it stands beside the training
            before_collective(self._joins_collective)
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
        self._channel.close()
        self._offers.end("has ended")
        if self._reserved_port is not None:
            self._reserved_port.release()
        self._listener.finish_calls(_LAST_ANSWERS_S)
        self._listener.close(timeout_s=1.0)

    def _answer(self, call: Call) -> None:
        """Answer feeders, and the ranks of collective calls; either refuses everybody else."""
        if call.peer.role is Role.WORKER:
            self._offers.handle(call)
        else:
            self._channel.handler(call)

    def _disconnected(self, peer: Identity) -> None:
        self._offers.disconnected(peer)
        self._channel.on_disconnect(peer)

    def _import_for(self, main_fun: Callable[[Any, Any], Any], args: Any) -> None:
        """Begin with what main_fun begins with; rows arrive and other nodes start meanwhile."""
        names = will_import(main_fun, args)
        if names:
            # Of the chief alone: the others' environment is the same.
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
            with contextlib.suppress(OSError):  # who writes there is told
                os.makedirs(context.log_dir, exist_ok=True)
            mirror = self._mirror_logs(context.cluster_log_dir)
            sys.argv = list(args) if isinstance(args, list) else [self._spec.bundle.name]
            self._begin_saving(context)
            if context.is_chief and self._spec.bundle.settings.feeds:
                joins = self._joining is not None
                resumes = context.resumes_epochs
                client = context.ps_client
                self._trained_feeds.begin(self._saver, client, joins=joins, resumes=resumes)
            self._activity.enter("main_fun")
            returned = _as_message(self._call(lambda: main_fun(args, context)))
            self._activity.enter("finishing")
            saver, self._saver = self._saver, None  # from here on nobody asks it for another save
            self._channel.drain()
            trained_rows = self._channel.train_rows()
            if trained_rows:
                context.check_servers_seeded(f"main_fun has taken {trained_rows} rows of train()")
            self._trained_feeds.end()
            if saver is not None:
                saver.close()
            context.finish()
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
        self._link.send(
            msgspec.structs.replace(returned, feeds=self._feeds(), progress=self._meter.read())
        )
        if self._spec.bundle.settings.feeds:
            self._stopped.wait()  # feeders may still connect; their rows are counted as dropped
        return 0

    def _begin_saving(self, context: NodeContext) -> None:
        """Save, and resume, by the user's plan; nothing on workers that do not save."""
        self._saver = context.saver()
        if self._saver is not None:
            self._saver.start()
            self._keep_best(self._saver)

    def _shard_served(self, context: NodeContext) -> None:
        """The workers serve the parameters themselves from now on."""
        self._link.send(messages.ServesShard())
        self._begin_saving(context)
        if self._saver is not None and self._spec.bundle.settings.feeds:
            self._trained_feeds.begin_late(self._saver, context.ps_client)
            if context.resumes_rate and self._saver.restored_step is not None:
                _logger.warning(
                    "this run goes on from step %d with num_ps=0, where nothing tells in time "
                    "which epochs that run had trained: every epoch that is fed is trained. Feed "
                    "those that are left, or use num_ps >= 1, which leaves the others out",
                    self._saver.restored_step,
                )
        if context.is_chief and self._spec.bundle.settings.config.save_on_interrupt:
            _logger.warning(
                "save_on_interrupt=%r saves nothing with num_ps=0: the shards end with their "
                "workers. Checkpoints(every_s=...) saves while they train",
                self._spec.bundle.settings.config.save_on_interrupt,
            )

    def _joins_collective(self) -> None:
        """TensorFlow here will wait for every other worker from now on."""
        if not self._in_collective:
            self._in_collective = True
            self._link.send(messages.InCollective())

    def _keep_best(self, saver: ChiefSaver) -> None:
        plan = self._spec.bundle.settings.config.checkpoints
        if plan is not None and plan.keep_best is not None:
            from tfos.worker.best_checkpoint import BestKeeper  # with it the client that saves

            self._epochs.keep_best(BestKeeper(plan, saver))

    def _call(self, user_code: Callable[[], Any]) -> Any:
        self._in_user_code = True
        try:
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
        message = failure.text_of(error)[:_MAX_MESSAGE_CHARS] + legacy_keras.advice(error)
        self._channel.fail(message, error_type=name, remote_traceback=text)
        sys.stderr.write(text)
        sys.stderr.flush()
        self._link.send(Raised(name, message, text))
        return 1

    def _carry_out(self, order: messages.Order) -> None:
        match order:  # what is not here, servers act on
            case messages.Start() | messages.ServerMoved():
                self._take_places(order)
            case messages.Flush():
                self._flush(order)
            case messages.TrainBatch() | messages.LeaveBatch() | messages.SaveBatches():
                self._take_batch(order)
            case messages.FeedAgain(feed=feed, epoch=epoch):
                self._channel.feed_again(feed, epoch)
            case messages.FinishFeed(feed=feed):
                self._channel.finish(feed)
            case messages.SaveNow() | messages.StopTraining():
                self._heed(order)
            case messages.Stop():
                self._begin_stop(order)

    def _take_batch(
        self, order: messages.TrainBatch | messages.LeaveBatch | messages.SaveBatches
    ) -> None:
        """Carry out an order about micro-batches."""
        match order:
            case messages.TrainBatch():
                _aside(self._trained_feeds.expect, order)
            case messages.LeaveBatch():
                # Not aside: the Flush behind it must not find the batch.
                if self._trained_feeds.leave(order):
                    _aside(self._trained_feeds.release)
            case messages.SaveBatches():
                _aside(self._trained_feeds.save, order)

    def _flush(self, order: messages.Flush) -> None:
        """End an epoch after the rows that were accepted."""
        feed, epoch = order.feed, order.epoch
        if order.counts:  # before its rows end
            self._trained_feeds.count(feed, epoch)
        self._channel.flush(feed, epoch, order.validation, order.rounds)
        _aside(self._await_flush, feed, epoch)

    def _take_places(self, order: messages.Start | messages.ServerMoved) -> None:
        """Learn where the other nodes are, and where among them this worker begins."""
        if isinstance(order, messages.ServerMoved):
            self._server_moved(order)
            return
        self._roster, self._joining = order.roster, order.joining
        for feed, epoch in order.joining.feeds if order.joining is not None else ():
            self._channel.begin_at(feed, epoch)
        self._started.set()

    def _server_moved(self, order: messages.ServerMoved) -> None:
        rank, endpoint = order.rank, order.endpoint
        _logger.warning("ps:%d was started again and is at %s now", rank, endpoint)
        with self._places:
            self._roster = tuple(
                msgspec.structs.replace(entry, endpoint=endpoint)
                if (entry.node.role, entry.rank) == (PS_ROLE, rank)
                else entry
                for entry in self._roster
            )
            if self._context is not None:
                self._context.server_moved(rank, endpoint)

    def _heed(self, wish: messages.SaveNow | messages.StopTraining) -> None:
        """Do what somebody outside asks for; main_fun goes on."""
        if isinstance(wish, messages.SaveNow):
            _aside(self._save_now, wish)
            return
        if not self._spec.bundle.node.is_evaluator:  # there it is the order of things
            _logger.warning("the training is asked to stop: %s", wish.reason)
        self._training_stop = wish.reason

    def _save_now(self, order: messages.SaveNow) -> None:
        saver, path, step = self._saver, "", -1
        if saver is None:
            error = "main_fun does not run on the chief"
        elif not (error := saver.save_between()):
            path, step = saver.place()
        error, path = (visible(text, keep="")[:_MAX_SAVED_CHARS] for text in (error, path))
        self._link.send(messages.SavedNow(order.number, path, step, error))

    def _begin_stop(self, stop: messages.Stop) -> None:
        """Stop main_fun: close its feeds, then interrupt it; the supervisor kills it last."""
        if self._stop is not None:
            return
        self._stop = stop
        self._started.set()
        self._stopped.set()
        self._channel.close(stop.reason)
        timer = threading.Timer(stop.grace_s / 2, self._interrupt)
        timer.daemon = True
        timer.start()

    def _interrupt(self) -> None:
        main_thread = threading.main_thread().ident
        if self._in_user_code and main_thread is not None:
            # A signal, unlike an exception from Python, also ends a system call that blocks.
            signal.pthread_kill(main_thread, signal.SIGINT)

    def _await_flush(self, feed: str, epoch: int) -> None:
        try:
            while not self._channel.wait_flushed(feed, epoch, _FLUSH_WAIT_S):
                if self._stopped.is_set():
                    return
            stats = _snapshot(self._channel.stats(feed))
        except FeedError:
            return  # the channel ended; the failure record carries the reason
        numbers = self._meter.read()
        self._meter.end_epoch()
        self._link.send(messages.FlushReached(feed, epoch, stats, numbers))
        self._trained_feeds.flushed(feed, epoch)

    def _report_progress(self) -> None:
        while not self._stopped.wait(PROGRESS_S):
            self._activity.look()
            self._send_progress()

    def _send_progress(self) -> None:
        self._link.send(Progress(self._meter.read(), self._feeds()))

    def _feeds(self) -> tuple[messages.FeedSnapshot, ...]:
        return tuple(_snapshot(stats) for stats in self._channel.feeds())

    def _make_context(self) -> NodeContext:
        return NodeContext(
            self._spec,
            self._roster,
            feed_channel=self._channel,
            credentials=self._credentials,
            on_progress=self._meter.note,
            trained_feeds=self._trained_feeds,
            epochs=self._epochs,
            offers=self._offers,
            on_shard=self._shard_served,
            reserved_port=self._reserved_port,
            stop_asked=lambda: bool(self._training_stop),
            joining=self._joining,
        )

    def _mirror_logs(self, directory: str) -> LogMirror | None:
        """Begin to send event files to the log directory if that is not where they are written."""
        board = self._spec.bundle.settings.tensorboard
        url = board.log_dir
        if "://" not in url or url.startswith("file://"):
            return None
        try:
            fetches = board.is_wanted and self._spec.bundle.node.is_chief  # whose host shows them
            mirror = LogMirror(directory, url, fetches=fetches)
        except (FeedError, OSError) as error:
            _logger.warning("no log files in %s: %s; training goes on", url, error)
            return None
        mirror.start()
        return mirror

    def _prepare_environment(self, context: NodeContext) -> None:
        on_tensorflow = self._spec.bundle.settings.has_tensorflow_servers
        announce_to_tensorflow(os.environ, has_tensorflow_servers=on_tensorflow)
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


def _aside(function: Callable[..., None], *args: Any) -> None:
    """Carry out an order on a separate thread, so that the next order does not wait."""
    name = f"tfos-{function.__name__.strip('_')}"
    threading.Thread(target=function, args=args, name=name, daemon=True).start()


def _as_message(returned: Any) -> messages.Done:
    """Return the report of what main_fun returned; one that cannot travel is no failure."""
    try:
        return messages.Done(result=return_values.encode(returned))
    except NoResultError as error:
        return messages.Done(no_result=str(error))


def _snapshot(stats: FeedStats) -> messages.FeedSnapshot:
    return messages.FeedSnapshot(
        feed=stats.feed,
        fed_rows=stats.fed_rows,
        taken_rows=stats.taken_rows,
        dropped_rows=stats.dropped_rows,
        unread_bytes=stats.unread_bytes,
        starved_s=stats.starved_s,
        epochs_done=stats.epochs_done,
        trained_rows=stats.trained_rows,
        epochs=tuple(
            messages.EpochRowCounts(each.epoch, each.accepted_rows, each.trained_rows)
            for each in stats.epochs
        ),
        is_drained=stats.draining,
    )
