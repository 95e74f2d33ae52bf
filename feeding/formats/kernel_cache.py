"""Kernels of feeding/: how they are compiled, and the cache that keeps them.

Covers: the compiler's options, the files that kernels are made from.
Does not: hold kernels (formats.csv, .text, .tfrecord), keep files (rpc.jit.kernel_cache).
Imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from rpc.jit.kernel_cache import KernelCache

SOURCES = (
    "formats/kernel_cache.py",
    *("formats/csv/quotes.py", "formats/text/row_index.py"),
    *("formats/tfrecord/byte_kernels.py", "formats/tfrecord/example_kernels.py"),
    *("formats/tfrecord/frame_kernels.py", "formats/tfrecord/write_kernels.py"),
)
CACHE = KernelCache(Path(__file__).parents[1], SOURCES)
"""Kernels of text, CSV and TFRecord files."""


def kernel(function: Callable[..., Any]) -> Any:
    """Make a function a kernel: compiled at its first call with new types, without the GIL."""
    return CACHE.keep(numba.njit(nogil=True, error_model="numpy")(function))
