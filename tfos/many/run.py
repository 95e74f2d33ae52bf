"""The driver's side of one `map_train`: the slots' jobs, their calls, the end.

Covers: one Spark job per slot, repeated after a failure; silent slots; the wait for the first
slot; progress; values as Spark's results; the end of everything.
Does not: decide which item comes next (tfos.many.queue).
Runs in: the driver.
Threads: one per job, one per call of a slot, and `tfos-many`; `_changed` guards all state.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from rpc.printable import visible
from tfos.console.console import Console
from tfos.console.progress_lines import ProgressLines
from tfos.errors import MapTrainError, NotEnoughSlots
from tfos.many import slot_state
from tfos.many.messages import (
    BeatReply,
    Draw,
    Ended,
    Ending,
    EndSlot,
    Order,
    SlotBeat,
    WaitForItem,
)
from tfos.many.queue import SlotAttempt, TrainingQueue, TrainingState
from tfos.many.slot_state import SlotState
from tfos.spark.jobs import (
    MAX_RESULT_SIZE,
    SparkJob,
    advised_reason_of,
    inheriting,
    was_cancelled,
)

_HOLD_S = 2.0
"""Longest time before an idle slot's call is answered."""
_LOOK_S = 0.2
_PAUSE_S = 2.0
"""A check that is later than this shows that the driver itself stood still."""
_LEAVE_S = 10.0
"""Seconds for slots to leave on their own if all values are safe."""
_MAX_NOT_KEPT = 4
"""Number of consecutive values that were not kept, after which the run ends."""
_MAX_LOSSES = 4
"""Number of times that one item's value may be lost with its slot; each time it is trained
again."""
_CANCEL_S = 10.0
_LATER_ATTEMPT = 1000
"""Offset of the attempts of a slot's next job: Spark counts its own from 0."""


class Closable(Protocol):
    """What a run closes at its end: the server for its slots' calls."""

    def close(self) -> None:
        """End all calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotJobs:
    """How the driver runs a slot: the job that returns its values."""

    sc: Any
    run_id: str
    num_slots: int
    action: Callable[[int, int], list[tuple[int, bytes]]]
    """Runs the job of a slot, given its number and first attempt."""
    wait_s: float
    """Seconds without any slot after which the run fails."""
    offer: Callable[[], str]
    """Returns what Spark offers now, in words."""
    are_slots_held: Callable[[], bool]
    """Returns whether executors exist and this program's tasks hold all their slots."""


class MapRun:
    """One run. `start`, then `wait`; `cancel` at any time.

    Args:
        queue: queue of its items.
        console: shows progress.
        check: called with the first item whose value each process of a slot has put into a file;
            may take seconds. Its exception ends the run. None: values are not in files.
    """

    def __init__(
        self,
        queue: TrainingQueue,
        console: Console,
        check: Callable[[int], None] | None = None,
    ) -> None:
        self.values: dict[int, bytes] = {}
        """Pickled values by item; empty if files hold them."""
        self.error: BaseException | None = None
        """Why the run ended early."""
        self._queue = queue
        self._console = console
        self._check = check
        self._checked: set[SlotAttempt] = set()
        self._changed = threading.Condition()
        self._jobs: SlotJobs
        self._server: Closable | None = None
        self._slots: list[SlotState] = []
        self._any_seen_s = self._looked_s = time.monotonic()
        self._not_kept = 0
        self._is_behind_told = False
        self._is_over = False
        self._stopping = False
        self._started_s = time.monotonic()
        self._over_s: float | None = None

    @property
    def ended_items(self) -> list[int]:
        """Read only: see TrainingQueue."""
        return self._queue.ended_items

    @property
    def busy_share(self) -> float:
        """Share of the slots' time, from the start until now or the end, in which they trained."""
        with self._changed:
            span_s = (self._over_s or time.monotonic()) - self._started_s
            slots = max(1, sum(state.has_trained for state in self._slots))
            return min(1.0, self._queue.busy_s / max(1e-9, slots * span_s))

    def start(self, server: Closable, jobs: SlotJobs) -> None:
        """Submit the jobs; if that fails, none of them continues.

        Args:
            server: a started server, with this run as its handler.
            jobs: jobs of its slots.
        """
        self._server, self._jobs = server, jobs
        self._slots = [SlotState() for _ in range(jobs.num_slots)]
        self._started_s = self._any_seen_s = self._looked_s = time.monotonic()
        try:
            with self._changed:
                for slot in range(jobs.num_slots):
                    if self._queue.has_work(slot):
                        self._submit(slot)
            watch = inheriting(jobs.sc, self._watch)  # it restarts slots
            threading.Thread(target=watch, name="tfos-many", daemon=True).start()
        except BaseException:
            self._end()
            raise

    def read(self, look: Callable[[TrainingQueue], Any]) -> Any:
        """Return the result of a function of the queue."""
        with self._changed:
            return look(self._queue)

    def wait(self, is_enough: Callable[[], bool] | None, timeout_s: float | None) -> bool:
        """Wait for the end, or for a condition; return whether it occurred in time.

        Args:
            is_enough: checked at each change, under the run's lock; None: wait for the end.
            timeout_s: seconds to wait; None or infinity: no limit; NaN: as 0.
        """
        if timeout_s is not None:
            timeout_s = min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_over or (is_enough is not None and is_enough()), timeout_s
            )

    @property
    def is_over(self) -> bool:
        """Whether no part of it runs any more."""
        return self._is_over

    def cancel(self, error: BaseException | None = None) -> None:
        """End all slots and their jobs.

        Args:
            error: the reason, for callers that wait.
        """
        with self._changed:
            if not self._is_over:
                self._fail(error)
                self._changed.notify_all()

    def on_draw(self, draw: Draw) -> Order:
        """Answer an idle slot, after a wait if an item may come soon."""
        slot = SlotAttempt(draw.slot, draw.attempt)
        deadline_s = time.monotonic() + _HOLD_S
        if not self._is_seen_first(slot, draw.ended):
            return EndSlot()
        with self._changed:
            self._slots[slot.slot].host = draw.host
            self._heard(slot, draw.ended)
            while True:
                if self._stopping or self._slots[slot.slot].is_given_up:
                    return EndSlot()
                num_ended = len(self._queue.ended_items)
                order = self._queue.draw(slot, draw.holding, is_ahead=draw.is_ahead)
                if len(self._queue.ended_items) > num_ended:  # of the previous process
                    self._changed.notify_all()
                left_s = 0.0 if draw.is_ahead else deadline_s - time.monotonic()
                if not isinstance(order, WaitForItem) or left_s <= 0:
                    return order
                self._changed.wait(left_s)

    def on_beat(self, beat: SlotBeat) -> BeatReply:
        """Answer a slot that is alive."""
        slot = SlotAttempt(beat.slot, beat.attempt)
        if not self._is_seen_first(slot, beat.ended):
            return BeatReply(stop=True)
        with self._changed:
            self._heard(slot, beat.ended, is_leaving=beat.is_leaving)
            return BeatReply(self._stopping)

    def _is_seen_first(self, slot: SlotAttempt, ended: tuple[Ended, ...]) -> bool:
        """Check a result of this process before it counts; without the lock, since it reads a file.

        Each process may be on a different host, with its own directory. False: the result does not
        count, and the run ends.
        """
        done = [each.item for each in ended if each.how is Ending.RETURNED]
        if self._check is None or not done or slot in self._checked:
            return True
        try:
            self._check(done[0])
        except Exception as error:  # noqa: BLE001 - raised to those who wait
            self.cancel(error)
            return False
        self._checked.add(slot)
        return True

    def _heard(
        self, slot: SlotAttempt, ended: tuple[Ended, ...], *, is_leaving: bool = False
    ) -> None:
        state, self._any_seen_s = self._slots[slot.slot], time.monotonic()
        leaves = is_leaving and self._queue.is_newest(slot)
        state.hear(self._any_seen_s, attempt=slot, is_leaving=leaves)
        for each in map(_without_escapes, ended):
            if not self._queue.ended(slot, each):
                continue
            if each.how is Ending.NOT_BEGUN:
                self._set_back(slot.slot, f"the function has not begun: {each.error}")
                continue
            state.item_ended()
            self._count_kept(each)
        if ended:
            self._changed.notify_all()

    def _count_kept(self, ended: Ended) -> None:
        """End a run whose values cannot be stored."""
        if ended.how is Ending.NOT_KEPT:
            self._not_kept += 1
        elif ended.how is Ending.RETURNED:
            self._not_kept = 0
        if self._not_kept >= _MAX_NOT_KEPT:
            self._fail(
                MapTrainError(
                    f"{self._not_kept} values one after the other were trained and not kept; the "
                    f"last one: {ended.error}. Make room there, or pass a results_dir that has some"
                )
            )

    def _submit(self, slot: int) -> None:
        state, run_id = self._slots[slot], self._jobs.run_id
        count, state.starts, state.leaving = state.starts, state.starts + 1, None
        job = SparkJob(
            self._jobs.sc,
            f"tfos-many-{run_id}-{slot}-{count}",
            f"tfos map_train {run_id}: slot {slot}",
            lambda: self._jobs.action(slot, count * _LATER_ATTEMPT),
            lambda job: self._job_ended(slot, job),
        )
        state.job = job
        job.start()

    def _job_ended(self, slot: int, job: SparkJob[list[tuple[int, bytes]]]) -> None:
        with self._changed:
            state = self._slots[slot]
            state.job = state.seen_s = None
            state.has_handed_over = job.error is None
            if job.error is None:
                values = dict(job.result())
                self.values.update(values)
                self._queue.slot_ended(slot, values)
            elif not self._stopping:
                reason = advised_reason_of(job.error)
                self._queue.slot_lost(slot, f"slot {slot}: {reason}")
                if not job.is_cancelled:
                    self._set_back(slot, f"its job failed: {reason}", pauses=True)
                if was_cancelled(job.error) and not job.is_cancelled:
                    failure = f"the job of slot {slot} was cancelled: {reason}"
                else:
                    failure = self._failure_of(slot, reason)
                if failure:
                    self._fail(MapTrainError(failure))
            self._changed.notify_all()

    def _set_back(self, slot: int, reason: str, *, pauses: bool = False) -> None:
        """Count a setback of a slot; warn if it is given up.

        Args:
            slot: its number.
            reason: what happened, and what to do.
            pauses: whether its next start waits.
        """
        state = self._slots[slot]
        if state.set_back(reason, time.monotonic(), pauses=pauses):
            is_alone = self._queue.has_homes
            self._console.warn(state.why_given_up(slot, is_alone=is_alone), waits=False)

    def _failure_of(self, slot: int, reason: str) -> str:
        """Return why the failure of a job ends the run; empty: the run continues."""
        if MAX_RESULT_SIZE in reason:
            return (
                f"the values of slot {slot} are too large to come back: {reason}; or pass "
                "results_dir"
            )
        if self._queue.most_losses >= _MAX_LOSSES:
            return (
                f"values were lost {_MAX_LOSSES} times with their slots, and their items trained "
                f"again each time; the last time: {reason}. Pass results_dir: what is done stays "
                "done then"
            )
        return ""

    def _fail(self, error: BaseException | None) -> None:
        self.error = self.error or error
        self._stopping = True

    def _watch(self) -> None:
        lines = ProgressLines(self._console)
        try:
            while not self._step():
                lines.show(self._line())
                with self._changed:
                    self._changed.wait(_LOOK_S)
        except Exception as error:  # noqa: BLE001 - raised to those who wait
            self.cancel(error)
        finally:
            self._end(lines)

    def _step(self) -> bool:
        """Give up lost slots, start missing ones; return whether the run should end."""
        with self._changed:
            now_s = time.monotonic()
            if self._stopping:
                return True
            self._forgive_pause(now_s)
            for slot, state in enumerate(self._slots):
                if state.is_silent(now_s):
                    self._fell_silent(slot)
                elif state.is_stuck(now_s, self._jobs.wait_s):
                    waited_s = max(self._jobs.wait_s, slot_state.SILENT_S)
                    stuck = f"its task has run nowhere for {waited_s:.0f} s"
                    self._lose(slot, f"slot {slot} had trained, and {stuck}: its executor is lost")
            if self._queue.is_complete:
                self._over_s = self._over_s or now_s
                if self._queue.is_durable and now_s - self._over_s > _LEAVE_S:
                    return True
                # The rest waits for a free slot of Spark, or is lost.
                return not any(each.job and each.seen_s is not None for each in self._slots)
            self._over_s = None
            if now_s - self._any_seen_s > self._jobs.wait_s and self._computes():
                self._any_seen_s = now_s
            if now_s - self._any_seen_s > self._jobs.wait_s:
                self._fail(
                    NotEnoughSlots(
                        f"no slot has trained for {self._jobs.wait_s:.0f} s: {self._jobs.offer()}. "
                        "End other jobs or add executors; if it is this run's tasks that hold the "
                        "slots, their processes have not reached the driver yet: see the "
                        "executors' logs, set TFOS_SERVER_PORT to a port that they may call, or "
                        "raise slot_wait_s."
                    )
                )
                return True
            return self._submit_missing(now_s)

    def _computes(self) -> bool:
        """Whether a slot's task runs, which it may for long before its process starts.

        Spark may be recomputing lost rows of groups. If no slot was ever heard, running tasks may
        also have processes that cannot reach the driver.
        """
        if not any(each.has_trained for each in self._slots):
            return False
        jobs = [each.job for each in self._slots if each.job is not None]
        return any(job.has_active_task() for job in jobs) or self._is_behind_others()

    def _is_behind_others(self) -> bool:
        """Whether slots that have handed over their values wait behind jobs that took their place.

        Spark gives a free slot to the job that was submitted first.
        """
        queued = any(each.has_handed_over and each.job is not None for each in self._slots)
        if not queued or not self._jobs.are_slots_held():
            return False
        if not self._is_behind_told:
            self._console.warn(
                "map_train waits: other jobs of this program hold all of Spark's slots. It goes on "
                "once one is free; end those jobs, or add executors",
                waits=False,
            )
        self._is_behind_told = True
        return True

    def _submit_missing(self, now_s: float) -> bool:
        """Start the missing jobs; return whether no slot is left to train the waiting items."""
        idle = [slot for slot, state in enumerate(self._slots) if state.job is None]
        missing = [slot for slot in idle if self._queue.has_work(slot)]
        if self._queue.has_homes:
            self._try_again(missing, now_s, is_any_there=len(idle) < len(self._slots))
        left = [slot for slot in missing if not self._slots[slot].is_given_up]
        for slot in left:
            if now_s >= self._slots[slot].resumes_s:
                self._submit(slot)
        if left or not missing or len(idle) < len(self._slots):
            return False
        waiting = self._queue.count(TrainingState.WAITING)
        why = self._slots[missing[0]].why_given_up(missing[0], is_alone=False)
        self._fail(MapTrainError(f"{why}; no other slot trains the {waiting} items that wait"))
        return True

    def _try_again(self, missing: list[int], now_s: float, *, is_any_there: bool) -> None:
        """Restart slots that were given up, if no other slot has the rows of their items."""
        states = [self._slots[slot] for slot in missing]
        is_last = not is_any_there and all(state.is_given_up for state in states)
        for state in states:
            state.try_again(now_s, is_last=is_last)

    def _fell_silent(self, slot: int) -> None:
        """Count a silent slot as lost, and end its job."""
        silent = f"silent for {slot_state.SILENT_S:.0f} s"
        self._set_back(
            slot,
            f"it was {silent}. Look there for a process that is stopped, swaps or waits for a "
            "disk, and for calls to the driver that the network loses",
        )
        self._lose(slot, f"slot {slot} was {silent}")

    def _lose(self, slot: int, reason: str) -> None:
        """Return the items of a slot, and end its job; the end of the job restarts the slot."""
        state = self._slots[slot]
        state.lose()
        self._queue.slot_lost(slot, reason)
        if state.job is not None:
            end = functools.partial(state.job.cancel, _CANCEL_S)  # waits for an end that needs us
            threading.Thread(target=end, name="tfos-many-cancel", daemon=True).start()
        self._changed.notify_all()

    def _forgive_pause(self, now_s: float) -> None:
        """Subtract time in which the driver itself stood still, as after Ctrl-Z, from all silence.

        Args:
            now_s: monotonic seconds of this check.
        """
        late_s = now_s - self._looked_s - _LOOK_S
        self._looked_s = now_s
        if late_s < _PAUSE_S:
            return
        self._any_seen_s = min(now_s, self._any_seen_s + late_s)
        for state in self._slots:
            state.forgive(late_s, now_s)

    def _end(self, lines: ProgressLines | None = None) -> None:
        """End everything that still runs; waiting callers continue after it.

        Args:
            lines: shows the last line; None: there were none.
        """
        deadline_s = time.monotonic() + _CANCEL_S
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            jobs = [state.job for state in self._slots if state.job is not None]
        for job in jobs:
            job.cancel(max(0.1, deadline_s - time.monotonic()))
        if self._server is not None:
            self._server.close()
        with self._changed:
            self._over_s = self._over_s or time.monotonic()
            self._queue.give_up()
        if lines is not None:
            lines.end(self._line())
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _line(self) -> str:
        with self._changed:
            count = self._queue.count
            total = len(self._queue.table)
            failed = count(TrainingState.FAILED)
            return (
                f"map_train: {count(TrainingState.DONE)} of {total} done"
                + (f", {failed} failed" if failed else "")
                + f", {count(TrainingState.TRAINING)} in training, slots {self.busy_share:.0%} busy"
            )


def _without_escapes(ended: Ended) -> Ended:
    """Return a report whose error cannot steer the user's terminal."""
    return msgspec.structs.replace(ended, error=visible(ended.error, keep="\n\t"))
