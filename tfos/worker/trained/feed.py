"""One feed at the chief: its micro-batch under way, the failed one, the newest unsaved one.

Covers: what an order, the end of an epoch or a save changes; which batch holds saves no longer.
Pure.
Does not: answer orders, save, ask servers (tfos.worker.trained.feeds).
Runs in: the chief's process.      Threads: TrainedFeeds serialises the calls.

    idle ── admit ─► due ── end_of ─► ending ── done ─► idle
                      └─ leave ─► idle   └──── fail ──► idle
A batch that failed, by `leave` or `fail`, holds saves until a later epoch is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tfos.control.messages import LeaveBatch, TrainBatch


class Unsaved(NamedTuple):
    """A trained batch: it is in no save yet, or a server may have lost it since."""

    query: str
    batch_id: int
    before: int | None
    """The id that was recorded for its query before; None: there was none."""
    generations: tuple[int, ...]
    """The servers' when its rows were let in."""
    num_begun: int = -1
    """Saves that had begun once it was trained: a later one has it."""
    saved_step: int = -1
    """Of the first save that has it; -1: there is none yet."""

    @property
    def loss(self) -> str:
        """What is said if it is not whole in the parameters any more."""
        return (
            f"a parameter server was restarted while batch {self.batch_id} was trained or saved, "
            "and went back to the save before it: the batch is not whole in the parameters"
        )


@dataclass
class TrainedFeed:
    """One feed."""

    due: TrainBatch | None = None
    """The batch whose rows may come, until it is over."""
    come_to: int = 0
    """Of the epochs before this one the driver says that all rows are trained or dropped."""
    is_saving: bool = False
    """A save that was ordered runs: no batch begins in it."""
    is_followed: bool = False
    """`fit` reads the feed and reports its trained epochs."""
    unsaved: Unsaved | None = None
    """The newest trained batch, until a save has it for certain."""
    _is_ending: bool = False
    """Every worker has trained the batch: it is not revoked any more."""
    _begun: Unsaved | None = None
    """What becomes `unsaved` once the batch under way is trained."""
    _failed: TrainBatch | None = None
    """The parameters may contain a part of it."""
    _save_waits: bool = False
    """An ordered save waits for the end of the batch under way, and comes before the next one."""
    _left: int = -1
    """The last order that was revoked."""
    _counts: dict[int, int] = field(default_factory=dict)
    """By epoch whose end was ordered, what it counts to."""

    @property
    def is_free(self) -> bool:
        """Whether neither a batch nor an ordered save is under way."""
        return self.due is None and not self.is_saving

    @property
    def is_streamed(self) -> bool:
        """Whether there was an order about a batch."""
        return self.due is not None or self._left >= 0

    def begin_save(self) -> bool:
        """Begin an ordered save; False: not now, but before the next batch."""
        self._save_waits = not self.is_free
        if self._save_waits:
            return False
        self.is_saving = True
        return True

    def is_revoked(self, order: TrainBatch) -> bool:
        """Whether the driver wants no rows of this batch any more."""
        return order.number <= self._left

    def admit(
        self, order: TrainBatch, before: int | None, generations: tuple[int, ...] | None
    ) -> bool:
        """Begin a batch; False: not yet, or it was revoked.

        Args:
            order: of the batch.
            before: the id that is recorded for its query.
            generations: which start of each server is at work; None: one is away.
        """
        if generations is None or not self.is_free or self._save_waits or self.is_revoked(order):
            return False
        self.due = order
        self._begun = Unsaved(order.query, order.batch_id, before, generations)
        return True

    def leave(self, order: LeaveBatch) -> TrainBatch | None:
        """Revoke a batch; return the one for which no save waits any more.

        For one that failed saves wait until a later epoch is trained: the repeated batch, or other
        data that the user feeds.
        """
        self._left = order.number
        due = self.due
        if due is None or due.number != order.number or self._is_ending:
            return None  # one that still waits for its turn is refused by its number
        if order.in_part:
            return self.fail()
        self.done()
        return due

    def end_of(self, epoch: int, num_begun: int) -> TrainBatch | None:
        """End the batch under way; None: this epoch is none, or another thread ends it.

        Args:
            epoch: that every worker has trained, as well as those before it.
            num_begun: saves that have begun so far.
        """
        if self.due is None or self._begun is None or self.due.epoch > epoch or self._is_ending:
            return None
        self._is_ending = True
        self.unsaved = self._begun._replace(num_begun=num_begun)
        return self.due

    def done(self) -> None:
        """The batch under way is over."""
        self.due, self._begun, self._is_ending = None, None, False

    def fail(self) -> TrainBatch | None:
        """End the batch under way, which holds saves from now on; return the one before it."""
        before, self._failed = self._failed, self.due
        self.done()
        return before

    def passed(self, epoch: int) -> TrainBatch | None:
        """Return the failed batch for which no save waits any more, as this later epoch is trained.

        Args:
            epoch: that every worker has trained.
        """
        failed = self._failed
        if failed is None or failed.epoch >= epoch:
            return None
        self._failed = None
        return failed

    def note_save(self, number: int, step: int, generations: tuple[int, ...]) -> None:
        """Take a save, whether it was ordered or came by time: the first that has the batch counts.

        Args:
            number: which one of all that have begun.
            step: of the checkpoint.
            generations: which start of each server it holds.
        """
        found = self.unsaved
        if found is None or found.saved_step >= 0 or number <= found.num_begun:
            return
        # A server that was restarted twice may hold a save that lacks the batch.
        if generations == found.generations:
            self.unsaved = found._replace(saved_step=step)

    def awaits_driver(self, epoch: int) -> bool:
        """Whether the end of an epoch records something that may lack rows of a lost worker.

        Args:
            epoch: that every worker has trained which is left, as well as those before it.
        """
        recorded = [each for each in self._counts if each <= epoch]
        if self.due is not None and self.due.epoch <= epoch:
            recorded.append(self.due.epoch)
        return max(recorded, default=-1) >= self.come_to

    def count(self, epoch: int, num_fed: int) -> None:
        """Take what an epoch counts to whose end is ordered.

        Args:
            epoch: number of the epoch, from 0.
            num_fed: as of the newest order; 0: it does not count.
        """
        if num_fed:
            self._counts[epoch] = num_fed
        else:
            self._counts.pop(epoch, None)

    def counted(self, epoch: int) -> int:
        """Return what is trained counts to; 0: nothing new that counts.

        Args:
            epoch: that every worker has trained, as well as those before it.
        """
        ended = [each for each in self._counts if each <= epoch]
        return max((self._counts.pop(each) for each in ended), default=0)
