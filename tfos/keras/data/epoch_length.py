"""Epoch lengths for Keras: the number of batches of an epoch still being fed, and all_epochs.

Covers: the comparisons that Keras 3.15 makes with an adapter's `num_batches`; `ctx.all_epochs`, a
number for `fit(epochs=...)` that no feed reaches and that prints as unknown.
Does not: read the feed (tfos.keras.data.dataset), end `fit` (lone_progress,
tfos.keras.fit.epoch_agreement).
Threads: the thread that runs `fit`.

Keras knows two kinds of data. Where `num_batches` is a number, the epoch's loop runs over
`range(0, num_batches, steps_per_execution)` and stops as soon as `steps_seen >= num_batches`.
Where it is None, the epoch ends by an exception, Keras warns that the input ran out of data,
remembers the count and silently truncates every later epoch to it. Epochs of a feed differ in
length, so `num_batches` is this object: a number whose comparisons the feed answers.

A stream has no known number of epochs: each micro-batch is one. `fit` ends with the feed, with a
warning if the call named a number of epochs, and without one for `all_epochs`.
"""

from __future__ import annotations

import sys
from typing import Protocol


class Epoch(Protocol):
    """State of the running epoch."""

    @property
    def batches(self) -> int:
        """Number of batches handed out since the epoch's loop began."""

    @property
    def over(self) -> bool:
        """Whether its end has been seen."""

    def at_end(self) -> bool:
        """Wait for the next batch or the end; return whether it is the end."""


class EpochLength:
    """Unknown while the epoch runs, the number of its batches once it is over."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch

    def __index__(self) -> int:
        """End of Keras' range of steps; `__le__` stops it earlier."""
        return sys.maxsize

    def __int__(self) -> int:
        return self._epoch.batches

    def __float__(self) -> float:
        return float(self._epoch.batches)

    def __bool__(self) -> bool:
        return True

    def __le__(self, steps_seen: int) -> bool:
        """Evaluate `steps_seen >= num_batches`, as Keras does before every step."""
        return self._epoch.at_end()

    def __gt__(self, number: int) -> bool:
        """Whether the epoch has batches and, for progress bars, whether their number is known."""
        if self._epoch.over:
            return self._epoch.batches > number
        return self._epoch.batches == 0

    def __sub__(self, number: int) -> int:
        return self._epoch.batches - number

    def __rtruediv__(self, number: float) -> float:
        return number / max(self._epoch.batches, 1)

    def __repr__(self) -> str:
        return str(self._epoch.batches) if self._epoch.over else "unknown"


class AllEpochs(int):
    """All epochs of a feed."""

    def __new__(cls) -> AllEpochs:
        """Return the number."""
        return super().__new__(cls, sys.maxsize)

    def __reduce__(self) -> tuple[type[AllEpochs], tuple[()]]:
        return AllEpochs, ()

    def __repr__(self) -> str:
        return "?"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format("?", spec)
