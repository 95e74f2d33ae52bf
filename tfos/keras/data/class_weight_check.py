"""Check of class weights, in the driver too: it imports no Keras.

Covers: what `class_weight=` may be.      Does not: weigh rows (class_weights).
Threads: any; pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from tfos.errors import SettingsError


def check_class_weight(given: Any) -> None:
    """Refuse class weights that cannot work.

    Args:
        given: as the user gave them.

    Raises:
        SettingsError: it is not a dict from ints to numbers.
    """
    if not isinstance(given, Mapping):
        raise SettingsError(
            "class_weight must be a dict from class to weight such as {0: 1.0, 1: 5.0}, got "
            f"{given!r}; for an array of weights pass dict(enumerate(weights))"
        )
    for each, weight in given.items():
        if isinstance(each, bool | np.bool) or not isinstance(each, Integral):
            raise SettingsError(
                f"class_weight: the class {each!r} ({type(each).__name__}) must be an int: the "
                "label, or its place in a one-hot row"
            )
        if not isinstance(weight, Real) or not math.isfinite(weight):
            raise SettingsError(
                f"class_weight: the weight of class {each} must be a finite number, got {weight!r}"
            )
