"""Protocols of the worker's context that the Keras binding uses (tfos.worker.context).

Covers: the protocols alone.      Does not: implement anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tfos.fit_place import FitPlace


class ProgressSink(Protocol):
    """Reports of what the data of a `fit` see (tfos.worker.reports.seen_progress)."""

    @property
    def so_far(self) -> tuple[float, float]:
        """The newest steps and rows: another `fit` goes on from there."""

    def begin(self) -> None:
        """Note that a `fit` of a model that is not distributed begins."""

    def note(self, numbers: Mapping[str, float]) -> None:
        """Report numbers by name, with `steps` and `rows`, unless main_fun reports its own."""


class WorkerContext(Protocol):
    """The part of `NodeContext` that a distributed `fit` uses."""

    @property
    def stop_asked(self) -> bool:
        """Whether the end of the training was asked for."""

    def report_numbers(self, numbers: Mapping[str, float | None]) -> None:
        """Report what `fit` has counted; never raises.

        Args:
            numbers: numbers by name, with `steps`, `rows` and `loss`.
        """

    @property
    def seen_progress(self) -> ProgressSink:
        """Progress of the process, also of a `fit` that reports none itself."""

    @property
    def num_workers(self) -> int:
        """Number of workers that train together, the chief included."""

    @property
    def worker_rank(self) -> int:
        """This worker's rank among them, from 0."""

    @property
    def is_chief(self) -> bool:
        """Whether this worker seeds the servers and decides for all."""

    @property
    def trained_feeds(self) -> Any:
        """The `tfos.worker.trained.feeds.TrainedFeeds` of this process."""

    @property
    def epochs(self) -> Any:
        """The `tfos.worker.reports.epoch_reports.EpochReports` of this process."""

    @property
    def fit_place(self) -> FitPlace | None:
        """Place where this worker joins others that train; None: all begin together."""

    @property
    def resumes_epochs(self) -> bool:
        """Whether fed epochs go on where an interrupted run stopped."""

    @property
    def resumes_rate(self) -> bool:
        """Whether a fit takes the learning rate that it had when an earlier run was interrupted."""

    def ps_client(self) -> Any:
        """The process's `ps.client.client.PSClient`, the same object for every call."""

    def save_now(self) -> str | None:
        """Save the servers; return why it failed, empty if it did not, None if nothing saves."""


class RowsContext(Protocol):
    """The part of `NodeContext` that rows of any origin use."""

    @property
    def seen_progress(self) -> ProgressSink:
        """Receiver of the progress of a `fit` that reports none itself."""

    def check_servers_used(self, what: str) -> None:
        """Refuse a training, `what`, that does not use the cluster's servers."""


class DataContext(RowsContext, Protocol):
    """The part of `NodeContext` that datasets of feeds use."""

    @property
    def feed_channel(self) -> Any:
        """The `feeding.receiver.channel.FeedChannel` of this process."""


class EvaluatorContext(Protocol):
    """The part of `NodeContext` that the evaluation of checkpoints uses."""

    @property
    def stop_asked(self) -> bool:
        """Whether the training is over."""

    def report_progress(
        self,
        step: int,
        rows: int,
        loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """See NodeContext.report_progress."""

    @property
    def epochs(self) -> Any:
        """See NodeContext.epochs."""

    @property
    def log_dir(self) -> str:
        """Directory of event files; empty: none."""


class ShownContext(WorkerContext, Protocol):
    """The part of `NodeContext` that `callbacks` uses."""

    @property
    def log_dir(self) -> str | None:
        """Directory of this worker's event files; None: no TensorBoard."""

    @property
    def feed_channel(self) -> Any:
        """The `feeding.receiver.channel.FeedChannel` of this process."""

    @property
    def cluster_log_dir(self) -> str | None:
        """Directory of the cluster's own runs; None: no TensorBoard."""

    def new_ps_client(self) -> Any:
        """Another `PSClient`, which its caller closes, for requests while a step waits."""
