"""One feed at the chief: its micro-batch in progress, the failed one, the newest unsaved one.

Covers: what an order, the end of an epoch or a save changes; which batch no longer holds saves.
Pure.
Does not: answer orders, save, ask servers (tfos.worker.trained.feeds).
Runs in: the chief's process.      Threads: TrainedFeeds serialises the calls.

    idle ── admit ─► due ── end_of ─► ending ── done ─► idle
                      └─ leave ─► idle   └──── fail ──► idle
A batch that failed, through `leave` or `fail`, holds saves until a later epoch is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tfos.control.messages import LeaveBatch, TrainBatch


class Unsaved(NamedTuple):
    """A trained batch that no save has yet, or that a server may have lost since."""

    query: str
    batch_id: int
    before: int | None
    """Previous id recorded for its query; None: there was none."""
    generations: tuple[int, ...]
    """Generations of the servers when its rows were admitted."""
    num_begun: int = -1
    """Number of saves that had begun once it was trained: a later one has it."""
    saved_step: int = -1
    """Step of the first save that has it; -1: there is none yet."""

    @property
    def loss(self) -> str:
        """Error text for a batch that is no longer whole in the parameters."""
        return (
            f"a parameter server was restarted while batch {self.batch_id} was trained or saved, "
            "and restored an earlier save; the parameters do not contain the whole batch"
        )


@dataclass
class TrainedFeed:
    """One feed."""

    due: TrainBatch | None = None
    """Batch whose rows may come, until it is over."""
    come_to: int = 0
    """Epoch before which, as the driver says, all rows are trained or dropped."""
    is_saving: bool = False
    """Whether an ordered save runs; no batch begins during it."""
    is_followed: bool = False
    """Whether `fit` reads the feed and reports its trained epochs."""
    unsaved: Unsaved | None = None
    """Newest trained batch, until a save has it for certain."""
    _is_ending: bool = False
    """Whether every worker has trained the batch, so that it can no longer be revoked."""
    _begun: Unsaved | None = None
    """Value of `unsaved` once the batch in progress is trained."""
    _failed: TrainBatch | None = None
    """Batch of which the parameters may contain a part."""
    _save_waits: bool = False
    """Whether an ordered save waits for the end of the batch in progress, before the next one."""
    _left: int = -1
    """Number of the last order that was revoked."""
    _counts: dict[int, int] = field(default_factory=dict)
    """What each epoch whose end was ordered counts to, by epoch."""

    @property
    def is_free(self) -> bool:
        """Whether neither a batch nor an ordered save is in progress."""
        return self.due is None and not self.is_saving

    @property
    def is_streamed(self) -> bool:
        """Whether there was an order about a batch."""
        return self.due is not None or self._left >= 0

    def begin_save(self) -> bool:
        """Begin an ordered save; False: it has to wait, and comes before the next batch."""
        self._save_waits = not self.is_free
        if self._save_waits:
            return False
        self.is_saving = True
        return True

    def is_revoked(self, order: TrainBatch) -> bool:
        """Whether the driver no longer wants rows of this batch."""
        return order.number <= self._left

    def admit(
        self, order: TrainBatch, before: int | None, generations: tuple[int, ...] | None
    ) -> bool:
        """Begin a batch; False: not yet, or it was revoked.

        Args:
            order: order of the batch.
            before: the id that is recorded for its query.
            generations: generation of each server; None: one is away.
        """
        if generations is None or not self.is_free or self._save_waits or self.is_revoked(order):
            return False
        self.due = order
        self._begun = Unsaved(order.query, order.batch_id, before, generations)
        return True

    def leave(self, order: LeaveBatch) -> TrainBatch | None:
        """Revoke a batch; return the one that no longer holds saves.

        A failed batch holds saves until a later epoch is trained: the repeated batch, or other data
        that the user feeds.
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
        """End the batch in progress; None: this epoch is not a batch, or another thread ends it.

        Args:
            epoch: an epoch that every worker has trained, with all before it.
            num_begun: number of saves that have begun so far.
        """
        if self.due is None or self._begun is None or self.due.epoch > epoch or self._is_ending:
            return None
        self._is_ending = True
        self.unsaved = self._begun._replace(num_begun=num_begun)
        return self.due

    def done(self) -> None:
        """Note that the batch in progress is over."""
        self.due, self._begun, self._is_ending = None, None, False

    def fail(self) -> TrainBatch | None:
        """End the batch in progress, which holds saves from now on; return the one before it."""
        before, self._failed = self._failed, self.due
        self.done()
        return before

    def passed(self, epoch: int) -> TrainBatch | None:
        """Return the failed batch that no longer holds saves, as this later epoch is trained.

        Args:
            epoch: an epoch that every worker has trained.
        """
        failed = self._failed
        if failed is None or failed.epoch >= epoch:
            return None
        self._failed = None
        return failed

    def note_save(self, number: int, step: int, generations: tuple[int, ...]) -> None:
        """Take a save, ordered or periodic: the first that has the batch counts.

        Args:
            number: number of the save among all that have begun.
            step: step of the checkpoint.
            generations: generation of each server in it.
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
            epoch: an epoch that every remaining worker has trained, with all before it.
        """
        recorded = [each for each in self._counts if each <= epoch]
        if self.due is not None and self.due.epoch <= epoch:
            recorded.append(self.due.epoch)
        return max(recorded, default=-1) >= self.come_to

    def count(self, epoch: int, num_fed: int) -> None:
        """Note what an epoch whose end is ordered counts to.

        Args:
            epoch: number of the epoch, from 0.
            num_fed: the count in the newest order; 0: the epoch does not count.
        """
        if num_fed:
            self._counts[epoch] = num_fed
        else:
            self._counts.pop(epoch, None)

    def counted(self, epoch: int) -> int:
        """Return the count of the trained epochs; 0: nothing new counts.

        Args:
            epoch: that every worker has trained, as well as those before it.
        """
        ended = [each for each in self._counts if each <= epoch]
        return max((self._counts.pop(each) for each in ended), default=0)
