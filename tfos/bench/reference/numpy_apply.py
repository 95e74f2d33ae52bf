"""An update rule in numpy: its formula on whole arrays, one bucket after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def update(formula: Callable[..., Any], g: Array, arrays: list[Array], scalars: Array) -> None:
    """Apply one gradient in place; `arrays` are the values, then the slots."""
    new = formula(g, *arrays, *scalars)
    for array, changed in zip(arrays, new if len(arrays) > 1 else (new,), strict=True):
        array[:] = changed
