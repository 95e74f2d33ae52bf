"""The process of one slot: draws items, has them trained, keeps their values, reports.

Covers: time limits, fresh trainers after a death or growth, the values' files, the driver's lease,
the end of everything when the task or the driver is gone.
Does not: unpickle anything or run user code (tfos.many.slot.trainer).
Runs in: a process that the slot's task has started, in a session of its own, since PySpark's daemon
signals its process group and kills its workers.
Threads: the main thread trains; `tfos-watch` beats and ends the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import struct
import threading
import time
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from rpc.linux_calls import memfd_create
from tfos.errors import ControlError, ControlRefused
from tfos.many.messages import (
    Draw,
    Ended,
    Ending,
    EndSlot,
    Order,
    Returned,
    SlotBeat,
    Train,
    TrainItem,
    WaitForItem,
)
from tfos.many.results import ResultHead, ResultsDirectory
from tfos.many.slot.client import ManyClient
from tfos.many.slot.specs import SlotSpec
from tfos.many.slot.trainer_process import TrainerProcess
from tfos.node import procfs, whole_files
from tfos.node.child_log import start_log
from tfos.node.process_exit import leave

_log = logging.getLogger(__name__)

LEASE_S = 20.0
"""The slot ends when the driver has not answered for this long."""
_BEAT_S = 1.0
_AGAIN_S = 0.1
_WRITE_AGAIN_S = (0.5, 2.0, 8.0)
"""Delays before a failed write of a value is repeated."""
_BRIEF_S = 1.0
"""After trainings shorter than this, the trainer gets its next item before the current one ends."""
_START_AGAIN_S = (1.0, 2.0, 4.0)
"""Pauses after a process that did not begin: a host without memory or processes may have some
then. After one more, the driver gives up the slot."""
_STDERR = 2
SPOOL_HEAD = struct.Struct("<QQ")
"""Item and length before each value in the spool."""


@dataclass(slots=True)
class _Ordered:
    """A training that the trainer has or will get."""

    item: int
    values_fd: int = 0
    """File that takes its value; 0: not ordered."""
    started_s: float = 0.0
    """Monotonic seconds."""


class Slot:
    """One slot's work.

    Args:
        spec: the process's document.
        client: client of the driver.
    """

    def __init__(self, spec: SlotSpec, client: ManyClient) -> None:
        self._spec = spec
        self._client = client
        self._results = (
            ResultsDirectory(spec.settings.results_dir) if spec.settings.results_dir else None
        )
        self._trainer: TrainerProcess | None = None
        self._values_fds = (memfd_create("tfos-value"), memfd_create("tfos-value"))
        """Two files: the trainer continues with the next item while a value is read."""
        self._turn = 0
        self._not_begun = 0
        """Number of consecutive processes that reached no item."""
        self._is_brief = False
        """Whether the last training was so short that a pause after it would matter."""
        self._lock = threading.Lock()
        self._ready: list[Ended] = []
        """Ended attempts whose values are kept, not reported yet."""
        self._holding: dict[int, int] = {}
        """Attempts by item whose end the driver has not confirmed."""
        self._spooled_bytes = 0
        self._kept: tuple[Ended, bytes] | None = None
        """A value to be written while the next item is trained."""
        self._answered_s = time.monotonic()

    def run(self) -> None:
        """Train until the driver has no more items."""
        threading.Thread(target=self._watch, name="tfos-watch", daemon=True).start()
        while not isinstance(order := self._next_order(), EndSlot) or self._holding:
            if isinstance(order, Train):
                self._train_from(order.item)
            elif isinstance(order, EndSlot):  # the watch may be sending a report, for seconds
                time.sleep(_AGAIN_S)
            self._keep()
        if self._trainer is not None:
            self._trainer.close(kill=False)
        self._say_leaving()

    @property
    def _is_full(self) -> bool:
        """Whether its job should bring its values before it continues, in another process."""
        return self._spooled_bytes >= self._spec.settings.hand_over_bytes

    def _next_order(self) -> Order:
        return EndSlot() if self._is_full else self._draw()

    def _say_leaving(self) -> None:
        """Tell the driver that this slot ends, so that it does not count as silent."""
        beat = SlotBeat(self._spec.slot, self._spec.attempt, is_leaving=True)
        while True:
            try:
                self._client.beat(beat)
            except ControlRefused:
                return  # the driver misses its beats
            except ControlError:  # the watch ends this process if that lasts
                time.sleep(_AGAIN_S)
            else:
                return

    def _train_from(self, item: int) -> None:
        """Train an item, and the items that the driver sends ahead meanwhile."""
        current: _Ordered | None = _Ordered(item)
        while current is not None:
            if not current.values_fd:
                trainer = self._living_trainer(current.item)
                if trainer is None or not self._order(trainer, current):
                    return
            elif (trainer := self._trainer) is None:
                return
            is_next_here = self._is_brief and not self._is_full and not trainer.has_grown
            ahead = self._order_ahead(trainer) if is_next_here else None
            self._keep()
            current = self._finish(trainer, current, ahead)

    def _order_ahead(self, trainer: TrainerProcess) -> _Ordered | None:
        order = self._draw(is_ahead=True)
        if not isinstance(order, Train):
            return None
        ahead = _Ordered(order.item)
        return ahead if self._order(trainer, ahead) else None

    def _order(self, trainer: TrainerProcess, what: _Ordered) -> bool:
        """Order the training of an item; False if the item has ended before it began."""
        place = self._spec.places.get(what.item)
        if place is None:
            error = "the rows of its group were not found again; cache the DataFrame"
            self._put_ended(Ended(what.item, Ending.DIED, 0.0, error=error))
            return False
        self._turn = 1 - self._turn
        what.values_fd = self._values_fds[self._turn]
        what.started_s = time.monotonic()
        trainer.order(TrainItem(*place, what.values_fd))
        return True

    def _finish(
        self, trainer: TrainerProcess, current: _Ordered, ahead: _Ordered | None
    ) -> _Ordered | None:
        """Wait for the end of a training; return the training that follows."""
        got = trainer.outcome(current.item, current.started_s, self._spec.settings.timeout_s)
        if ahead is not None:
            ahead.started_s = time.monotonic()
        self._is_brief = got.seconds < _BRIEF_S
        if isinstance(got, Returned):
            value = whole_files.read_at(current.values_fd, got.length, 0)
            self._keep()
            self._kept = (Ended(current.item, Ending.RETURNED, got.seconds, got.metrics), value)
            if self._results is None:
                self._keep()
            return ahead
        if got.how in (Ending.DIED, Ending.TIMED_OUT):
            self._end_trainer()
            if ahead is not None:
                ahead.values_fd = 0
        self._put_ended(got)
        return ahead

    def _draw(self, *, is_ahead: bool = False) -> Order:
        """Report and ask; the watch ends this process if the driver does not answer for long."""
        while True:
            ended, holding = self._take_ready()
            slot, attempt, host = self._spec.slot, self._spec.attempt, self._spec.executor.host
            draw = Draw(slot, attempt, ended, holding, is_ahead, host)
            try:
                order = self._client.draw(draw)
            except ControlRefused as error:
                _end_at_once(str(error))
            except ControlError:
                self._put_ready(ended)
                if is_ahead:
                    return WaitForItem()
                time.sleep(_AGAIN_S)
                continue
            self._answered(ended, order)
            return order

    def _answered(self, ended: tuple[Ended, ...], order: Order | None) -> None:
        self._answered_s = time.monotonic()
        with self._lock:
            for each in ended:
                if self._holding.get(each.item) == each.attempt:  # else it was drawn again
                    del self._holding[each.item]
            if isinstance(order, Train):
                self._holding[order.item] = order.attempt

    def _keep(self) -> None:
        """Write the waiting value, then have its end reported."""
        if self._kept is None:
            return
        (ended, value), self._kept = self._kept, None
        if self._results is None and len(value) > self._spec.settings.max_value_bytes:
            self._put_ended(
                msgspec.structs.replace(
                    ended,
                    how=Ending.NOT_PICKLABLE,
                    error=f"its value has {len(value)} bytes, and Spark brings at most "
                    f"{self._spec.settings.max_value_bytes} to the driver at once "
                    "(0.7 of spark.driver.maxResultSize, a sixth of spark.driver.memory, 1.7 GiB): "
                    "pass results_dir, or save it in the function and return the path",
                )
            )
            return
        if self._results is None and self._is_too_much(value):
            error = "its value came behind others that are handed over first"
            self._put_ended(msgspec.structs.replace(ended, how=Ending.NOT_BEGUN, error=error))
            return
        try:
            self._store(ended, value)
        except Exception as error:  # noqa: BLE001 - a file system's client may raise its own
            where = self._spec.settings.results_dir or self._spec.executor.scratch_dir
            ended = msgspec.structs.replace(
                ended,
                how=Ending.NOT_KEPT,
                error=f"its value of {len(value)} bytes was not kept in {where}: "
                f"{type(error).__name__}: {error}",
            )
        self._put_ended(ended)

    def _is_too_much(self, value: bytes) -> bool:
        """Whether the driver could not take a value that was drawn ahead with those that wait."""
        # Only a full slot may give an item back: the others would draw it again, and never end.
        total = self._spooled_bytes + len(value)
        return self._is_full and total > self._spec.settings.max_job_bytes

    def _store(self, ended: Ended, value: bytes) -> None:
        if self._results is None:
            self._spool(ended.item, value)
            return
        head = ResultHead(
            item=self._spec.names[ended.item],
            seconds=ended.seconds,
            metrics=ended.metrics,
            digest=self._spec.digests[ended.item],
        )
        for delay_s in _WRITE_AGAIN_S:
            with contextlib.suppress(Exception):  # a training costs more than a few seconds
                self._results.write(head, value)
                return
            time.sleep(delay_s)
        self._results.write(head, value)

    def _spool(self, item: int, value: bytes) -> None:
        file, head = self._spec.spool_fd, SPOOL_HEAD.pack(item, len(value))
        try:
            whole_files.write_at(file, head, self._spooled_bytes)
            whole_files.write_at(file, value, self._spooled_bytes + len(head))
        except OSError:
            os.ftruncate(file, self._spooled_bytes)  # later values must not follow half a value
            raise
        self._spooled_bytes += len(head) + len(value)

    def _living_trainer(self, item: int) -> TrainerProcess | None:
        """Return the trainer; a fresh one if it has ended or grown, None if that does not start."""
        if (trainer := self._trainer) is not None and (trainer.has_ended or trainer.has_grown):
            if not trainer.has_ended:
                slot = self._spec.slot
                _log.info("slot %d: a fresh process, as the last one has grown by 1 GiB", slot)
            self._end_trainer(kill=trainer.has_ended)
        if self._trainer is not None:
            return self._trainer
        try:
            self._trainer = TrainerProcess(self._spec, self._values_fds)
            failed = self._trainer.await_ready(item)
        except OSError as error:
            failed = Ended(item, Ending.NOT_BEGUN, 0.0, error=f"no process: {error}")
        if failed is None:
            self._not_begun = 0
            return self._trainer
        self._end_trainer()
        self._put_ended(failed)
        pauses_s = _START_AGAIN_S[self._not_begun : self._not_begun + 1]
        self._not_begun += 1
        for pause_s in pauses_s:  # the watch continues to beat and report
            time.sleep(pause_s)
        return None

    def _end_trainer(self, *, kill: bool = True) -> None:
        if self._trainer is not None:
            self._trainer.close(kill=kill)
            self._trainer = None

    def _take_ready(self) -> tuple[tuple[Ended, ...], tuple[int, ...]]:
        with self._lock:
            ready, self._ready = tuple(self._ready), []
            return ready, tuple(self._holding)

    def _put_ended(self, ended: Ended) -> None:
        with self._lock:
            attempt = self._holding[ended.item]
            self._ready.append(msgspec.structs.replace(ended, attempt=attempt))

    def _put_ready(self, ended: tuple[Ended, ...]) -> None:
        with self._lock:
            self._ready += ended

    def _watch(self) -> None:
        """Beat; end this process once the task or the driver is gone, or the run is over."""
        poll = select.poll()
        poll.register(self._spec.task_fd, select.POLLIN)
        last = ""
        while True:
            if poll.poll(1000 * _BEAT_S):
                _end_at_once()  # the task sends nothing else: it has ended or was killed
            ended, _ = self._take_ready()
            try:
                reply = self._client.beat(SlotBeat(self._spec.slot, self._spec.attempt, ended))
            except ControlRefused as error:
                _end_at_once(str(error))
            except ControlError as error:
                self._put_ready(ended)
                last = str(error)
            else:
                self._answered(ended, None)
                if reply.stop:
                    _end_at_once()  # the run is over
            if time.monotonic() - self._answered_s > LEASE_S:
                _end_at_once(
                    f"the driver at {self._spec.settings.driver_address} has not answered for "
                    f"{LEASE_S:.0f} s; it is gone, or this host cannot reach it ({last})"
                )


def _end_at_once(reason: str = "") -> NoReturn:
    """Kill its children, report the reason if possible, and end."""
    procfs.kill_descendants()
    with contextlib.suppress(OSError):
        # A pipe without a reader delays no end.
        if reason and select.select([], [_STDERR], [], 0)[1]:
            os.write(_STDERR, f"this slot of map_train ends: {reason}\n".encode())
    os._exit(1)


def main(body: bytes) -> None:
    """Run one slot, and end the process.

    Args:
        body: a SlotSpec, msgpack.
    """
    start_log()
    procfs.become_subreaper()
    spec = msgspec.msgpack.decode(body, type=SlotSpec)
    Slot(spec, ManyClient(spec.settings, spec.keys)).run()
    os.write(spec.task_fd, b"ended")
    leave()
