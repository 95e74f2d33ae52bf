"""LogCallback: shows a fit's metrics in the driver's output.

Covers: the callback.      Does not: carry lines (driver_log).
Runs in: a rank's process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import keras

from tfos.runner import ranks
from tfos.runner.driver_log import log_to_driver


class LogCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Shows rank 0's metrics in the driver's output after each epoch.

    Args:
        per_batch_log: whether to show them after each batch too.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self._per_batch_log = per_batch_log
        self._epoch = 0
        self._began_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Note when the epoch began.

        Args:
            epoch: from 0.
            logs: Keras' logs; ignored.
        """
        del logs
        self._epoch, self._began_s = epoch, time.monotonic()

    def on_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Show the batch's metrics if requested.

        Args:
            batch: from 0.
            logs: metrics so far.
        """
        if self._per_batch_log:
            self._show(f"epoch {self._epoch + 1}, batch {batch + 1}", logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Show the epoch's metrics.

        Args:
            epoch: from 0.
            logs: its metrics.
        """
        self._show(f"epoch {epoch + 1}, {time.monotonic() - self._began_s:.1f} s", logs)

    def _show(self, what: str, logs: Mapping[str, Any] | None) -> None:
        if ranks.rank() == 0:
            numbers = ", ".join(
                f"{name} {float(value):.4g}" for name, value in (logs or {}).items()
            )
            log_to_driver(f"{what}: {numbers}")
