"""LLVM intrinsics for kernels: flush-to-zero, floats as bits, prefetching.

Flush-to-zero: denormal numbers are taken and stored as zero while a kernel runs. A momentum whose
gradient stays zero decays into denormals and, by rounding, never leaves them; an update kernel is
then 20 times slower for good (measured on an Intel core). TensorFlow runs its compiled functions in
this mode too, so bit equality with Keras needs it. x86-64 only; elsewhere both functions do nothing
and denormals stay denormal.

Bits: float32 and its bits, half precision and back, one instruction where the processor has it.

Prefetching: rows of a table lie all over the memory. A processor runs a dozen cache misses at a
time, but only those it knows of, and it does not look beyond a branch that it predicted wrongly.

Does not: hold kernels (ps.optim, ps.tables, ps.compression).
Runs in: PS processes, and workers that compress gradients.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # llvmlite has no stubs
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

FLUSHES_DENORMALS = platform.machine() in ("x86_64", "AMD64")
_FLUSH_RESULTS_AND_OPERANDS = 0x8040  # bits FTZ and DAZ of MXCSR
_WORD = ir.IntType(32)
_STORE = "llvm.x86.sse.stmxcsr"
_LOAD = "llvm.x86.sse.ldmxcsr"


def _call(builder: Any, name: str, slot: Any) -> None:
    pointer = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [pointer])
    function = builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)
    builder.call(function, [builder.bitcast(slot, pointer)])


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def flush_denormals(_typing_context: Any) -> Any:
    """Switch the calling thread to flush-to-zero; return the mode to restore."""

    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if not FLUSHES_DENORMALS:
            return ir.Constant(_WORD, 0)
        slot = builder.alloca(_WORD)
        _call(builder, _STORE, slot)
        before = builder.load(slot)
        flushing = builder.or_(before, ir.Constant(_WORD, _FLUSH_RESULTS_AND_OPERANDS))
        builder.store(flushing, slot)
        _call(builder, _LOAD, slot)
        return before

    return types.uint32(), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def restore(_typing_context: Any, mode: Any) -> Any:
    """Switch the calling thread back to the mode that `flush_denormals` returned."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if FLUSHES_DENORMALS:
            slot = builder.alloca(_WORD)
            builder.store(arguments[0], slot)
            _call(builder, _LOAD, slot)
        return context.get_dummy_value()

    return types.void(mode), generate


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


_INTRINSIC = "llvm.prefetch.p0"
_FLAG = ir.IntType(32)
_READ, _KEEP, _DATA = 0, 3, 1


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def prefetch(_typing_context: Any, array: Any, _index: Any) -> Any:
    """Fetch the cache line of element `index` of a 1-d contiguous array; never faults."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = arrayobj.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer_type = ir.IntType(8).as_pointer()
        flags = [ir.Constant(_FLAG, flag) for flag in (_READ, _KEEP, _DATA)]
        function_type = ir.FunctionType(ir.VoidType(), [pointer_type, _FLAG, _FLAG, _FLAG])
        function = builder.module.globals.get(_INTRINSIC) or ir.Function(
            builder.module, function_type, _INTRINSIC
        )
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), pointer_type)
        builder.call(function, [pointer, *flags])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate
