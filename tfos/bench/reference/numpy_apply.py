"""An update rule in numpy: its formula on whole arrays, one bucket after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def update(formula: Callable[..., Any], g: Array, arrays: list[Array], scalars: Array) -> None:
    """Apply one gradient in place; `arrays` are the values, then the slots.

    Args:
        formula: the rule's formula, from ps.optim.formulas.
        g: [n] floats, the gradient.
        arrays: [n] each, the values, then the slots; changed.
        scalars: the step's scalars, of the same dtype.
    """
    new = formula(g, *arrays, *scalars)
    for array, changed in zip(arrays, new if len(arrays) > 1 else (new,), strict=True):
        array[:] = changed
