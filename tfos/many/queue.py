"""The queue of trainings: which item a slot trains next, and what happens to lost ones.

Covers: states of items, attempts, lost slots, and values that are lost with them.
Does not: know processes or Spark. Pure: a slot's reports and a clock in, orders out.
Threads: none; its owner serialises the calls.
"""

from __future__ import annotations

import enum
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rpc.field_texts import with_field_texts
from tfos.many.messages import Ended, Ending, EndSlot, Order, Train, WaitForItem


class TrainingState(enum.StrEnum):
    """State of one item."""

    WAITING = "waiting"
    """No slot trains it now."""
    TRAINING = "training"
    """A slot trains it."""
    DONE = "done"
    """Its function has returned."""
    FAILED = "failed"
    """All attempts have failed; `error` has the last one's reason."""


_ENDED = (TrainingState.DONE, TrainingState.FAILED)


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTraining:
    """One row of the table of `map_train`."""

    item: str
    """Its name: a key of the mapping, the text of a str or number, the group's key, or `item 7`
    for position 7, from 0."""
    state: TrainingState = TrainingState.WAITING
    seconds: float = 0.0
    """Seconds of the successful attempt, or of the last failed one."""
    attempts: int = 0
    """Number of attempts that have begun."""
    metrics: Mapping[str, float] | None = None
    """The numbers in the function's return value."""
    error: str = ""
    """Why the last attempt failed; a later attempt may still have succeeded."""


@dataclass(frozen=True, slots=True)
class SlotAttempt:
    """One process of a slot: Spark may start its task again, with a higher attempt."""

    slot: int
    attempt: int


class TrainingQueue:
    """The items of one `map_train`, by their position from 0.

    Args:
        names: names of the items, all different.
        retries: attempts of an item after its first one.
        homes: for each item, the slot that has its rows; None: every slot has every item.
        is_durable: whether a value is safe once its slot has reported it. If not, the slot holds it
            until the slot ends, and it is trained again if the slot is lost.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        retries: int,
        homes: Sequence[int] | None = None,
        is_durable: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = [ItemTraining(item=name, metrics={}) for name in names]
        """Read only: `_set` alone writes rows, and counts them."""
        self.ended_items: list[int] = []
        """Read only: items that are done or have failed, in order; repeated after a lost value."""
        self._counts = Counter({TrainingState.WAITING: len(names)})
        self._clock = clock
        self._ended_s = 0.0
        """Total seconds of all ended attempts."""
        self._begun_s: dict[SlotAttempt, float] = {}
        """When a slot began its newest attempt, as far as known here."""
        self._retries = retries
        self._homes = homes
        self.is_durable = is_durable
        self._waiting: dict[int, deque[int]] = {}
        self._holders: dict[int, SlotAttempt] = {}
        """Slot that trains an item."""
        self._ahead: dict[int, int] = {}
        """The item that a slot has drawn but not begun, as far as known here."""
        self._values: dict[int, SlotAttempt] = {}
        """Slot that holds an item's value, if values are not durable."""
        self._orders: Counter[int] = Counter()
        """Number of orders of an item, including ones that did not begin; identifies a report."""
        self._losses: Counter[int] = Counter()
        """Number of times that an item's value was lost."""
        self._newest: dict[int, SlotAttempt] = {}
        for item in range(len(names)):
            self._put_back(item)

    @property
    def is_complete(self) -> bool:
        """Whether every item is done or has failed."""
        return self.count(TrainingState.DONE) + self.count(TrainingState.FAILED) == len(self.table)

    @property
    def has_homes(self) -> bool:
        """Whether an item can be trained by only one slot."""
        return self._homes is not None

    @property
    def most_losses(self) -> int:
        """Largest number of times that one item's value was lost."""
        return max(self._losses.values(), default=0)

    @property
    def busy_s(self) -> float:
        """Total seconds of all attempts that have ended, and of those in progress so far."""
        now_s = self._clock()
        # A slot once: it also holds an item ahead, and items whose end it has yet to report.
        training = set(self._holders.values())
        return self._ended_s + sum(now_s - self._begun_s.get(slot, now_s) for slot in training)

    def count(self, state: TrainingState) -> int:
        """Return the number of items in a state."""
        return self._counts[state]

    def has_work(self, slot: int) -> bool:
        """Whether an item waits that this slot can train."""
        return bool(self._waiting.get(self._queue_number(slot)))

    def is_newest(self, slot: SlotAttempt) -> bool:
        """Whether it is the slot's latest known attempt and is not given up.

        Args:
            slot: a slot that has asked for work before.
        """
        return self._newest.get(slot.slot) == slot

    def restore(self, rows: Mapping[int, ItemTraining]) -> None:
        """Take over the items that an earlier run has done.

        Args:
            rows: their rows in that run, by position.
        """
        for item, row in rows.items():
            self._set(item, replace(row, state=TrainingState.DONE))
        for number, waiting in self._waiting.items():
            self._waiting[number] = deque(item for item in waiting if item not in rows)

    def draw(
        self, slot: SlotAttempt, holding: Collection[int] = (), *, is_ahead: bool = False
    ) -> Order:
        """Return the next order for a slot.

        Args:
            slot: the slot that asks.
            holding: the items that it knows to be its own. Other items that it was given were lost
                in transit and go to the next slot that asks.
            is_ahead: whether it is still training. It gets an item only if every slot could have
                one.
        """
        if not self._became_newest(slot):
            return EndSlot()
        self._take_unknown_back(slot, holding)
        waiting = self._waiting.setdefault(self._queue_number(slot.slot), deque())
        if is_ahead and len(waiting) < (len(self._newest) if self._homes is None else 1):
            return WaitForItem()
        if waiting:
            item = waiting.popleft()
            row = self.table[item]
            self._set(item, replace(row, state=TrainingState.TRAINING, attempts=row.attempts + 1))
            self._holders[item] = slot
            self._orders[item] += 1
            if is_ahead:
                self._ahead[slot.slot] = item
            else:
                self._begun_s[slot] = self._clock()
            return Train(item, self._orders[item])
        return WaitForItem() if self._may_return(slot) else EndSlot()

    def ended(self, slot: SlotAttempt, ended: Ended) -> bool:
        """Record the end of an attempt; return whether it counts.

        Args:
            slot: the slot that trained.
            ended: its report. One that repeats another, or comes from a slot that was given up, is
                ignored.
        """
        if self._holders.get(ended.item) != slot:
            return False
        if ended.attempt != self._orders[ended.item]:
            return False
        if ended.how is Ending.NOT_BEGUN:
            if self._ahead.get(slot.slot) == ended.item:
                del self._ahead[slot.slot]
            self._take_back(ended.item, error=ended.error)
            return True
        del self._holders[ended.item]
        self._note_begun(slot, ended.item)
        self._ended_s += ended.seconds
        row = replace(
            self.table[ended.item],
            seconds=ended.seconds,
            metrics=ended.metrics,
            error=ended.error or self.table[ended.item].error,
        )
        if ended.how is Ending.RETURNED:
            self._set(ended.item, replace(row, state=TrainingState.DONE))
            if not self.is_durable:
                self._values[ended.item] = slot
        elif ended.how is Ending.NOT_PICKLABLE:
            self._set(ended.item, replace(row, state=TrainingState.FAILED))
        else:
            self._failed(ended.item, row)
        return True

    def _note_begun(self, slot: SlotAttempt, ended: int) -> None:
        """Count the item ahead as begun, unless another one is still before it.

        A value is reported once it is written, which may be while the next item is trained.

        Args:
            slot: the slot that trains.
            ended: the item that has ended.
        """
        ahead = self._ahead.get(slot.slot)
        others = (item for item, holder in self._holders.items() if holder == slot)
        if ahead == ended or all(item == ahead for item in others):
            self._ahead.pop(slot.slot, None)
        self._begun_s[slot] = self._clock()

    def slot_ended(self, slot: int, delivered: Collection[int]) -> None:
        """Take back the items that an ended slot had not trained, or trained without a value.

        Its process has ended normally, so it has not begun an item that it holds here: the order
        was lost.

        Args:
            slot: its number.
            delivered: items whose values have arrived.
        """
        for item in delivered:
            self._values.pop(item, None)
        for item in [item for item, holder in self._holders.items() if holder.slot == slot]:
            self._take_back(item)
        self.slot_lost(slot, "its slot ended")

    def slot_lost(self, slot: int, reason: str) -> None:
        """Take back the items of all attempts of a slot up to now, and their values.

        Args:
            slot: its number.
            reason: error of the attempts in progress.
        """
        self._newest.pop(slot, None)
        ahead = self._ahead.pop(slot, None)
        for item in [item for item, holder in self._holders.items() if holder.slot == slot]:
            if item == ahead:
                self._take_back(item)
                continue
            del self._holders[item]
            self._failed(item, replace(self.table[item], error=reason))
        for item in [item for item, holder in self._values.items() if holder.slot == slot]:
            del self._values[item]
            self._losses[item] += 1
            row = replace(self.table[item], state=TrainingState.WAITING, error=reason)
            self._set(item, row)
            self._put_back(item)

    def give_up(self) -> None:
        """Set items in progress to waiting: the run is over, and no slot trains any more."""
        self._ended_s = self.busy_s
        for item in list(self._holders):
            if item in self._ahead.values():
                self._take_back(item)
            else:
                self._set(item, replace(self.table[item], state=TrainingState.WAITING))
        self._holders.clear()

    def _take_unknown_back(self, slot: SlotAttempt, holding: Collection[int]) -> None:
        lost = [
            item for item, holder in self._holders.items() if holder == slot and item not in holding
        ]
        for item in lost:
            self._take_back(item)

    def _take_back(self, item: int, error: str = "") -> None:
        """Take an item from a slot that has not begun it.

        Args:
            item: its position.
            error: why the slot did not begin it.
        """
        del self._holders[item]
        row = self.table[item]
        row = replace(row, attempts=row.attempts - 1, error=error or row.error)
        self._set(item, replace(row, state=TrainingState.WAITING))
        self._put_back(item)

    def _set(self, item: int, row: ItemTraining) -> None:
        self._counts[self.table[item].state] -= 1
        self._counts[row.state] += 1
        self.table[item] = row
        if row.state in _ENDED:
            self.ended_items.append(item)

    def _failed(self, item: int, row: ItemTraining) -> None:
        if row.attempts > self._retries:
            self._set(item, replace(row, state=TrainingState.FAILED))
            return
        self._set(item, replace(row, state=TrainingState.WAITING))
        self._put_back(item)

    def _became_newest(self, slot: SlotAttempt) -> bool:
        known = self._newest.get(slot.slot)
        if known is not None and slot.attempt < known.attempt:
            return False
        if known is not None and slot.attempt > known.attempt:
            self.slot_lost(slot.slot, f"the process of slot {slot.slot} was lost")
        self._newest[slot.slot] = slot
        return True

    def _may_return(self, slot: SlotAttempt) -> bool:
        """Whether an item that this slot could train may still fail, on it or on another slot."""
        return any(
            holder.slot == slot.slot or self._homes is None for holder in self._holders.values()
        )

    def _put_back(self, item: int) -> None:
        number = self._homes[item] if self._homes is not None else 0
        self._waiting.setdefault(number, deque()).append(item)

    def _queue_number(self, slot: int) -> int:
        return slot if self._homes is not None else 0
