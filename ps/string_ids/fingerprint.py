"""Fingerprint: FarmHash Fingerprint64 of many strings at once.

Covers: the formulas, strings of all lengths.
Does not: take Python strings apart (ps.string_ids.ids).      Pure; Threads: any.

It is `farmhashna::Hash64` of https://github.com/google/farmhash, whose results are fixed for ever:
strings of up to 16, 32 and 64 bytes have formulas of their own, longer ones a loop over blocks of
64 bytes, of which the last overlaps the one before. Numbers are uint64 and wrap.

numpy takes all strings of one length together: compiling a loop would take seconds of every process
that meets strings, and these are few lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array = np.ndarray[Any, Any]
Two = tuple[Array, Array]
Three = tuple[Array, Array, Array]

_U = np.uint64
_K0, _K1, _K2 = _U(0xC3A5C85C97CB3127), _U(0xB492B66FBE98F273), _U(0x9AE16A3B2F90404F)
_SEED = 81
_BLOCK = 64
_AT_ONCE_BYTES, _AT_ONCE = 1 << 20, 1 << 16
"""Bytes and strings that are arranged by their length together: so they stay in the cache."""


def fingerprints(data: Array, starts: Array) -> Array:
    """Return the fingerprint of each string.

    Args:
        data: [num_bytes] uint8: the strings, one behind the other.
        starts: [n + 1] int64: where each string begins and the last one ends.

    Returns:
        [n] uint64.
    """
    found = np.empty(starts.size - 1, np.uint64)
    begin = 0
    while begin < found.size:
        end = int(np.searchsorted(starts, starts[begin] + _AT_ONCE_BYTES, side="right")) - 1
        end = min(max(end, begin + 1), begin + _AT_ONCE, found.size)
        _fill(data, starts[begin : end + 1], found[begin:end])
        begin = end
    return found


def _fill(data: Array, starts: Array, found: Array) -> None:
    sizes = np.diff(starts)
    by_size = np.argsort(sizes, kind="stable")
    lengths, firsts = np.unique(sizes[by_size], return_index=True)
    for length, places in zip(lengths.tolist(), np.split(by_size, firsts[1:]), strict=True):
        if length:
            rows = sliding_window_view(data, length)[starts[places]]
            found[places] = _of_one_length(rows, length)
        else:
            found[places] = _K2


def _of_one_length(rows: Array, size: int) -> Array:
    """Return the fingerprints [n] of strings [n, size], size > 0."""
    if size <= 16:
        return _of_16(rows, size)
    if size <= 32:
        return _of_32(rows, size)
    return _of_64(rows, size) if size <= _BLOCK else _of_more(rows, size)


def _word(rows: Array, at: int, dtype: str = "<u8") -> Array:
    """Return 8 bytes of each string, or 4, as little-endian numbers."""
    width = np.dtype(dtype).itemsize
    part = np.ascontiguousarray(rows[:, at : at + width])
    return part.view(dtype)[:, 0].astype(np.uint64, copy=False)


def _rotated(value: Array, bits: int) -> Array:
    """Return the numbers with their bits rotated to the right."""
    return (value >> _U(bits)) | (value << _U(64 - bits))


def _mixed(value: Array) -> Array:
    found: Array = value ^ (value >> _U(47))
    return found


def _joined(one: Array, other: Array, factor: Any) -> Array:
    """Return one number of two (HashLen16)."""
    first = _mixed((one ^ other) * factor)
    found: Array = _mixed((other ^ first) * factor) * factor
    return found


def _factor(size: int) -> np.uint64:
    return _U((int(_K2) + 2 * size) % 2**64)


def _of_16(rows: Array, size: int) -> Array:
    """Return the fingerprints of 1 to 16 bytes."""
    factor = _factor(size)
    if size >= 8:
        a, b = _word(rows, 0) + _K2, _word(rows, size - 8)
        c = _rotated(b, 37) * factor + a
        d = (_rotated(a, 25) + b) * factor
        return _joined(c, d, factor)
    if size >= 4:
        a, b = _word(rows, 0, "<u4"), _word(rows, size - 4, "<u4")
        return _joined(_U(size) + (a << _U(3)), b, factor)
    a, b, c = (rows[:, at].astype(np.uint64) for at in (0, size >> 1, size - 1))
    y, z = a + (b << _U(8)), _U(size) + (c << _U(2))
    return _mixed(y * _K2 ^ z * _K0) * _K2


def _of_32(rows: Array, size: int) -> Array:
    """Return the fingerprints of 17 to 32 bytes."""
    factor = _factor(size)
    a, b = _word(rows, 0) * _K1, _word(rows, 8)
    c, d = _word(rows, size - 8) * factor, _word(rows, size - 16) * _K2
    one = _rotated(a + b, 43) + _rotated(c, 30) + d
    return _joined(one, a + _rotated(b + _K2, 18) + c, factor)


def _of_64(rows: Array, size: int) -> Array:
    """Return the fingerprints of 33 to 64 bytes."""
    factor = _factor(size)
    a, b = _word(rows, 0) * _K2, _word(rows, 8)
    c, d = _word(rows, size - 8) * factor, _word(rows, size - 16) * _K2
    y = _rotated(a + b, 43) + _rotated(c, 30) + d
    z = _joined(y, a + _rotated(b + _K2, 18) + c, factor)
    e, f = _word(rows, 16) * factor, _word(rows, 24)
    g, h = (y + _word(rows, size - 32)) * factor, (z + _word(rows, size - 24)) * factor
    one = _rotated(e + f, 43) + _rotated(g, 30) + h
    return _joined(one, e + _rotated(f + a, 18) + g, factor)


def _weak(rows: Array, at: int, a: Array, b: Array) -> Two:
    """Return two numbers of 32 bytes and two seeds (WeakHashLen32WithSeeds)."""
    w, x, y, z = (_word(rows, at + place) for place in (0, 8, 16, 24))
    a = a + w
    b = _rotated(b + a + z, 21)
    total = a + x + y
    return total + z, b + _rotated(total, 44) + a


def _with_block(  # noqa: PLR0913 - the state of the loop, and what differs for the last block
    rows: Array, at: int, xyz: Three, v: Two, w: Two, factor: Any, weight: np.uint64
) -> tuple[Three, Two, Two]:
    """Return the state after 64 bytes.

    Args:
        rows: [n, size] uint8.
        at: where the block begins.
        xyz: three numbers of the state.
        v: two more.
        w: two more.
        factor: factor of this block.
        weight: weight of the state before it; 9 for the last block.
    """
    x, y, z = xyz
    x = _rotated(x + y + v[0] + _word(rows, at + 8), 37) * factor
    y = _rotated(y + v[1] + _word(rows, at + 48), 42) * factor
    x = x ^ (w[1] * weight)
    y = y + v[0] * weight + _word(rows, at + 40)
    z = _rotated(z + w[0], 33) * factor
    v = _weak(rows, at, v[1] * factor, x + w[0])
    w = _weak(rows, at + 32, z + w[1], y + _word(rows, at + 16))
    return (z, y, x), v, w


def _of_more(rows: Array, size: int) -> Array:
    """Return the fingerprints of more than 64 bytes."""
    last = (size - 1) % _BLOCK
    y = np.full(len(rows), (_SEED * int(_K1) + 113) % 2**64, np.uint64)
    x = _U(_SEED * int(_K2) % 2**64) + _word(rows, 0)
    z = _mixed(y * _K2 + _U(113)) * _K2
    zero = np.zeros_like(x)
    state = (x, y, z), (zero, zero), (zero, zero)
    for at in range(0, size - 1 - last, _BLOCK):
        state = _with_block(rows, at, *state, _K1, _U(1))
    (x, y, z), v, w = state
    factor = _K1 + ((z & _U(0xFF)) << _U(1))
    w = (w[0] + _U(last), w[1])
    v = (v[0] + w[0], v[1])
    w = (w[0] + v[0], w[1])
    (x, y, z), v, w = _with_block(rows, size - _BLOCK, (x, y, z), v, w, factor, _U(9))
    one = _joined(v[0], w[0], factor) + _mixed(y) * _K0 + z
    return _joined(one, _joined(v[1], w[1], factor) + x, factor)
