"""EpochProgressBar: Keras' progress bar for rows whose epochs differ in length.

Covers: the number of steps, which is known at the end of an epoch only.
Does not: draw (Keras).      Threads: the thread that runs `fit`.
"""

from __future__ import annotations

from typing import Any

import keras


class EpochProgressBar(keras.callbacks.ProgbarLogger):  # type: ignore[misc]  # Keras has no types
    """Forgets the number of steps of the epoch before, which Keras would show for this one."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin an epoch of unknown length.

        Args:
            epoch: number of the epoch, from 0.
            logs: Keras's, unused.
        """
        self.target = None
        super().on_epoch_begin(epoch, logs)
