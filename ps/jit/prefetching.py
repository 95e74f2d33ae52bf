"""Prefetching for kernels: ask for a cache line some iterations before it is needed.

Why: rows of a table lie all over the memory. A processor runs a dozen cache misses at a time, but
only those it knows of, and it does not look beyond a branch that it guessed wrongly.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # llvmlite has no stubs
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

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
