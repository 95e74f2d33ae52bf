"""Bytes of an array, as they travel in a frame's payload."""

from __future__ import annotations

from typing import Any

import numpy as np


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of a contiguous array in C order, as a view; also of an empty one."""
    return array.reshape(-1).view(np.uint8).data
