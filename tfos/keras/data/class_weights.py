"""Class weights: `fit(class_weight={class: weight})` as sample weights of a batch.

Covers: ClassWeights: the numbers of Keras' own `class_weight`, times the rows' own sample weights.
Does not: find the argument of `fit` (running_fit), read batches (dataset).
Threads: any; pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from tfos.errors import SettingsError
from tfos.keras.data.class_weight_check import check_class_weight

Array = np.ndarray[Any, np.dtype[Any]]


class ClassWeights:
    """Adds the weight of each row's class to a batch.

    Args:
        weights: weights by class; other classes have the weight 1.

    Raises:
        SettingsError: the argument is not a dict from ints to numbers.
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        check_class_weight(weights)
        classes = sorted(weights)
        self._classes = np.array(classes, np.int64)
        self._weights = np.array([float(weights[each]) for each in classes], keras.config.floatx())

    def __call__(self, values: tuple[Any, ...]) -> tuple[Any, Array, Array]:
        """Return (x, y, weight) of one batch.

        Args:
            values: (x, y) or (x, y, weight); y is [batch], [batch, 1], or one-hot [batch, classes];
                weight is [batch] or [batch, 1].

        Returns:
            x and y unchanged; weight[batch] in Keras' floatx.

        Raises:
            SettingsError: the batch has no labels of one output, or other weights.
        """
        if len(values) < 2:
            raise SettingsError(
                "class_weight weights rows by their labels, but the rows have no labels; select "
                "them: label_cols=..."
            )
        x, y, *own = values
        weights = self._of(_classes(y))
        return x, y, _product(weights, own[0]) if own else weights

    def _of(self, classes: Array) -> Array:
        ones = np.ones(classes.shape, self._weights.dtype)
        if not self._classes.size:
            return ones
        found = np.searchsorted(self._classes, classes).clip(max=self._classes.size - 1)
        return np.where(self._classes[found] == classes, self._weights[found], ones)


def _classes(y: Any) -> Array:
    """Return the class of each row, int32[batch], as Keras does."""
    if not isinstance(y, np.ndarray):
        raise SettingsError(
            f"class_weight is for models with one output, but these labels have {len(y)} outputs; "
            "compute sample weights in map_fn=..., or name their column: weight_col=..."
        )
    if y.dtype.kind not in "biuf":
        raise SettingsError(
            "class_weight needs labels that are numbers, but these are text; turn them into "
            "classes from 0 on in map_fn=..."
        )
    if y.ndim > 1:
        y = np.argmax(y, axis=-1) if y.shape[-1] != 1 else np.squeeze(y, axis=-1)
    classes: Array = np.round(y).astype(np.int32)
    return classes


def _product(weights: Array, own: Any) -> Array:
    """Return the product of class weights, [batch], and the rows' own sample weights."""
    if not isinstance(own, np.ndarray):
        raise SettingsError(
            f"class_weight needs sample weights in one array, but the sample weights are "
            f"{type(own).__name__}; compute the product in map_fn=..."
        )
    if own.ndim == weights.ndim + 1 and own.shape[-1] == 1:
        own = own[..., 0]
    if own.shape != weights.shape:
        raise SettingsError(
            f"class_weight: the sample weights have shape {own.shape}, the classes "
            f"{weights.shape}; compute the product in map_fn=..."
        )
    product: Array = weights * own.astype(weights.dtype, copy=False)
    return product
