"""Finite training: ends a fit without servers if its loss or weights are NaN.

Covers: what servers refuse in each push, for fits without servers.
Does not: look at rows: a user's loss may skip rows with NaN.
Runs in: workers. Keras is imported in functions only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfos.errors import NonFiniteGradient

_NEXT_STEP = (
    "Look for NaN and infinite numbers in labels, features and weights: "
    "df.filter(F.isnan('label')); lower the learning rate, or clip: optimizer(clipnorm=1.0)"
)


class _Watch:
    """The number of the epoch, and the loss of its batches."""

    epoch = 0

    def begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        del logs
        self.epoch = epoch

    def look(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Refuse a loss that is NaN, and stays so for the rest of the training."""
        if math.isnan(float((logs or {}).get("loss", 0.0))):
            raise NonFiniteGradient(
                f"the loss is NaN after step {batch + 1} of epoch {self.epoch + 1}, and so are the "
                f"model's weights. {_NEXT_STEP}"
            )


def finite_loss() -> Any:
    """Return a callback that ends a training whose loss is NaN."""
    import keras

    watch = _Watch()
    return keras.callbacks.LambdaCallback(on_epoch_begin=watch.begin, on_train_batch_end=watch.look)


def check_finite(model: Any) -> None:
    """Refuse a trained model that can only answer NaN.

    Args:
        model: the Keras model.

    Raises:
        NonFiniteGradient: names a weight.
    """
    for weight in model.trainable_weights:
        values: np.ndarray[Any, Any] = weight.numpy()
        if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
            count = values.size - int(finite.sum())
            raise NonFiniteGradient(
                f"{count} of {values.size} numbers of the weight {weight.path!r} are NaN or "
                f"infinite at the end of the training. {_NEXT_STEP}"
            )
