"""SeenProgress: a worker's numbers for the driver; those that its data see where main_fun has none.

Covers: which of both reports stands; the rows of a `fit` whose callbacks cannot count them.
Does not: count (tfos.keras.data.lone_progress), measure or send (tfos.worker.progress_meter).
Threads: any; `_lock` guards all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping


class SeenProgress:
    """Progress of one process.

    Args:
        tell: called with each report that stands: numbers by name.
    """

    def __init__(self, tell: Callable[[dict[str, float]], object]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._is_reported = False
        self._rows = 0.0

    def begin(self) -> None:
        """A `fit` of a model that is not distributed begins: it may report nothing itself."""
        with self._lock:
            self._is_reported = False

    def note(self, numbers: Mapping[str, float]) -> None:
        """Report what the data of a `fit` see, unless main_fun has reported since `begin`.

        Args:
            numbers: by name, with `steps` and `rows`.
        """
        with self._lock:
            self._rows = numbers["rows"]
            if not self._is_reported:
                self._tell(dict(numbers))

    def report(self, numbers: Mapping[str, float]) -> None:
        """Report what main_fun says of its training.

        Args:
            numbers: by name; `rows` of 0 becomes the rows that its data have seen.
        """
        with self._lock:
            self._is_reported = True
            self._tell({**numbers, "rows": numbers.get("rows", 0.0) or self._rows})
