"""FitPlace: where the training of the distributed model is, for a worker that joins it.

Covers: the record alone.      Does not: find it (tfos.control.epoch_log), use it (tfos.keras.fit).
"""

from __future__ import annotations

import msgspec


class FitPlace(msgspec.Struct, frozen=True):
    """Which fit of the distributed model the chief is in, and which epoch of it."""

    number: int
    """Of the fit, from 0. Those before it are over."""
    epoch: int
    """As Keras counts; -1: it has not begun."""
    first: int = 0
    """The epoch that the fit has begun with."""
