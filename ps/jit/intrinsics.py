"""Flush-to-zero for kernels: denormal numbers are taken and stored as zero while one runs.

Why: a momentum whose gradient stays zero decays into denormals and, by rounding, never leaves them;
an update kernel is then 20 times slower for good (measured on an Intel core). TensorFlow runs its
compiled functions in this mode too, so it also belongs to the bit equality with Keras.
x86-64 only; elsewhere both functions do nothing and denormals stay denormal.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # llvmlite has no stubs
from numba import types
from numba.extending import intrinsic

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
