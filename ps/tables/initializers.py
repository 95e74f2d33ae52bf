"""Initial values of rows from (seed, id) alone: no state, so no order matters.

Covers: the counter-based generator and Keras's distributions as compiled loops.
Does not: decide which rows are created (ps.tables.segment).
Runs in: PS processes; imports numba.      Threads: any; kernels run without the GIL.

Number j of a row derives from the 64 bits `mix(mix(id ^ key) + j * golden)`, where `key` derives
from the table's seed: SplitMix64 with one stream per id. So numbers depend neither on the number of
servers nor on the order in which ids appear.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ps.jit.cache import inlined, kernel
from ps.manifest.initializer_spec import Constant, Initializer, RandomUniform, TruncatedNormal
from ps.tables.hash_index import mix

Array = np.ndarray[Any, Any]

_CONSTANT, _UNIFORM, _NORMAL, _TRUNCATED = range(4)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(11)
_UNIT = 2.0**-53
_CUT = 0.022750131948179207
"""Share of a normal distribution below minus two standard deviations."""


@inlined
def _polynomial(x: Any, coefficients: Any) -> Any:
    total = coefficients[0]
    for i in range(1, len(coefficients)):
        total = total * x + coefficients[i]
    return total


_CENTER_P = (
    2509.0809287301226727,
    33430.575583588128105,
    67265.770927008700853,
    45921.953931549871457,
    13731.693765509461125,
    1971.5909503065514427,
    133.14166789178437745,
    3.387132872796366608,
)
_CENTER_Q = (
    5226.495278852545925,
    28729.085735721942674,
    39307.89580009271061,
    21213.794301586595867,
    5394.1960214247511077,
    687.1870074920579083,
    42.313330701600911252,
    1.0,
)
_MIDDLE_P = (
    7.7454501427834140764e-4,
    0.0227238449892691845833,
    0.24178072517745061177,
    1.27045825245236838258,
    3.64784832476320460504,
    5.7694972214606914055,
    4.6303378461565452959,
    1.42343711074968357734,
)
_MIDDLE_Q = (
    1.05075007164441684324e-9,
    5.475938084995344946e-4,
    0.0151986665636164571966,
    0.14810397642748007459,
    0.68976733498510000455,
    1.6763848301838038494,
    2.05319162663775882187,
    1.0,
)
_TAIL_P = (
    2.01033439929228813265e-7,
    2.71155556874348757815e-5,
    0.0012426609473880784386,
    0.026532189526576123093,
    0.29656057182850489123,
    1.7848265399172913358,
    5.4637849111641143699,
    6.6579046435011037772,
)
_TAIL_Q = (
    2.04426310338993978564e-15,
    1.4215117583164458887e-7,
    1.8463183175100546818e-5,
    7.868691311456132591e-4,
    0.0148753612908506148525,
    0.13692988092273580531,
    0.59983220655588793769,
    1.0,
)


@inlined
def normal_quantile(probability: Any) -> Any:
    """Return x with P(X < x) = probability for a unit normal X; probability in (0, 1).

    Source: Wichura, Algorithm AS 241: The Percentage Points of the Normal Distribution, Applied
    Statistics 37 (1988), PPND16: about 16 digits.
    """
    q = probability - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return q * _polynomial(r, _CENTER_P) / _polynomial(r, _CENTER_Q)
    r = math.sqrt(-math.log(min(probability, 1.0 - probability)))
    if r <= 5.0:
        x = _polynomial(r - 1.6, _MIDDLE_P) / _polynomial(r - 1.6, _MIDDLE_Q)
    else:
        x = _polynomial(r - 5.0, _TAIL_P) / _polynomial(r - 5.0, _TAIL_Q)
    return -x if q < 0.0 else x


@inlined
def _unit_of(stream: Any, j: Any) -> Any:
    """Return number j of a stream: the middle of one of 2^53 equal parts of (0, 1)."""
    bits = mix(stream + np.uint64(j) * _GOLDEN)
    return (np.float64(bits >> _SHIFT) + 0.5) * _UNIT


@kernel
def initialize(out: Array, at: Array, ids: Array, recipe: Array, key: int) -> None:
    """Write the initial values of `ids` to the rows `at` of `out`, in its first columns.

    Args:
        out: [capacity, width >= dim] of the table's dtype; changed.
        at: [n] int64, row number in `out` of each id; others outside of `out` are skipped.
        ids: [n] int64.
        recipe: [4] float64: dim, kind, and its two parameters; see `recipe_of`.
        key: see `key_of`.
    """
    kind, one, other = int(recipe[1]), recipe[2], recipe[3]
    dim = min(int(recipe[0]), out.shape[1])
    for i in range(ids.size):
        row = at[i]
        if row < 0 or row >= out.shape[0]:
            continue
        stream = mix(np.uint64(ids[i]) ^ np.uint64(key))
        # A loop per kind: LLVM vectorizes the first two.
        if kind == _UNIFORM:
            for j in range(dim):
                out[row, j] = one + (other - one) * _unit_of(stream, j)
        elif kind == _CONSTANT:
            for j in range(dim):
                out[row, j] = one
        elif kind == _NORMAL:
            for j in range(dim):
                out[row, j] = one + other * normal_quantile(_unit_of(stream, j))
        else:
            for j in range(dim):
                u = _CUT + (1.0 - 2.0 * _CUT) * _unit_of(stream, j)
                out[row, j] = one + other * normal_quantile(u)


def recipe_of(initializer: Initializer, dim: int) -> Array:
    """Return an initializer as [4] float64 for `initialize`.

    Args:
        initializer: the table's initializer.
        dim: number of values of a row.
    """
    if isinstance(initializer, Constant):
        numbers = (_CONSTANT, initializer.value, 0.0)
    elif isinstance(initializer, RandomUniform):
        numbers = (_UNIFORM, initializer.minval, initializer.maxval)
    else:
        kind = _TRUNCATED if isinstance(initializer, TruncatedNormal) else _NORMAL
        numbers = (kind, initializer.mean, initializer.stddev)
    return np.array((dim, *numbers), np.float64)


def key_of(seed: int) -> int:
    """Return the key of a seed's random streams, 64 bits as int64."""
    number = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % 2**64
    return number - 2**64 if number >= 2**63 else number
