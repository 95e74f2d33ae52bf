"""Micro-batch of a stream at the driver: its orders to the chief and the chief's reports.

Covers: the orders to the chief, the meaning of its reports.      Pure.
Does not: feed (tfos.feed.epoch_feeder), count or skip batches (tfos.streaming), record or save
batch ids (tfos.worker.trained.feeds).
"""

from __future__ import annotations

from dataclasses import dataclass

from tfos.control.members import NodeStatus
from tfos.control.messages import BatchReport, LeaveBatch, TrainBatch
from tfos.control.state.actions import Action, Send
from tfos.control.state.cluster_view import ClusterView


class BatchKnown(Exception):
    """The parameters contain the batch: its driver had stopped waiting before the chief told so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One call of Spark's foreachBatch."""

    query: str
    """Spark's id of the streaming query."""
    batch_id: int
    number: int
    """Of the order; grows from one order about this feed to the next."""
    holds: bool
    """Whether no save may begin before it was trained."""
    saves: bool
    """Whether to save once it was trained."""

    def begin(self, state: ClusterView, feed: str, epoch: int) -> list[Action]:
        """Return the order that makes this epoch the batch.

        Args:
            state: of the cluster.
            feed: name of the feed.
            epoch: number of the epoch that feeds the batch.
        """
        order = TrainBatch(
            feed, self.number, epoch, self.query, self.batch_id, self.holds, self.saves
        )
        return [Send(state.workers[0].node, order)]

    def leave(self, state: ClusterView, feed: str, *, in_part: bool) -> list[Action]:
        """Return the order not to record this batch: it failed, or had no rows.

        Args:
            state: of the cluster.
            feed: name of the feed.
            in_part: whether some of its rows were trained.
        """
        return [Send(state.workers[0].node, LeaveBatch(feed, self.number, in_part))]

    def may_begin(self, state: ClusterView, feed: str) -> bool:
        """Whether its rows may be fed, or never will be.

        Args:
            state: of the cluster.
            feed: name of the feed.
        """
        return answer_to(state, feed, self.number) is not None or not chief_trains(state)

    def is_known(self, state: ClusterView, feed: str) -> bool:
        """Whether the chief, which admits its rows, says that the parameters contain it already.

        Args:
            state: of the cluster.
            feed: name of the feed.
        """
        found = answer_to(state, feed, self.number)
        return found is not None and found.trained.get(self.query, -1) >= self.batch_id

    def is_over(self, state: ClusterView, feed: str) -> bool:
        """Whether the chief has reported it as trained, and saved if due, or never will.

        Args:
            state: of the cluster.
            feed: name of the feed.
        """
        found = answer_to(state, feed, self.number)
        return (found is not None and found.is_done) or not chief_trains(state)


def answer_to(state: ClusterView, feed: str, number: int) -> BatchReport | None:
    """Return the chief's answer to this order about a feed.

    Args:
        state: of the cluster.
        feed: name of the feed.
        number: of the order.
    """
    return state.workers[0].batches.get(feed, {}).get(number)


def chief_trains(state: ClusterView) -> bool:
    """Whether the chief's main_fun still runs."""
    return state.workers[0].status is NodeStatus.RUNNING
