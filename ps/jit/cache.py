"""Kernels of ps/: how they are compiled, and the cache that keeps them.

Covers: the compiler's options, the files that kernels are made from.
Does not: hold kernels (ps.optim.kernels and others), keep files (rpc.jit.kernel_cache).
Runs in: PS processes and clients with tables or packed gradients; imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import compiler

from rpc.jit.kernel_cache import KernelCache

CACHE = KernelCache(
    Path(__file__).parents[1],
    (
        *("optim/formulas.py", "optim/codegen.py", "optim/kernels.py"),
        *("tables/hash_index.py", "tables/initializers.py", "tables/kernels.py"),
        *("compression/format.py", "compression/kernels.py"),
        "sorted_rows/search.py",
        *("jit/cache.py", "jit/intrinsics.py"),
    ),
)
"""Kernels of dense groups, tables and packed gradients."""


class _WithoutAliases(compiler.Compiler):  # type: ignore[misc]  # numba is untyped
    """Tells LLVM that the arrays do not overlap: no checks before loops, which cost short rows."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state.flags.noalias = True


def kernel(function: Callable[..., Any]) -> Any:
    """Make a top-level function a kernel: compiled by `load`, running without the GIL.

    No fast math: operations are neither reordered nor contracted, or parity with Keras would end.
    """
    return numba.njit(nogil=True, fastmath=False, error_model="numpy")(function)


def kernel_of_distinct_arrays(function: Callable[..., Any]) -> Any:
    """Like `kernel`, for functions that are never given overlapping arrays."""
    options = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    return numba.njit(pipeline_class=_WithoutAliases, **options)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Make a formula callable from kernels, by the same rules."""
    return numba.njit(fastmath=False, error_model="numpy")(function)
