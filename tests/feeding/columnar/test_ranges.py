"""Which numbers another dtype does not hold, against what a cast makes of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from feeding.columnar.ranges import misfits, rounded, unheld
from feeding.columnar.schema import DTYPES

INTS = sorted(name for name in DTYPES if "int" in name)
FLOATS = sorted(name for name in DTYPES if "float" in name)


def edges_of(dtype: str) -> list[int]:
    """Ints at the ends of a dtype, and at those of every float's mantissa."""
    info = np.iinfo(dtype)
    ends = [2**bits + more for bits in (0, 7, 8, 11, 16, 24, 31, 53, 63) for more in (-1, 0, 1)]
    wanted = {info.min, info.max, *ends, *(-end for end in ends)}
    return sorted(each for each in wanted if info.min <= each <= info.max)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(INTS, [*INTS, *FLOATS])))
def test_ints_that_a_dtype_holds_survive_the_cast(source, target):
    for value in edges_of(source):
        array = np.array([value], source)
        with np.errstate(all="ignore"):
            cast = array.astype(target)[0]
        is_finite = bool(np.isfinite(cast))
        is_same = is_finite and int(cast) == value
        odd = (value, value)
        if target in FLOATS:
            assert misfits(array, np.dtype(target)) == (None if is_finite else odd)
            assert rounded(array, np.dtype(target)) == (None if is_same else odd)
        assert unheld(array, np.dtype(target)) == (None if is_same else odd)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_float_takes_what_does_not_become_infinite(dtype):
    info = np.finfo(dtype)
    greatest = float(info.max)
    half = (greatest - float(np.nextafter(info.max, info.dtype.type(0)))) / 2
    fits, odd = greatest + 0.9 * half, greatest + half
    with np.errstate(over="ignore"):
        assert np.isfinite(info.dtype.type(fits))
        assert np.isinf(info.dtype.type(odd))
    assert misfits(np.array([fits, -fits, np.inf, np.nan]), info.dtype) is None
    assert misfits(np.array([odd, -odd, np.inf, np.nan]), info.dtype) == (-odd, odd)
    assert misfits(np.array([fits, -fits], dtype), np.dtype("float64")) is None


def test_no_number_does_not_fit():
    for values in (np.zeros((0, 3)), np.zeros(0, np.int64), np.array([np.nan]), np.array([True])):
        assert misfits(values, np.dtype("float16")) is None
    assert misfits(np.array([[2**16, 3]]), np.dtype("float16")) == (3, 2**16)


def test_only_ints_that_change_are_rounded():
    ints = np.array([[2**25, 3], [2**24 + 1, -(2**24) - 1]])
    assert rounded(ints, np.dtype("float32")) == (-(2**24) - 1, 2**24 + 1)
    assert rounded(ints, np.dtype("float64")) is None
    assert rounded(np.zeros((0, 3), np.int64), np.dtype("float32")) is None
