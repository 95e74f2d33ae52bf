"""Kernels that pack a bucket of a gradient and unpack it (ps.compression.format).

Covers: packing with what earlier packing has left out, unpacking, the checks of both.
Does not: know pushes or servers (ps.client.error_feedback, ps.server.receive).
Runs in: PS processes, and workers that compress; imports numba.
Threads: any; kernels run without the GIL.

Packing takes `total = gradient + left`, rounded once, and leaves `total - unpacked` for the next
time. That difference is exact: for each element unpacked + left is total, bit for bit. Two facts
carry it. A power of two as scale (fp16) changes no digit, and a difference of neighbours is exact
(Sterbenz), which is why int8 divides and rounds ties to even: a number below half a scale must not
become one. Denormals are kept, or the small ones would be lost in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import types

from ps.compression.format import BLOCK, Compression, views_of_packed
from ps.errors import NonFiniteGradient, PackingError
from ps.jit.cache import CACHE, inlined, kernel_of_distinct_arrays
from ps.jit.intrinsics import bits_of, float_of, float_of_half, half_of

Array = np.ndarray[Any, Any]

_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_INFINITE = np.uint32(0x7F80_0000)
_INFINITY = np.float32(np.inf)
_SIGN = np.uint32(0x8000_0000)
_LARGEST_CODE = np.float32(127)
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / _LARGEST_CODE, np.float32(0))
"""127 times a larger one could be infinite."""
_LEAST_SCALE = np.finfo(np.float32).tiny
"""Below it a scale has few digits, or is 0: such a block waits until more has come together."""
_ROUNDER = np.float32(3 << 22)
"""Adding and subtracting it rounds a small number to an integer, ties to even."""
_HALF_EXPONENT = np.uint32(14)
"""The largest element of a block is brought to 2**14 .. 2**15; the largest half is 65504."""
_LARGEST_EXPONENT = np.uint32(254) - _HALF_EXPONENT
_HALF_MAGNITUDE = np.uint16(0x7FFF)
_BELOW_TOP = np.uint16(0x77FF)
"""The half before 2**15, which is 2**128 under the largest scale."""
_ONE_EXPONENT = np.uint32(1)
_TWO_EXPONENTS = np.uint32(254)
_EXPONENT_BITS = np.uint32(23)
_UPPER = np.uint32(16)
_LAST_BIT = np.uint32(1)
_ALMOST_HALF = np.uint32(0x7FFF)
_LARGEST_BF16 = np.uint32(0x7F7F)


@inlined
def add_left(g: Array, left: Array, total: Array) -> Any:
    """Write g + left to total; return the bits of the largest magnitude, or of what is not finite.

    Integers are compared: a maximum of floats is not vectorized, and does not see NaN.

    Args:
        g: [n] float32, a bucket's gradient.
        left: [n] float32, what earlier packings rounded away.
        total: [n] float32; filled.
    """
    most = np.uint32(0)
    for i in range(total.size):
        total[i] = g[i] + left[i]
        most = np.uint32(max(most, np.uint32(bits_of(total[i]) & _MAGNITUDE)))
    return most


@kernel_of_distinct_arrays
def pack_int8(g: Array, left: Array, new_left: Array, scales: Array, codes: Array) -> int:
    """Return -1, or the first element of a block that is not finite; then codes mean nothing.

    Args:
        g: [n] float32, a bucket's gradient.
        left: [n] float32, what earlier packings rounded away.
        new_left: [n] float32; filled with what this packing rounds away.
        scales: [num_scales] float32; filled, one per block.
        codes: [n] int8; filled.
    """
    for b in range(scales.size):
        block = slice(b * BLOCK, b * BLOCK + BLOCK)
        total, code = new_left[block], codes[block]
        most = add_left(g[block], left[block], total)
        if most >= _INFINITE:
            return b * BLOCK
        scale = min(float_of(most) / _LARGEST_CODE, _LARGEST_SCALE)
        if scale < _LEAST_SCALE:
            scales[b] = np.float32(0)
            code[:] = 0
        else:
            scales[b] = scale
            for i in range(total.size):
                nearest = (total[i] / scale + _ROUNDER) - _ROUNDER
                code[i] = np.int8(nearest)
                total[i] = total[i] - nearest * scale
    return -1


@kernel_of_distinct_arrays
def unpack_int8(scales: Array, codes: Array, out: Array) -> int:
    """Return -1, or the first scale that no packer makes; then `out` means nothing.

    Args:
        scales: [num_scales] float32, one per block.
        codes: [n] int8.
        out: [n] float32; filled.
    """
    for b in range(scales.size):
        scale = scales[b]
        if not (np.float32(0) <= scale < _INFINITY):
            return b
        block = slice(b * BLOCK, b * BLOCK + BLOCK)
        code, values = codes[block], out[block]
        for i in range(values.size):
            values[i] = np.float32(np.int32(code[i])) * scale
    return -1


@kernel_of_distinct_arrays
def pack_fp16(g: Array, left: Array, new_left: Array, scales: Array, codes: Array) -> int:
    """Return as pack_int8.

    Args:
        g: [n] float32, a bucket's gradient.
        left: [n] float32, what earlier packings rounded away.
        new_left: [n] float32; filled with what this packing rounds away.
        scales: [num_scales] float32; filled, one per block.
        codes: [n] 16 bits; filled.
    """
    for b in range(scales.size):
        block = slice(b * BLOCK, b * BLOCK + BLOCK)
        total, code = new_left[block], codes[block]
        most = add_left(g[block], left[block], total)
        if most >= _INFINITE:
            return b * BLOCK
        exponent = max(most >> _EXPONENT_BITS, _HALF_EXPONENT + _ONE_EXPONENT) - _HALF_EXPONENT
        scale = float_of(np.uint32(exponent << _EXPONENT_BITS))
        inverse = float_of(np.uint32((_TWO_EXPONENTS - exponent) << _EXPONENT_BITS))
        scales[b] = scale
        highest = _BELOW_TOP if exponent == _LARGEST_EXPONENT else _HALF_MAGNITUDE
        for i in range(total.size):
            rounded = half_of(total[i] * inverse)
            magnitude = np.uint16(min(np.uint16(rounded & _HALF_MAGNITUDE), highest))
            nearest = np.uint16(np.uint16(rounded & ~_HALF_MAGNITUDE) | magnitude)
            code[i] = nearest
            total[i] = total[i] - float_of_half(nearest) * scale
    return -1


@kernel_of_distinct_arrays
def unpack_fp16(scales: Array, codes: Array, out: Array) -> int:
    """Return as unpack_int8.

    Args:
        scales: [num_scales] float32, one per block.
        codes: [n] 16 bits.
        out: [n] float32; filled.
    """
    for b in range(scales.size):
        scale = scales[b]
        if not (np.float32(0) <= scale < _INFINITY):
            return b
        block = slice(b * BLOCK, b * BLOCK + BLOCK)
        code, values = codes[block], out[block]
        for i in range(values.size):
            values[i] = float_of_half(code[i]) * scale
    return -1


@kernel_of_distinct_arrays
def pack_bf16(g: Array, left: Array, new_left: Array, _scales: Array, codes: Array) -> int:
    """Return as pack_int8; without scales. What would be infinite becomes the largest number.

    Args:
        g: [n] float32, a bucket's gradient.
        left: [n] float32, what earlier packings rounded away.
        new_left: [n] float32; filled with what this packing rounds away.
        codes: [n] 16 bits; filled.
    """
    for start in range(0, g.size, BLOCK):
        block = slice(start, start + BLOCK)
        total, code = new_left[block], codes[block]
        most = add_left(g[block], left[block], total)
        if most >= _INFINITE:
            return start
        for i in range(total.size):
            bits = bits_of(total[i])
            odd = np.uint32(bits >> _UPPER) & _LAST_BIT
            rounded = np.uint32((bits & _MAGNITUDE) + _ALMOST_HALF + odd) >> _UPPER
            nearest = np.uint32(min(rounded, _LARGEST_BF16) | ((bits & _SIGN) >> _UPPER))
            code[i] = np.uint16(nearest)
            total[i] = total[i] - float_of(np.uint32(nearest << _UPPER))
    return -1


@kernel_of_distinct_arrays
def unpack_bf16(_scales: Array, codes: Array, out: Array) -> int:
    """Return as unpack_int8; without scales.

    Args:
        codes: [n] 16 bits.
        out: [n] float32; filled.
    """
    for i in range(out.size):
        out[i] = float_of(np.uint32(np.uint32(codes[i]) << _UPPER))
    return -1


def _flat(dtype: Any, *, read: bool) -> types.Array:
    return types.Array(dtype, 1, "C", readonly=read)


def _pack_signature(code: Any) -> tuple[types.Array, ...]:
    read, write = _flat(types.float32, read=True), _flat(types.float32, read=False)
    return read, read, write, write, _flat(code, read=False)


def _unpack_signature(code: Any) -> tuple[types.Array, ...]:
    read, write = _flat(types.float32, read=True), _flat(types.float32, read=False)
    return read, _flat(code, read=True), write


_PACKERS: dict[str, tuple[Any, tuple[types.Array, ...]]] = {
    "fp16": (pack_fp16, _pack_signature(types.uint16)),
    "bf16": (pack_bf16, _pack_signature(types.uint16)),
    "int8": (pack_int8, _pack_signature(types.int8)),
}
_UNPACKERS: dict[str, tuple[Any, tuple[types.Array, ...]]] = {
    "fp16": (unpack_fp16, _unpack_signature(types.uint16)),
    "bf16": (unpack_bf16, _unpack_signature(types.uint16)),
    "int8": (unpack_int8, _unpack_signature(types.int8)),
}
ALL_KINDS: tuple[Compression, ...] = ("fp16", "bf16", "int8")


def warm_client(kinds: Iterable[Compression]) -> int:
    """Load or compile what a worker calls that packs; return how many kernels were new."""
    return sum(CACHE.load(*_PACKERS[kind]) for kind in sorted(kinds))


def warm_server(kinds: Iterable[Compression]) -> int:
    """Load or compile what a server calls for these; return how many kernels were new."""
    return sum(CACHE.load(*_UNPACKERS[kind]) for kind in sorted(kinds))


def pack(kind: Compression, gradient: Array, left: Array, new_left: Array, packed: Array) -> None:
    """Pack gradient + left into `packed`, and write what that leaves out to `new_left`.

    Args:
        kind: a format that warm_client() has loaded.
        gradient: float32, one bucket.
        left: same size: what was left out before.
        new_left: same size, written.
        packed: uint8, of ps.compression.format.packed_nbytes, written.

    Raises:
        NonFiniteGradient: the sum has NaN or infinity; `new_left` and `packed` mean nothing, the
            details have the first such element as `at`.
    """
    scales, codes, padding = views_of_packed(kind, packed, gradient.size)
    padding[:] = 0
    if _PACKERS[kind][0](gradient, left, new_left, scales, codes) < 0:
        return
    finite = np.isfinite(gradient)
    is_sum = bool(finite.all())
    with np.errstate(over="ignore"):
        finite = np.isfinite(gradient + left) if is_sum else finite
    count = int(finite.size - finite.sum())
    added = ", with what earlier packing has left out added," if is_sum else ""
    raise NonFiniteGradient(
        f"{count} of {finite.size} values{added} are NaN or infinite",
        {"count": str(count), "at": str(int(np.argmin(finite)))},
    )


def unpack(kind: Compression, packed: Array, out: Array) -> None:
    """Unpack one bucket; the values need not be finite.

    Args:
        kind: a format that warm_server() has loaded.
        packed: uint8, of ps.compression.format.packed_nbytes, aligned to 4 bytes.
        out: float32, one bucket, written.

    Raises:
        PackingError: a scale is negative, NaN or infinite; `out` means nothing.
    """
    scales, codes, _ = views_of_packed(kind, packed, out.size)
    bad = _UNPACKERS[kind][0](scales, codes, out)
    if bad >= 0:
        raise PackingError(
            f"scale {bad} of {scales.size} of a gradient packed as {kind} is {scales[bad]}; scales "
            "are finite and at least 0: both sides must run the same version",
            {"scale": str(scales[bad])},
        )
