"""Micro-batch of a stream at the driver: its orders to the chief and the chief's reports.

Covers: the orders to the chief, the meaning of its reports; refusing batches as epochs.      Pure.
Does not: feed (tfos.feed.epoch_feeder), count or skip batches (tfos.streaming), record or save
batch ids (tfos.worker.trained.feeds).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tfos.config import Checkpoints
from tfos.control.members import NodeStatus
from tfos.control.messages import BatchReport, LeaveBatch, TrainBatch
from tfos.control.state.actions import Action, Send
from tfos.control.state.cluster_view import ClusterView
from tfos.errors import SettingsError
from tfos.spark.jobs import QUERY_ID

_BATCH_TIME = "spark.streaming.internal.batchTime"
"""Spark's local property on the thread of an interval of a DStream."""
TRAIN_ONCE = {
    "foreachBatch": "df.writeStream.foreachBatch(cluster.train_batch) or cluster.stream(df, "
    "checkpoint_location), which train each batch once",
    "foreachRDD": "cluster.train(dstream) before ssc.start()",
}
"""What trains a stream, by the call of its batches."""


class BatchKnown(Exception):
    """The parameters contain the batch: its driver stopped waiting before the chief reported it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One call of Spark's foreachBatch."""

    feed: str
    """Name of the feed."""
    query: str
    """Spark's id of the streaming query."""
    batch_id: int
    number: int
    """Number of the order; grows from one order about this feed to the next."""
    holds: bool
    """Whether no save may start before the batch was trained."""
    saves: bool
    """Whether to save once the batch was trained."""

    def begin(self, state: ClusterView, epoch: int) -> list[Action]:
        """Return the order that makes this epoch of the feed the batch.

        Args:
            state: the cluster's state.
            epoch: number of the epoch that feeds the batch.
        """
        order = TrainBatch(
            self.feed, self.number, epoch, self.query, self.batch_id, self.holds, self.saves
        )
        return [Send(state.workers[0].node, order)]

    def leave(self, state: ClusterView, *, in_part: bool) -> list[Action]:
        """Return the order not to record this batch: it failed, or had no rows.

        Args:
            state: the cluster's state.
            in_part: whether some of its rows were trained.
        """
        return [Send(state.workers[0].node, LeaveBatch(self.feed, self.number, in_part))]

    def may_begin(self, state: ClusterView) -> bool:
        """Whether its rows may be fed, or never will be."""
        return self._answer(state) is not None or not chief_trains(state)

    def is_known(self, state: ClusterView) -> bool:
        """Whether the chief, which admits its rows, says that the parameters contain it already."""
        found = self._answer(state)
        return found is not None and found.trained.get(self.query, -1) >= self.batch_id

    def is_over(self, state: ClusterView) -> bool:
        """Whether the chief has reported it as trained, and saved if due, or never will."""
        found = self._answer(state)
        return (found is not None and found.is_done) or not chief_trains(state)

    def _answer(self, state: ClusterView) -> BatchReport | None:
        return answer_to(state, self.feed, self.number)


def call_of_batch(property_of: Callable[[str], str | None]) -> str:
    """Return "foreachBatch" or "foreachRDD" if the caller's thread is in one; else "".

    Args:
        property_of: Spark's local properties on the caller's thread.
    """
    if property_of(QUERY_ID):
        return "foreachBatch"
    return "foreachRDD" if property_of(_BATCH_TIME) else ""


def check_epochs_of_batches(
    plan: Checkpoints | None, property_of: Callable[[str], str | None]
) -> None:
    """Refuse train() on a batch of a stream where a run that resumes leaves epochs out.

    Args:
        plan: the cluster's checkpoint plan; None: it saves nothing.
        property_of: Spark's local properties on the caller's thread.

    Raises:
        SettingsError: a resumed run would leave out as many new batches as this one has trained.
    """
    if plan is None or not plan.resume_epochs or not (where := call_of_batch(property_of)):
        return
    raise SettingsError(
        f"train() within {where} would make each batch an epoch. A run that resumes from these "
        "checkpoints leaves out as many epochs as were trained before: new batches. Use "
        f"{TRAIN_ONCE[where]}; or pass Checkpoints(resume_epochs=False): then no batch is "
        "left out, and one that Spark brings again is trained again"
    )


def answer_to(state: ClusterView, feed: str, number: int) -> BatchReport | None:
    """Return the chief's answer to this order about a feed.

    Args:
        state: the cluster's state.
        feed: name of the feed.
        number: the order's number.
    """
    return state.workers[0].batches.get(feed, {}).get(number)


def chief_trains(state: ClusterView) -> bool:
    """Whether the chief's main_fun still runs."""
    return state.workers[0].status is NodeStatus.RUNNING
