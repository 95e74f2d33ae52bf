"""ProgressMeter: a worker's newest numbers, and how long its epoch's steps have taken.

Covers: the last report of `ctx.report_progress`; steps and seconds of the running epoch, by this
process's clock: a heartbeat is up to two seconds old, and short epochs end between two heartbeats.
Does not: send (tfos.worker.process), add up workers (tfos.console.progress).
Threads: any; `_lock` guards all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping


class ProgressMeter:
    """Numbers of one worker.

    An epoch begins with the first step that is reported after `end_epoch`, or with another value of
    `epoch`. It is measured from the end of its first step, in which TensorFlow compiles.

    Args:
        clock: clock of monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._epochs_begun = 0
        self._is_new = True
        self._first_s = 0.0
        self._first_steps = 0.0
        self._rows_before = self._rows_per_epoch = 0.0

    def note(self, values: Mapping[str, float]) -> None:
        """Replace the numbers.

        Args:
            values: numbers by name; `steps` and `rows` are this process's totals, `epoch` from 1.
        """
        with self._lock:
            before, self._values = self._values, dict(values)
            if values.get("epoch", 0.0) != before.get("epoch", 0.0):
                self._is_new = True
            steps = values.get("steps", 0.0)
            if self._is_new and steps not in (0.0, before.get("steps", 0.0)):
                self._is_new = False
                self._epochs_begun += 1
                self._first_s, self._first_steps = self._clock(), steps
                rows = before.get("rows", 0.0) if steps > before.get("steps", 0.0) else 0.0
                self._rows_per_epoch, self._rows_before = max(0.0, rows - self._rows_before), rows

    def end_epoch(self) -> None:
        """Note that the epoch's rows are trained: the next step belongs to another epoch.

        A loop that reports its epochs, as `fit` does, says so itself.
        """
        with self._lock:
            if "epoch" not in self._values:
                self._is_new = True

    def read(self) -> dict[str, float]:
        """Return the reported numbers and those of this meter.

        `at_s`: this process's clock. `epochs_begun`: epochs with at least one step so far.
        `epoch_steps`, `epoch_s`: steps of the newest one after its first, and seconds since then.
        `epoch_rows`: rows of the newest one. `rows_per_epoch`: rows of the one before, or 0.
        """
        with self._lock:
            now_s = self._clock()
            found = {**self._values, "at_s": now_s, "epochs_begun": float(self._epochs_begun)}
            if self._epochs_begun:
                found["epoch_steps"] = self._values.get("steps", 0.0) - self._first_steps
                found["epoch_s"] = now_s - self._first_s
                found["epoch_rows"] = self._values.get("rows", 0.0) - self._rows_before
                found["rows_per_epoch"] = self._rows_per_epoch
            return found
