"""What the driver knows of one slot: its job, its last call, its setbacks.

Covers: when a slot is lost, when it is restarted, when it is given up.
Does not: run jobs or ask Spark (tfos.many.run), give out items (tfos.many.queue).
Threads: none; its owner serialises the calls.  The time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfos.many.queue import SlotAttempt
from tfos.spark.jobs import SparkJob

SILENT_S = 30.0
"""Seconds without a call after which a slot is lost; longer than the slot's lease of the driver."""
MAX_SETBACKS = 4
"""Number of consecutive setbacks, without an ended item of the slot in between, after which it is
given up."""
PAUSE_S = 1.0
"""Pause before a slot whose job has failed is restarted; then 2 s, 4 s."""
AGAIN_S = 60.0
"""Pause before a given-up slot is restarted, if only it has the rows of its items."""


@dataclass(slots=True)
class SlotState:
    """One slot."""

    job: SparkJob[Any] | None = None
    """The Spark job that runs this slot, or None."""
    starts: int = 0
    seen_s: float | None = None
    """When its process last called, in monotonic seconds; None: there is no process."""
    host: str = "a host that only Spark's UI names, in the failed job"
    has_trained: bool = False
    """Whether its process ever called."""
    leaving: SlotAttempt | None = None
    """Its process that has left: its values are in transit, and it no longer beats."""
    at_work_s: float = 0.0
    """When the task of a leaving slot was last known to be running."""
    has_handed_over: bool = False
    """Whether its last job returned its values normally, and its next process has not called
    yet."""
    setbacks: int = 0
    """Number of failed jobs, silences and functions that did not begin, since its last ended
    item."""
    reason: str = ""
    """Reason of the last setback."""
    resumes_s: float = 0.0
    """Earliest time of its next start."""
    is_told: bool = False
    """Whether it was given up before."""
    is_last_round: bool = False
    """Whether it was given up, and is restarted because no other slot trains any more."""

    @property
    def is_given_up(self) -> bool:
        """Whether it gets no items and is not restarted."""
        return self.setbacks >= MAX_SETBACKS

    def hear(self, now_s: float, *, attempt: SlotAttempt, is_leaving: bool = False) -> None:
        """Note a call of its process.

        Args:
            now_s: monotonic seconds.
            attempt: the process.
            is_leaving: whether it has said that it ends.
        """
        self.seen_s, self.has_trained, self.has_handed_over = now_s, True, False
        if self.leaving is not None and attempt.attempt > self.leaving.attempt:
            self.leaving = None
        if is_leaving:
            self.leaving, self.at_work_s = attempt, now_s

    def is_silent(self, now_s: float) -> bool:
        """Whether its process is lost; a leaving process may be silent."""
        return self.leaving is None and self.seen_s is not None and now_s - self.seen_s > SILENT_S

    def is_stuck(self, now_s: float, wait_s: float) -> bool:
        """Whether its process has left while its task, which has the values, runs nowhere.

        If its executor is lost, Spark restarts the task on another one, if there is one.

        Args:
            now_s: monotonic seconds.
            wait_s: how long it may be without a task. Python may still read its values for a few
                seconds after the task's end.
        """
        wait_s = max(wait_s, SILENT_S)
        if self.leaving is None or self.job is None or now_s - self.at_work_s <= wait_s / 2:
            return False
        if self.job.has_active_task() is not False:
            self.at_work_s = now_s
        return now_s - self.at_work_s > wait_s

    def lose(self) -> None:
        """Note that its process is lost, and expect nothing from it."""
        self.seen_s = self.leaving = None

    def forgive(self, late_s: float, now_s: float) -> None:
        """Subtract time in which the driver itself stood still from its silence.

        Args:
            late_s: the time to subtract, in seconds.
            now_s: monotonic seconds.
        """
        self.at_work_s = min(now_s, self.at_work_s + late_s)
        if self.seen_s is not None:
            self.seen_s = min(now_s, self.seen_s + late_s)

    def set_back(self, reason: str, now_s: float, *, pauses: bool) -> bool:
        """Count a setback; return whether it is given up, for the first time.

        Args:
            reason: what happened, and what to do.
            now_s: monotonic seconds.
            pauses: whether its next start waits; a start that fails at once would fill the log.
        """
        self.setbacks += 1
        self.reason = reason
        if self.is_given_up:
            self.resumes_s = now_s + AGAIN_S
        elif pauses:
            self.resumes_s = now_s + PAUSE_S * 2 ** (self.setbacks - 1)
        is_told, self.is_told = self.is_told, self.is_told or self.is_given_up
        return self.is_given_up and not is_told

    def item_ended(self) -> None:
        """Note that it works: an item has ended."""
        self.setbacks, self.is_last_round = 0, False

    def try_again(self, now_s: float, *, is_last: bool) -> None:
        """Restart a slot that was given up: its host may have recovered.

        Args:
            now_s: monotonic seconds.
            is_last: whether no other slot runs, so that waiting is of no use.
        """
        if not self.is_given_up or self.is_last_round:
            return
        if is_last:
            self.setbacks, self.resumes_s, self.is_last_round = 0, now_s, True
        elif now_s >= self.resumes_s:
            self.setbacks = MAX_SETBACKS - 1

    def why_given_up(self, slot: int, *, is_alone: bool) -> str:
        """Return the message for the user.

        Args:
            slot: its number.
            is_alone: whether no other slot has the rows of its items.
        """
        again = f"started again every {AGAIN_S:.0f} s while others train" if is_alone else ""
        return (
            f"slot {slot} of map_train has failed {self.setbacks} times one after the other, the "
            f"last time on {self.host}, without an item that ended, and is "
            f"{again or 'not started again'}: {self.reason}"
        )
