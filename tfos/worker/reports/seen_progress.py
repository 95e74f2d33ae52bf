"""SeenProgress: a worker's numbers for the driver, from main_fun or else from its data.

Covers: which of the two reports counts; the rows of a `fit` whose callbacks cannot count them; the
steps and rows from which the next `fit` counts on.
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
        tell: function called with each report that counts: numbers by name, with the process's
            `steps` and `rows`.
    """

    def __init__(self, tell: Callable[[dict[str, float]], object]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._is_reported = False
        self._so_far = (0.0, 0.0)

    @property
    def so_far(self) -> tuple[float, float]:
        """The newest steps and rows: another `fit` goes on from there."""
        with self._lock:
            return self._so_far

    def begin(self) -> None:
        """Note that a `fit` of an undistributed model begins; it may report nothing itself."""
        with self._lock:
            self._is_reported = False

    def note(self, numbers: Mapping[str, float]) -> None:
        """Report what the data of a `fit` see, unless main_fun has reported since `begin`.

        Args:
            numbers: numbers by name, with `steps` and `rows`.
        """
        with self._lock:
            if self._is_reported:
                self._so_far = (self._so_far[0], numbers["rows"])
            else:
                self._so_far = (numbers["steps"], numbers["rows"])
                self._tell(dict(numbers))

    def report(self, values: Mapping[str, float | None]) -> None:
        """Report what main_fun says about its training; never raises.

        Args:
            values: numbers by name; None: unknown. 0 for `rows` becomes what its data have seen.
        """
        try:
            numbers = {name: float(value) for name, value in values.items() if value is not None}
        except (TypeError, ValueError) as error:
            _logger.warning("report_progress ignored %r: %s", dict(values), error)
            return
        with self._lock:
            self._is_reported = True
            rows = numbers.get("rows", 0.0) or self._so_far[1]
            self._so_far = (numbers.get("steps", 0.0), rows)
            self._tell({**numbers, "rows": rows})
