"""LLVM intrinsics for kernels: flush-to-zero, floats as bits, choosing by bits, prefetching.

Flush-to-zero: denormal numbers are taken and stored as zero while a kernel runs. A momentum whose
gradient stays zero decays into denormals and, by rounding, never leaves them; an update kernel is
then 20 times slower for good (measured on an Intel core). TensorFlow runs its compiled functions in
this mode too, so bit equality with Keras needs it. x86-64 only; elsewhere both functions do nothing
and denormals stay denormal.

Bits: float32 and its bits, half precision and back, one instruction where the processor has it.

Choosing: `x[i] = new if is_finite else x[i]` becomes a masked store, which takes an AMD core ten
times as long as a plain one, and a test of floats keeps LLVM from vectorizing at all. So the test
and the choice work on bits.

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

FLUSHES_DENORMALS = platform.machine() == "x86_64"
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


_EXPONENT_STEP = {32: 1 << 23, 64: 1 << 52}
_FLOATS = {32: ir.FloatType(), 64: ir.DoubleType()}
_MASKS = {32: types.uint32, 64: types.uint64}


def _emit_nonfinite(builder: Any, value: Any, bits: int) -> Any:
    """An exponent of ones, and only that, carries into the bit of the sign."""
    word = ir.IntType(bits)
    magnitude = builder.and_(builder.bitcast(value, word), ir.Constant(word, (1 << bits - 1) - 1))
    carried = builder.add(magnitude, ir.Constant(word, _EXPONENT_STEP[bits]))
    return builder.ashr(carried, ir.Constant(word, bits - 1))


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def nonfinite(_typing_context: Any, value: Any) -> Any:
    """Return a mask as wide as the float: all ones if it is NaN or infinite, else zero."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _emit_nonfinite(builder, arguments[0], value.bitwidth)

    return _MASKS[value.bitwidth](value), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def or_nonfinite(_typing_context: Any, mask: Any, value: Any) -> Any:
    """Return `mask | nonfinite(value)`, which numba would widen to 64 bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.or_(arguments[0], _emit_nonfinite(builder, arguments[1], value.bitwidth))

    return mask(mask, value), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def unless(_typing_context: Any, mask: Any, new: Any, old: Any) -> Any:
    """Return `old` where the mask is all ones, `new` where it is zero."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(new.bitwidth)
        new_bits, old_bits = (builder.bitcast(number, word) for number in arguments[1:])
        differing = builder.and_(builder.xor(new_bits, old_bits), arguments[0])
        return builder.bitcast(builder.xor(new_bits, differing), _FLOATS[new.bitwidth])

    return new(mask, new, old), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def counted(_typing_context: Any, count: Any, mask: Any) -> Any:
    """Return `count`, and one more if the mask is all ones; both as wide as the mask."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.sub(arguments[0], arguments[1])

    return count(count, mask), generate


_INTRINSIC = "llvm.prefetch.p0"
_READ, _KEEP, _DATA = 0, 3, 1


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def prefetch(_typing_context: Any, array: Any, _index: Any) -> Any:
    """Fetch the cache line of element `index` of a 1-d contiguous array; never faults."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = arrayobj.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer_type = ir.IntType(8).as_pointer()
        flags = [ir.Constant(_WORD, flag) for flag in (_READ, _KEEP, _DATA)]
        function_type = ir.FunctionType(ir.VoidType(), [pointer_type, _WORD, _WORD, _WORD])
        function = builder.module.globals.get(_INTRINSIC) or ir.Function(
            builder.module, function_type, _INTRINSIC
        )
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), pointer_type)
        builder.call(function, [pointer, *flags])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate
