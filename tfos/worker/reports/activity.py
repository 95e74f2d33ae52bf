"""Activity of a worker process: its phase, and a long import or first step within it.

Covers: `main_fun: import tensorflow`, `main_fun: first step`.
Does not: decide when a phase begins (tfos.worker.process), show it (tfos.monitor.training).
Threads: any; `_lock` keeps the phases in order.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping

SLOW_IMPORTS = ("tensorflow", "torch", "jax", "keras")
"""Modules whose import takes seconds; keras comes last, because it imports one of the others."""


class WorkerActivity:
    """Reports each change of what the process does.

    Args:
        tell: function called with the new phase.
        numbers: function that returns the training loop's last report, by name.
    """

    def __init__(
        self, tell: Callable[[str], object], numbers: Callable[[], Mapping[str, float]]
    ) -> None:
        self._tell = tell
        self._numbers = numbers
        self._lock = threading.Lock()
        self._phase = self._told = ""

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        with self._lock:
            self._phase = phase
            self._say(phase)

    def look(self) -> None:
        """Check again what the process does within its phase."""
        what = running_import()
        with self._lock:
            what = what or self._first_step()
            self._say(f"{self._phase}: {what}" if what else self._phase)

    def _first_step(self) -> str:
        """Return "first step" if `fit` has begun and reported 0 steps, or an empty string."""
        has_no_step = self._phase == "main_fun" and self._numbers().get("steps") == 0.0
        return "first step" if has_no_step else ""

    def _say(self, phase: str) -> None:
        if phase and phase != self._told:
            self._told = phase
            self._tell(phase)


def running_import() -> str:
    """Return `import tensorflow` while a thread of this process imports it, or an empty string."""
    for name in SLOW_IMPORTS:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if getattr(spec, "_initializing", False):  # importlib's own mark
            return f"import {name}"
    return ""
