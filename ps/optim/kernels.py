"""Kernels over buckets and rows: each rule's fused update, finite check, reduction.

Covers: all per-element work of a server, without the GIL.      Does not: lock.
Runs in: PS processes; importing it imports numba.      Threads: kernels may run at the same time on
different buckets or rows.

`python -m ps warm DIR` compiles everything into DIR, for environments that are packed once and
unpacked on many hosts; set TFOS_KERNEL_CACHE=DIR there. Hosts with another CPU or Python version
compile for themselves.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numba
import numpy as np
from numba import types

from ps.errors import ShapeError
from ps.jit import intrinsics
from ps.jit.cache import CACHE, inlined, kernel, kernel_of_distinct_arrays
from ps.jit.intrinsics import flush_denormals, restore
from ps.manifest.manifest import Manifest
from ps.manifest.rule_spec import Descent, RuleConfig
from ps.optim import formulas
from ps.optim.codegen import INTRINSICS, Loop
from ps.optim.row_rules import counting
from ps.optim.rules import Rule, decays, every_rule, is_averaged, rule_of

Array = np.ndarray[Any, Any]


@kernel
def clip(g: Array, out: Array, s: Array) -> None:
    """Write g clipped to [-s[0], s[0]] to out; all [num_elements] of one dtype, s [1]."""
    limit = s[0]
    mode = flush_denormals()
    for i in range(g.size):
        out[i] = min(max(g[i], -limit), limit)
    restore(mode)


@kernel
def scale(g: Array, out: Array, s: Array) -> None:
    """Write g * s[0] to out: the first term of a weighted sum.

    Args:
        g: [n] floats.
        out: [n] of the same dtype; filled.
        s: [1] of the same dtype, the factor.
    """
    weight = s[0]
    mode = flush_denormals()
    for i in range(g.size):
        out[i] = g[i] * weight
    restore(mode)


@kernel
def add_scaled(g: Array, out: Array, s: Array) -> None:
    """Add g * s[0] to out: a further term of a weighted sum.

    Args:
        g: [n] floats.
        out: [n] of the same dtype; changed.
        s: [1] of the same dtype, the factor.
    """
    weight = s[0]
    mode = flush_denormals()
    for i in range(g.size):
        out[i] = out[i] + g[i] * weight
    restore(mode)


@kernel
def blend(v: Array, average: Array, s: Array) -> None:
    """Write average * s[0] + v * s[1] to average; see ps.dense.ema.

    Args:
        v: [n] floats, the values.
        average: [n] of the same dtype; changed.
        s: [2] of the same dtype: momentum, and 1 - momentum.
    """
    kept, taken = s[0], s[1]
    mode = flush_denormals()
    for i in range(v.size):
        average[i] = kept * average[i] + taken * v[i]
    restore(mode)


@kernel
def largest_masked(bits: Array, mask: Array) -> Any:
    """Return the largest of bits & mask[0]; a float's bits without its sign grow with it.

    The casts keep numba from widening to 64 bits, half as many at a time.

    Args:
        bits: [n] uint32 or uint64, floats as bits.
        mask: [1] of the same dtype: all bits but the sign.
    """
    number = bits.dtype.type
    kept = mask[0]
    most = number(0)
    for i in range(bits.size):
        most = number(max(most, number(bits[i] & kept)))
    return most


_MAGNITUDE: dict[np.dtype[Any], Array] = {
    np.dtype(np.float32): np.array([0x7FFF_FFFF], np.uint32),
    np.dtype(np.float64): np.array([0x7FFF_FFFF_FFFF_FFFF], np.uint64),
}
_INFINITE = {np.dtype(np.float32): 0x7F80_0000, np.dtype(np.float64): 0x7FF0_0000_0000_0000}


def count_nonfinite(values: Array) -> int:
    """Return how many elements of a contiguous float array are NaN or infinite.

    It compares bit patterns: LLVM vectorizes a maximum of integers, but no test of floats without
    fast math. Only a bucket that has such elements is counted.
    """
    mask = _MAGNITUDE[values.dtype]
    if largest_masked(values.view(mask.dtype), mask) < _INFINITE[values.dtype]:
        return 0
    return int(np.count_nonzero(~np.isfinite(values)))


def reduce_weighted(out: Array, gradients: Sequence[Array], weights: Sequence[float]) -> None:
    """Write the weighted sum to `out`: g0 * w0, then + g1 * w1 and so on, rounded at each step.

    The order is the caller's (rank order), so the result does not depend on arrival. A single
    gradient with weight 1.0 comes out exactly. `out` may be one of the gradients only if the first.

    Args:
        out: [num_elements], contiguous, of the gradients' dtype; filled.
        gradients: at least one array like `out`.
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


class RowUpdate:
    """A rule's update of rows of a table, in place.

    Args:
        kernel: compiled from a `ps.optim.codegen.Loop` over rows.
        rule: the rule of the kernel.
    """

    def __init__(self, kernel: Any, rule: Rule) -> None:
        self._kernel = kernel
        self._num_arrays = 1 + len(rule.slots)
        self._num_own = len(rule.row_slots)

    def __call__(self, slab: Array, rows: Array, grads: Array, scalars: Array) -> int:
        """Apply one gradient to each of the rows.

        Args:
            slab: [capacity, width], contiguous; see ps.optim.row_rules.
            rows: int64[n], distinct row numbers.
            grads: [n, dim], contiguous, of the slab's dtype.
            scalars: `ps.optim.rules.scalars` in the slab's dtype.

        Returns:
            How many elements keep their numbers; see ps.optim.codegen.Loop.

        Raises:
            ShapeError: the arrays do not fit each other, or a row is not in the slab; nothing has
                changed.
        """
        width = self._num_arrays * grads.shape[1] + self._num_own
        if len(rows) != len(grads) or slab.shape[1] != width:
            raise ShapeError(
                f"{len(rows)} rows of a slab {list(slab.shape)} do not fit gradients "
                f"{list(grads.shape)}; a row is {self._num_arrays} times as wide as its gradient, "
                f"and {self._num_own} more"
            )
        left = int(self._kernel(slab, rows, grads, scalars))
        if left < 0:
            raise ShapeError(
                f"row {rows[-1 - left]} is not in a table of {slab.shape[0]} rows; nothing was "
                "applied"
            )
        return left


def dense_for(config: RuleConfig, dtype: str) -> Any:
    """Return a rule's compiled kernel for buckets: `update(g, v, *slots, scalars)`.

    g, v and the slots are [num_elements], contiguous, of `dtype`, and do not overlap; v and the
    slots change. It returns how many elements keep their numbers; see ps.optim.codegen.Loop.
    `ps.optim.rules.rule_of` has the slots' names and initial values, `ps.optim.rules.scalars`
    computes the scalars.

    Args:
        config: the rule's settings.
        dtype: "float32" or "float64".
    """
    return _loaded(Loop(rule_of(config), decays(config), over_rows=False).name, dtype)


def sparse_for(config: RuleConfig, dtype: str, *, row_steps: bool = False) -> RowUpdate:
    """Return a rule's compiled kernel for rows of a table; `row_steps`: each counts its updates.

    Only the given rows are decayed and updated, while Keras's dense update moves every row at every
    step. The two agree, for rows and rules that a gradient of zero does not move: SGD and Adagrad
    always, Ftrl after a row's first update; with momentum, moving averages or weight decay this is
    the lazy variant of the rule.

    Args:
        config: the table's rule.
        dtype: dtype of the table.
        row_steps: whether each row counts its own updates.
    """
    rule = counting(rule_of(config)) if row_steps else rule_of(config)
    return RowUpdate(_loaded(Loop(rule, decays(config), over_rows=True).name, dtype), rule)


_HELPERS = {
    "clip": clip,
    "scale": scale,
    "add_scaled": add_scaled,
    "blend": blend,
    "largest_masked": largest_masked,
}
_RULES = (*every_rule(), *(counting(rule) for rule in every_rule() if rule.step_scalars))
_LOOPS = {
    loop.name: loop
    for loop in itertools.starmap(Loop, itertools.product(_RULES, (False, True), (False, True)))
    if loop.over_rows or loop.rule.row is None
}
ALL_NAMES = (*_LOOPS, *_HELPERS)
_compile_lock = threading.Lock()
_inlined = functools.cache(inlined)


@functools.cache
def _dispatcher(name: str) -> Any:
    """Return a kernel by its name; kernels of rules are generated at the first call."""
    if name in _HELPERS:
        return _HELPERS[name]
    loop = _LOOPS[name]
    namespace: dict[str, Any] = {
        "__name__": __name__,  # numba imports the module by this name when it loads from its cache
        "np": np,
        "formula": _inlined(loop.rule.formula),
        "row_formula": _inlined(loop.rule.row.formula) if loop.rule.row is not None else None,
        "decay": _inlined(formulas.decay),
        **{name: getattr(intrinsics, name) for name in INTRINSICS},
    }
    exec(compile(loop.source(), "kernels.py", "exec"), namespace)
    return kernel_of_distinct_arrays(namespace[name])


@functools.cache
def _signature(name: str, dtype: str) -> tuple[Any, ...]:
    """Return the one signature for which a kernel is compiled in this dtype.

    Inputs are declared read-only, which numba lets writable arrays match as well.
    """
    element = numba.from_dtype(np.dtype(dtype))
    read = types.Array(element, 1, "C", readonly=True)
    write = types.Array(element, 1, "C")
    if name == "largest_masked":
        unsigned = types.uint32 if dtype == "float32" else types.uint64
        bits = types.Array(unsigned, 1, "C", readonly=True)
        return bits, bits
    if name in _HELPERS:
        return read, write, read
    loop = _LOOPS[name]
    if not loop.over_rows:
        return read, *[write] * (1 + loop.num_slots), read
    rows = types.Array(types.int64, 1, "C", readonly=True)
    grads = types.Array(element, 2, "C", readonly=True)
    return types.Array(element, 2, "C"), rows, grads, read


def warm(wanted: Iterable[tuple[str, str]]) -> int:
    """Load or compile kernels, by (name, dtype); return how many were not in memory yet."""
    with _compile_lock:
        return sum(
            CACHE.load(_dispatcher(name), _signature(name, dtype)) for name, dtype in sorted(wanted)
        )


def warm_for(manifest: Manifest) -> int:
    """Load or compile the kernels of a shard of this manifest, before it is SERVING."""
    wanted: set[tuple[str, str]] = set()
    for group in manifest.pushed_groups:
        loop = Loop(rule_of(group.rule), decays(group.rule), over_rows=False)
        names = {loop.name, "largest_masked"}
        if manifest.has_barrier:
            names |= {"scale", "add_scaled"}
        if isinstance(group.rule, Descent) and group.rule.clipvalue:
            names.add("clip")
        if is_averaged(group.rule):
            names.add("blend")
        wanted |= {(name, group.dtype) for name in names}
    return warm(wanted)


def _loaded(name: str, dtype: str) -> Any:
    warm([(name, dtype)])
    return _dispatcher(name)
