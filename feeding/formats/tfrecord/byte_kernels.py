"""Byte kernels: unaligned loads and byte copies for numba, and a loop that gathers byte strings.

Covers: word_at, copy_bytes (intrinsics that numba lacks), gather.
Does not: check bounds; the callers have checked them.
Threads: any; pure, releases the GIL.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # llvmlite has no stubs
from numba.core import cgutils, types
from numba.extending import intrinsic

from feeding.columnar.chunk import Array
from feeding.formats.kernel_cache import kernel


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def word_at(_typing: Any, buffer: Any, _index: Any) -> Any:
    """Load eight little-endian bytes at any index of a uint8 array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        place = builder.gep(array.data, [args[1]])
        return builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(buffer, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba is untyped
def copy_bytes(_typing: Any, out: Any, _place: Any, buffer: Any, _start: Any, _count: Any) -> Any:
    """Copy bytes between uint8 arrays, to out[place:] from buffer[start:].

    Args:
        out: [bytes] uint8; filled from `place` on.
        buffer: [bytes] uint8, read from `start` on.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = context.make_array(signature.args[0])(context, builder, args[0])
        source = context.make_array(signature.args[2])(context, builder, args[2])
        to, at = builder.gep(target.data, [args[1]]), builder.gep(source.data, [args[3]])
        cgutils.raw_memcpy(builder, to, at, args[4], 1)
        return context.get_dummy_value()

    return types.void(out, types.int64, buffer, types.int64, types.int64), generate


@kernel
def gather(buffer: Array, starts: Array, lengths: Array, out: Array, places: Array) -> None:
    """Copy byte strings between two buffers.

    Args:
        buffer: uint8, holds the strings.
        starts: int64[n], offset of each string in the buffer.
        lengths: int64[n], bytes of each.
        out: uint8, gets the strings.
        places: int64[n], offset of each in `out`.
    """
    for index in range(starts.size):
        copy_bytes(out, places[index], buffer, starts[index], lengths[index])
