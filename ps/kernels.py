"""Compiled loops over buckets: the fused update of each rule, the finite check, the reduction.

Covers: all per-element work of a server, without the GIL.      Does not: lock, check sizes.
Runs in: PS processes; importing it imports numba.      Threads: kernels may run at the same time on
different buckets.

`python -m ps.kernels --warm DIR` compiles everything into DIR, for environments that are packed
once and unpacked on many hosts; set TFOS_KERNEL_CACHE=DIR there. Hosts with another CPU or Python
version compile for themselves.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types

from ps import kernel_cache, optimizers
from ps.float_mode import flush_denormals, restore
from ps.kernel_cache import kernel
from ps.params import Descent, Manifest

Array = np.ndarray[Any, Any]

_sgd = numba.njit(optimizers.sgd)
_momentum = numba.njit(optimizers.momentum)
_nesterov = numba.njit(optimizers.nesterov)
_adagrad = numba.njit(optimizers.adagrad)
_adam = numba.njit(optimizers.adam)
_decay = numba.njit(optimizers.decay)
_average = numba.njit(optimizers.average)
_add = numba.njit(optimizers.add)


@kernel
def sgd(g: Array, v: Array, s: Array) -> None:
    """Apply optimizers.sgd to a bucket."""
    learning_rate = s[0]
    mode = flush_denormals()
    for i in range(v.size):
        v[i] = _sgd(g[i], v[i], learning_rate)
    restore(mode)


@kernel
def momentum(g: Array, v: Array, m: Array, s: Array) -> None:
    """Apply optimizers.momentum to a bucket."""
    learning_rate, beta = s[0], s[1]
    mode = flush_denormals()
    for i in range(v.size):
        v[i], m[i] = _momentum(g[i], v[i], m[i], learning_rate, beta)
    restore(mode)


@kernel
def nesterov(g: Array, v: Array, m: Array, s: Array) -> None:
    """Apply optimizers.nesterov to a bucket."""
    learning_rate, beta = s[0], s[1]
    mode = flush_denormals()
    for i in range(v.size):
        v[i], m[i] = _nesterov(g[i], v[i], m[i], learning_rate, beta)
    restore(mode)


@kernel
def adagrad(g: Array, v: Array, a: Array, s: Array) -> None:
    """Apply optimizers.adagrad to a bucket."""
    learning_rate, epsilon = s[0], s[1]
    mode = flush_denormals()
    for i in range(v.size):
        v[i], a[i] = _adagrad(g[i], v[i], a[i], learning_rate, epsilon)
    restore(mode)


@kernel
def adam(g: Array, v: Array, m: Array, u: Array, s: Array) -> None:
    """Apply optimizers.adam to a bucket."""
    alpha, rate_1, rate_2, epsilon = s[0], s[1], s[2], s[3]
    mode = flush_denormals()
    for i in range(v.size):
        v[i], m[i], u[i] = _adam(g[i], v[i], m[i], u[i], alpha, rate_1, rate_2, epsilon)
    restore(mode)


@kernel
def decay(v: Array, s: Array) -> None:
    """Apply optimizers.decay to a bucket; s is (weight decay, learning rate)."""
    weight_decay, learning_rate = s[0], s[1]
    mode = flush_denormals()
    for i in range(v.size):
        v[i] = _decay(v[i], weight_decay, learning_rate)
    restore(mode)


@kernel
def average(g: Array, v: Array, s: Array) -> None:
    """Apply optimizers.average to a bucket; s is (number of pushers,)."""
    num_pushers = s[0]
    mode = flush_denormals()
    for i in range(v.size):
        v[i] = _average(g[i], v[i], num_pushers)
    restore(mode)


@kernel
def add(g: Array, v: Array, _s: Array) -> None:
    """Apply optimizers.add to a bucket."""
    mode = flush_denormals()
    for i in range(v.size):
        v[i] = _add(g[i], v[i])
    restore(mode)


@kernel
def clip(g: Array, out: Array, s: Array) -> None:
    """Write g cut to [-s[0], s[0]] to out."""
    limit = s[0]
    mode = flush_denormals()
    for i in range(g.size):
        out[i] = min(max(g[i], -limit), limit)
    restore(mode)


@kernel
def scale(g: Array, out: Array, s: Array) -> None:
    """Write g * s[0] to out: the first term of a weighted sum."""
    weight = s[0]
    mode = flush_denormals()
    for i in range(g.size):
        out[i] = g[i] * weight
    restore(mode)


@kernel
def add_scaled(g: Array, out: Array, s: Array) -> None:
    """Add g * s[0] to out: a further term of a weighted sum."""
    weight = s[0]
    mode = flush_denormals()
    for i in range(g.size):
        out[i] = out[i] + g[i] * weight
    restore(mode)


@kernel
def count_all_ones(bits: Array, mask: Array) -> int:
    """Count the elements in which all bits of mask[0] are set."""
    ones = mask[0]
    count = 0
    for i in range(bits.size):
        count += (bits[i] & ones) == ones
    return count


UPDATES: dict[str, Any] = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "adagrad": adagrad,
    "adam": adam,
    "average": average,
    "add": add,
}
"""Kernel of each `ps.optimizers.Rule.name`, called as (gradient, values, *slots, scalars)."""

_EXPONENT: dict[np.dtype[Any], Array] = {
    np.dtype(np.float32): np.array([0x7F80_0000], np.uint32),
    np.dtype(np.float64): np.array([0x7FF0_0000_0000_0000], np.uint64),
}


def count_nonfinite(values: Array) -> int:
    """Return how many elements of a contiguous float array are NaN or infinite.

    Looks at the bit patterns (all exponent bits set), because a sum of integers may be vectorized
    and a test of floats, without fast math, is not.
    """
    mask = _EXPONENT[values.dtype]
    return int(count_all_ones(values.view(mask.dtype), mask))


def reduce_weighted(out: Array, gradients: Sequence[Array], weights: Sequence[float]) -> None:
    """Write the weighted sum to `out`: g0 * w0, then + g1 * w1 and so on, rounded at each step.

    The order is the caller's (rank order), so the result does not depend on arrival. A single
    gradient with weight 1.0 comes out exactly. `out` may be one of the gradients only if the first.

    Args:
        out: 1-d contiguous, of the gradients' dtype and size.
        gradients: at least one; 1-d contiguous.
        weights: one per gradient, rounded to the dtype.

    Raises:
        ValueError: sizes, dtypes or numbers differ.
    """
    if not gradients or len(gradients) != len(weights):
        raise ValueError(f"{len(gradients)} gradients need as many weights, got {len(weights)}")
    for gradient in gradients:
        if gradient.dtype != out.dtype or gradient.shape != out.shape:
            raise ValueError(
                f"cannot reduce {gradient.dtype}{list(gradient.shape)} "
                f"into {out.dtype}{list(out.shape)}"
            )
    reduce_one = scale
    for gradient, weight in zip(gradients, weights, strict=True):
        reduce_one(gradient, out, np.array([weight], out.dtype))
        reduce_one = add_scaled


def _signature(name: str, dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a kernel and the one signature it is compiled for in this dtype.

    Inputs are declared read-only, which numba lets writable arrays match as well.
    """
    element = numba.from_dtype(np.dtype(dtype))
    read = types.Array(element, 1, "C", readonly=True)
    write = types.Array(element, 1, "C")
    if name == "count_all_ones":
        unsigned = types.uint32 if dtype == "float32" else types.uint64
        bits = types.Array(unsigned, 1, "C", readonly=True)
        return count_all_ones, (bits, bits)
    if name == "decay":
        return decay, (write, read)
    if name in UPDATES:
        update = UPDATES[name]
        num_written = len(inspect.signature(update.py_func).parameters) - 2
        return update, (read, *[write] * num_written, read)
    return {"clip": clip, "scale": scale, "add_scaled": add_scaled}[name], (read, write, read)


ALL_NAMES = (*UPDATES, "decay", "clip", "scale", "add_scaled", "count_all_ones")
_DTYPES = ("float32", "float64")
_compile_lock = threading.Lock()


def _names_for(manifest: Manifest) -> set[tuple[str, str]]:
    wanted: set[tuple[str, str]] = set()
    for group in manifest.groups:
        names = {optimizers.rule_of(group.rule).name, "count_all_ones"}
        if manifest.consistency == "sync":
            names |= {"scale", "add_scaled"}
        if isinstance(group.rule, Descent):
            names |= {"decay"} if group.rule.weight_decay else set()
            names |= {"clip"} if group.rule.clipvalue else set()
        wanted |= {(name, group.dtype) for name in names}
    return wanted


def warm(wanted: Iterable[tuple[str, str]]) -> int:
    """Load or compile kernels, by (name, dtype); return how many were not in memory yet."""
    with _compile_lock:
        return sum(kernel_cache.load(*_signature(name, dtype)) for name, dtype in sorted(wanted))


def warm_for(manifest: Manifest) -> int:
    """Load or compile what a shard of this manifest calls, before it says SERVING."""
    return warm(_names_for(manifest))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile all kernels into the cache; the command line of `python -m ps.kernels`."""
    parser = argparse.ArgumentParser(prog="python -m ps.kernels", description=__doc__)
    parser.add_argument("--warm", metavar="DIR", required=True, help="cache directory to fill")
    directory = Path(parser.parse_args(arguments).warm).resolve()
    os.environ[kernel_cache.CACHE_VARIABLE] = str(directory)
    kernel_cache.directory.cache_clear()
    start_s = time.monotonic()
    from ps import kernels as module  # not __main__, whose name would be cached with the kernels

    count = module.warm((name, dtype) for name in module.ALL_NAMES for dtype in _DTYPES)
    used = kernel_cache.directory()
    if used.parent != directory:
        parser.error(f"{directory} cannot be used (owner, mode or disk); kernels went to {used}")
    sys.stdout.write(f"{count} kernels in {used} after {time.monotonic() - start_s:.1f} s\n")


if __name__ == "__main__":
    main()
