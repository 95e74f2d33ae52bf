"""Entry of train() and inference(): checks first, then the cluster's feeder; loads numpy late.

Covers: the bodies of TFCluster.train and inference; refusing a cluster that takes no rows, a feed
that it does not have, a phase without feeds, a batch of a stream instead of an epoch; the wait
for the end of a feed.
Does not: feed (tfos.feed.cluster_feeder).
Runs in: the driver.      Threads: any; `_making` guards the one object that feeds.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

from tfos.config import check_flag
from tfos.driver import preflight, stream_stop
from tfos.driver.main_fun_wait import MainFunWait
from tfos.driver.reservation import Reservation
from tfos.driver.shutdown import Shutdown
from tfos.errors import PhaseError, SettingsError
from tfos.feed.micro_batch import check_epochs_of_batches
from tfos.feed.request import FeedRequest
from tfos.phases import ClusterPhase, require
from tfos.spark.interruptible import CancelToken, InterruptibleCall
from tfos.spark.task_secrets import give_credentials

if TYPE_CHECKING:
    from tfos.feed.cluster_feeder import ClusterFeeder
    from tfos.feed.micro_batch import MicroBatch
    from tfos.monitor.reports import EpochReport, TrainReport


class FeedService:
    """Passes the calls of one cluster to its feeder.

    Args:
        reserved: the cluster.
        ending: raises the cluster's failure.
    """

    def __init__(self, reserved: Reservation, ending: Shutdown) -> None:
        self._reserved = reserved
        self._ending = ending
        self._making = threading.Lock()
        self.feeder: ClusterFeeder | None = None
        """Made by the first call."""

    def train(self, request: FeedRequest) -> TrainReport | None:
        """Feed the data of a request; see TFCluster.train.

        Raises:
            SettingsError: an argument, the cluster's input mode or the calling thread does not fit.
            NodeFailedError: the cluster has failed.
            PhaseError: the cluster does not run.
        """
        epochs = preflight.check_epochs(request.num_epochs)
        cancel = CancelToken()

        def train() -> TrainReport | None:
            feeder = self._open("train()", request)
            sc, plan = self._reserved.sc, self._reserved.config.checkpoints
            check_epochs_of_batches(plan, sc.getLocalProperty)
            if hasattr(request.data, "foreachRDD"):
                stream_stop.publish(self._reserved)
                times = request.num_epochs or 1
                interval = dataclasses.replace(request, num_epochs=times, is_interval=True)
                request.data.foreachRDD(
                    lambda rdd: feeder.feed_interval(dataclasses.replace(interval, data=rdd))
                )
                return None
            if request.num_epochs == 0:
                self._reserved.console.line(
                    f"num_epochs=0 feeds the data {epochs} times, as in TensorFlowOnSpark; "
                    "num_epochs=1 feeds it once"
                )
            return feeder.train(
                dataclasses.replace(request, num_epochs=epochs), lambda: cancel.is_set
            )

        call = InterruptibleCall("tfos-train()", train, cancel=cancel, spark=self._reserved.sc)
        with self._ending.raising():
            return call.result(self._reserved.coordinator.wake)

    def train_batch(self, request: FeedRequest, batch: MicroBatch) -> EpochReport | None:
        """Feed one micro-batch of a stream; None if main_fun has returned on every worker.

        Args:
            request: the call's arguments.
            batch: the micro-batch and its state.

        Raises:
            SettingsError, NodeFailedError, PhaseError: as train.
        """
        cancel = CancelToken()

        def train_batch() -> EpochReport | None:
            feeder = self._open("train_batch()", request)
            return feeder.train_batch(request, batch, lambda: cancel.is_set)

        # Spark's thread, not the user's: what is raised here does not reach the user.
        call = InterruptibleCall(
            "tfos-train_batch()", train_batch, cancel=cancel, spark=self._reserved.sc
        )
        return call.result(self._reserved.coordinator.wake)

    def inference(self, request: FeedRequest) -> Any:
        """Return a lazy collection of results; see TFCluster.inference.

        Raises:
            SettingsError, NodeFailedError, PhaseError: as train.
        """

        def inference() -> Any:
            feeder = self._open("inference()", request)
            if hasattr(request.data, "foreachRDD"):
                stream_stop.publish(self._reserved)
            return feeder.inference(request)

        with self._ending.raising():
            results = InterruptibleCall(
                "tfos-inference()", inference, spark=self._reserved.sc
            ).result()
        # To this thread: the user's actions on what is returned run in it.
        give_credentials(self._reserved.sc, self._reserved.feeder_credentials)
        return results

    def wait_unread(self, feed: str) -> None:
        """Wait, without limit, until no worker reads the feed any more, or the cluster has failed.

        Args:
            feed: its name; main_fun ends it by terminate() after a fit of its own data.
        """
        cancel = CancelToken()
        coordinator, console = self._reserved.coordinator, self._reserved.console
        wait = MainFunWait(coordinator, console, is_fed=False)
        InterruptibleCall(
            "tfos-wait", lambda: wait.wait_unread(feed, lambda: cancel.is_set), cancel=cancel
        ).result(coordinator.wake)

    def check(self, call: str, request: FeedRequest) -> None:
        """Refuse a call that could not feed; not for the user's own thread, as it may wait.

        Args:
            call: the user's, for errors.
            request: its arguments.

        Raises:
            SettingsError, NodeFailedError, PhaseError: as train.
        """
        if self._ending.is_forked and call != "inference()":  # whose results come through Spark
            raise PhaseError(
                f"{call} in a process that the driver has forked would wait for ever: what the "
                "workers have trained is told to the driver alone. Call it in the driver; beside "
                "other work, in a thread (threading.Thread)"
            )
        reserved = self._reserved
        feeds, feed = reserved.settings.feeds, request.feed
        preflight.check_timeout("feed_timeout", request.feed_timeout_s)
        preflight.check_shuffle(request.seed, request.shuffle_rows)
        check_flag("exactly_once", request.exactly_once)
        if not feeds:
            raise SettingsError(
                f"{call} needs input_mode=InputMode.SPARK; this cluster was made with "
                "InputMode.TENSORFLOW, where main_fun reads its own data."
            )
        if feed not in feeds:
            raise SettingsError(
                f"qname={feed!r} is not a feed of this cluster: {list(feeds)}. Name "
                "it in queues= of reserve() or run()."
            )
        self._ending.raise_failure()
        require(call, reserved.coordinator.phase, ClusterPhase.RUNNING)

    def _open(self, call: str, request: FeedRequest) -> ClusterFeeder:
        """Return what feeds; `call` is the user's, for errors."""
        self.check(call, request)
        with self._making:
            if self.feeder is None:
                self.feeder = _feeder_of(self._reserved)
        return self.feeder


def _feeder_of(reserved: Reservation) -> ClusterFeeder:
    from tfos.feed.cluster_feeder import ClusterFeeder  # numpy: only where rows are fed
    from tfos.feed.epoch_feeder import EpochFeeder
    from tfos.feed.watch import FeedWatch

    coordinator, credentials = reserved.coordinator, reserved.feeder_credentials
    config, console = reserved.config, reserved.console
    watch = FeedWatch(coordinator, config, console)
    epochs = EpochFeeder(reserved.sc, coordinator, credentials, config, console, watch)
    return ClusterFeeder(credentials.cluster_id, epochs, watch, coordinator, config, console)
