"""SeenProgress: a worker's numbers for the driver, from main_fun or else from its data.

Covers: which of the two reports counts; the rows of a `fit` whose callbacks cannot count them; the
steps and rows of earlier fits: each counts from 0.
Does not: count (tfos.keras.data.lone_progress), measure (tfos.worker.reports.progress_meter).
Threads: any; `_lock` guards all.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

_logger = logging.getLogger(__name__)


class SeenProgress:
    """Progress of one process.

    Args:
        tell: function called with each report that counts: numbers by name, with the process's own
            `steps` and `rows`.
    """

    def __init__(self, tell: Callable[[dict[str, float]], object]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._is_reported = False
        self._before = (0.0, 0.0)
        """Steps and rows of earlier fits."""
        self._own = (0.0, 0.0)
        """Steps and rows of the running one."""

    def begin(self) -> None:
        """Note that a `fit` of an undistributed model begins; it may report nothing itself."""
        with self._lock:
            self._is_reported = False
            self._end_fit()

    def note(self, numbers: Mapping[str, float]) -> None:
        """Report what the data of a `fit` see, unless main_fun has reported since `begin`.

        Args:
            numbers: numbers by name, with `steps` and `rows` of this fit.
        """
        with self._lock:
            steps = self._own[0] if self._is_reported else numbers["steps"]
            self._own = (steps, numbers["rows"])
            if not self._is_reported:
                self._tell({**numbers, **self._total()})

    def fit_reports(self, values: Mapping[str, float | None]) -> None:
        """Report what the callbacks of a `fit` have counted; never raises.

        Args:
            values: numbers by name; None: unknown. `steps` and `rows` are those of this fit, which
                begins with 0. 0 for `rows` becomes what its data have seen.
        """
        numbers = _numbers_in(values)
        if numbers is None:
            return
        with self._lock:
            self._is_reported = True
            steps, rows = numbers.get("steps", 0.0), numbers.get("rows", 0.0)
            if steps < self._own[0]:
                self._end_fit()
            self._own = (steps, rows or self._own[1])
            self._tell({**numbers, **self._total()})

    def report(self, values: Mapping[str, float | None]) -> None:
        """Report what main_fun says about its training; never raises.

        Args:
            values: numbers by name; None: unknown. 0 for `rows` becomes what its data have seen.
        """
        numbers = _numbers_in(values)
        if numbers is None:
            return
        with self._lock:
            self._is_reported = True
            steps = numbers.get("steps", 0.0) - self._before[0]  # main_fun counts all of its own
            self._own = (max(steps, self._own[0]), self._own[1])
            rows = numbers.get("rows", 0.0) or self._total()["rows"]
            self._tell({**numbers, "rows": rows})

    def _end_fit(self) -> None:
        total = self._total()
        self._before, self._own = (total["steps"], total["rows"]), (0.0, 0.0)

    def _total(self) -> dict[str, float]:
        steps, rows = (before + own for before, own in zip(self._before, self._own, strict=True))
        return {"steps": steps, "rows": rows}


def _numbers_in(values: Mapping[str, float | None]) -> dict[str, float] | None:
    """Return the known numbers; None: one of them is none, which is logged."""
    try:
        return {name: float(value) for name, value in values.items() if value is not None}
    except (TypeError, ValueError) as error:
        _logger.warning("report_progress ignored %r: %s", dict(values), error)
        return None
