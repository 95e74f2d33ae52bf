"""What compiled loops do with bytes and numba has no words for: unaligned words, whole copies.

Does not: check bounds; its callers have.      Used by compiled code alone.

numba keeps a caller's compiled code when this file changes: touch the kernels' files, too.

[merged feeding/formats/tfrecord/byte_kernels.py] Compiled loop that copies byte strings from
where they were found to where they belong.

Pure; releases the GIL. Bounds were checked by whoever found the strings and made the room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]  # llvmlite has no stubs
from numba.core import cgutils, types
from numba.extending import intrinsic

from feeding.columnar.chunk import Array


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
    """Copy bytes between uint8 arrays, to out[place:] from buffer[start:]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = context.make_array(signature.args[0])(context, builder, args[0])
        source = context.make_array(signature.args[2])(context, builder, args[2])
        to, at = builder.gep(target.data, [args[1]]), builder.gep(source.data, [args[3]])
        cgutils.raw_memcpy(builder, to, at, args[4], 1)
        return context.get_dummy_value()

    return types.void(out, types.int64, buffer, types.int64, types.int64), generate


_kernel: Callable[[Any], Any] = numba.njit(nogil=True, cache=True, error_model="numpy")


@_kernel
def gather(buffer: Array, starts: Array, lengths: Array, out: Array, places: Array) -> None:
    """Copy buffer[starts[i]:] of lengths[i] bytes to out[places[i]:]; buffer and out are uint8."""
    for index in range(starts.size):
        copy_bytes(out, places[index], buffer, starts[index], lengths[index])
