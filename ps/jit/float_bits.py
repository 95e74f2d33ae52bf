"""Float numbers as bits inside kernels: float32 and its bits, half precision and back.

Covers: what numba has no words for and LLVM has; one instruction each where the processor has it.
Does not: hold kernels (ps.compression.kernels).      Runs in: PS processes and workers that pack.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # llvmlite has no stubs
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(32)
_SHORT = ir.IntType(16)


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def bits_of(_typing_context: Any, _value: Any) -> Any:
    """Return the 32 bits of a float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _WORD)

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def float_of(_typing_context: Any, _bits: Any) -> Any:
    """Return the float32 that has these 32 bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def half_of(_typing_context: Any, _value: Any) -> Any:
    """Return the bits of the IEEE half nearest to a float32, ties to even."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), _SHORT)

    return types.uint16(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def float_of_half(_typing_context: Any, _bits: Any) -> Any:
    """Return the float32 that equals the IEEE half with these bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate
