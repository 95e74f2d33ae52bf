"""A loss by which a model counts the rows that it trains."""

from __future__ import annotations

from typing import Any

import keras


class Count(keras.losses.Loss):  # type: ignore[misc]
    """Its gradient is -1 for each row, so a step of SGD(1.0) adds 1 to what a row is known by."""

    def __init__(self) -> None:
        super().__init__(reduction="sum")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return 0.0 * y_true - y_pred[:, 0]
