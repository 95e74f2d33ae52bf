"""Orders of a cluster's driver: what it wants of the nodes, and what those that come later missed.

Covers: the phase; starting, feeding, saving, stopping, failing; orders that are kept for workers.
Does not: hear of events (control.state.cluster_state), send, wait, lock (tfos.control.coordinator).
Pure.
Threads: none; the coordinator serialises the calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tfos.control import messages
from tfos.control.members import Member
from tfos.control.messages import FeedEpoch
from tfos.control.restarts.joining import OpenEpochs
from tfos.control.state.actions import Action, Send
from tfos.control.state.cluster_view import ClusterView
from tfos.failure import NodeFailure, is_symptom
from tfos.phases import ClusterPhase, may_move

_MAX_FAILURES = 100
_FIRST_FAILURES = 50
"""Failures to keep: the first show how it began, the newest what goes on. Of the others,
symptoms are dropped before causes."""


@dataclass
class ClusterOrders(ClusterView):
    """All nodes of one cluster, to give orders to. Each method returns actions."""

    open_epochs: OpenEpochs = field(default_factory=OpenEpochs)
    """Open epochs, for workers that join later."""
    _finished_feeds: tuple[str, ...] = ()

    def wait_for(self, what: str) -> list[Action]:
        """Note what the driver waits for, for status(); empty: nothing any more."""
        self.waits_for = what
        return []

    def move(self, target: ClusterPhase) -> None:
        """Enter a phase if that is legal; a failed or closed cluster stays so."""
        if may_move(self.phase, target):
            self.phase = target

    def begin_start(self) -> list[Action]:
        """Note that the node jobs are submitted: a node may hold a slot before it registers."""
        self.is_starting = True
        return []

    def flush(
        self,
        feed: str,
        epoch: int,
        checked_by: FeedEpoch | None = None,
        rounds: int = 0,
        num_fed: int = 0,
    ) -> list[Action]:
        """End an epoch of a feed at every worker that still trains, after this many rounds.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
            checked_by: the feed and epoch that validate this one; None: none.
            rounds: rounds in which rows were fed.
            num_fed: what the epoch counts to for a run that resumes this one; 0: it does not.
        """
        order = messages.Flush(feed, epoch, checked_by, rounds, num_fed)
        self.open_epochs.note(order)
        return [Send(each.node, order) for each in self.training()]

    def feed_again(self, feed: str, epoch: int) -> list[Action]:
        """Tell the workers that lost rows of this epoch are fed again.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
        """
        order = messages.FeedAgain(feed, epoch)
        self.open_epochs.revoke(feed, epoch)  # a worker that joins now may train them, not end it
        return [Send(each.node, order) for each in self.training()]

    def come_to(self, feed: str, epoch: int) -> list[Action]:
        """Note that the rows of this epoch of a feed are fed next, and tell the chief.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0; the rows of those before are trained or dropped.
        """
        if not self.open_epochs.come_to(feed, epoch):
            return []
        order = messages.ComeTo(feed, epoch)
        return [Send(each.node, order) for each in self.training() if each.planned.is_chief]

    def finish(self, feeds: tuple[str, ...]) -> list[Action]:
        """End the feeds finally, also at workers whose main_fun has returned."""
        self._finished_feeds = feeds
        return [
            Send(worker.node, messages.FinishFeed(feed))
            for worker in self.workers
            if worker.is_live
            for feed in feeds
        ]

    def stop(
        self, members: list[Member], reason: str, *, grace_s: float, is_orderly: bool = False
    ) -> list[Action]:
        """Stop these nodes; their end is no longer a failure.

        Args:
            members: the nodes.
            reason: text for their logs.
            grace_s: seconds until they are killed.
            is_orderly: whether the user may give them more seconds.
        """
        actions: list[Action] = []
        for member in members:
            if member.is_live and not member.stop_ordered:
                member.stop_ordered = True
                actions.append(Send(member.node, messages.Stop(reason, grace_s, is_orderly)))
        return actions

    def end(
        self, members: list[Member], reason: str, *, grace_s: float, is_orderly: bool = False
    ) -> list[Action]:
        """Stop these nodes finally: no node may join any more.

        Args:
            members: the nodes.
            reason: text for their logs.
            grace_s: seconds until they are killed.
            is_orderly: whether the user may give them more seconds.
        """
        if not self.is_ending:
            self.is_interrupted = bool(self.awaited())
        self.is_ending = True
        return self.stop(members, reason, grace_s=grace_s, is_orderly=is_orderly)

    def fail(self, failure: NodeFailure, *, stop: bool = True) -> list[Action]:
        """Fail the cluster because of this record; without `stop` the caller ends it in order.

        Args:
            failure: the record; the first one is the headline.
            stop: stop all nodes at once.
        """
        self._note_end(failure)
        if len(self.fatal) < _MAX_FAILURES:
            self.fatal.append(failure)
        self.move(ClusterPhase.FAILED)
        if not stop:
            return []
        reason = f"{failure.node.name} failed"
        return self.stop(self.live(), reason, grace_s=self.config.abort_s / 4)

    def end_streams(self, reason: str) -> list[Action]:
        """Ask the streams that train this cluster to stop; the first reason stays.

        Args:
            reason: text for the user.
        """
        self.streams_stop = self.streams_stop or reason
        return []

    def save_now(self) -> list[Action]:
        """Order the chief to save; the answer is `epochs.saved`, under the number `saves_asked`."""
        self.saves_asked += 1
        return [Send(self.workers[0].node, messages.SaveNow(self.saves_asked))]

    def stop_training(self, reason: str) -> list[Action]:
        """Ask main_fun on every worker, and streams, to stop training; the first reason stays.

        Args:
            reason: text for the nodes' logs.
        """
        if self.training_stop:
            return []
        self.training_stop = reason
        order = messages.StopTraining(reason)
        return [*self.end_streams(reason), *(Send(each.node, order) for each in self.training())]

    def stop_evaluating(self) -> list[Action]:
        """Ask the evaluator to evaluate what is saved, and nothing after it."""
        order = messages.StopTraining("the training is over")
        return [Send(each.node, order) for each in self.evaluating()]

    def missed_by_worker(self, member: Member) -> tuple[messages.Joining, list[messages.Order]]:
        """Return where a worker begins that joins now, and the orders that it has missed.

        Args:
            member: the worker.
        """
        joining, ends = self.open_epochs.joining(self.epochs)
        missed: list[messages.Order] = [*ends]
        if member.planned.is_chief:
            missed += [messages.ComeTo(*begun) for begun in self.open_epochs.begun]
        missed += [messages.FinishFeed(feed) for feed in self._finished_feeds]
        if self.training_stop:
            missed.append(messages.StopTraining(self.training_stop))
        return joining, missed

    def _note_end(self, failure: NodeFailure) -> None:
        """Keep the record of a node that ended without an order."""
        self.members[failure.node.name].ends_by(failure)
        self._note(failure)

    def _note(self, failure: NodeFailure) -> None:
        self.num_failures += 1
        self.failures.append(failure)
        if len(self.failures) > _MAX_FAILURES:
            # The failure that ended the cluster, or a cause among them, is to be the headline.
            later = [
                each for each in self.failures[_FIRST_FAILURES:-1] if each not in self.fatal[:1]
            ]
            self.failures.remove(next(filter(is_symptom, later), later[0]))
