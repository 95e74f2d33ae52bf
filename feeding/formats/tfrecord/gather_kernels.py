"""Compiled loop that copies byte strings from where they were found to where they belong.

Pure; releases the GIL. Bounds were checked by whoever found the strings and made the room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from feeding.columnar.chunk import Array
from feeding.formats.tfrecord.byte_kernels import copy_bytes

_kernel: Callable[[Any], Any] = numba.njit(nogil=True, cache=True, error_model="numpy")


@_kernel
def gather(buffer: Array, starts: Array, lengths: Array, out: Array, places: Array) -> None:
    """Copy buffer[starts[i]:] of lengths[i] bytes to out[places[i]:]; buffer and out are uint8."""
    for index in range(starts.size):
        copy_bytes(out, places[index], buffer, starts[index], lengths[index])
