"""Memory that TensorFlow reads without a copy.

Covers: arrays that start where TensorFlow's kernels require it.      Pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes; TensorFlow shares an array that begins at a multiple of them, and copies others."""


def aligned(num_elements: int, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a new array [num_elements] with arbitrary content.

    Args:
        num_elements: number of elements, 0 or more.
        dtype: numpy name of the dtype.
    """
    num_bytes = num_elements * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype)
