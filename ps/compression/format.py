"""Formats of packed gradients: their bytes on the wire, and which groups may use them.

Covers: sizes and views of a packed bucket.
Does not: pack (ps.compression.kernels), keep what was rounded away (ps.client.error_feedback).
Pure; no numba, no threads.

Each bucket of float32 values is packed on its own, so it does not matter how buckets are dealt:

    format  bytes of n elements, then zeros up to a multiple of 4      a value is
    none    f32[n]                                                     as it is
    bf16    u16[n]                                                     the upper half of a float32
    fp16    f32[blocks] scales, f16[n]                                 code * scale, a power of two
    int8    f32[blocks] scales, i8[n]                                  code * scale

A block is BLOCK neighbouring elements, the last one of a bucket may be shorter. Its scale fits its
largest element, so nothing overflows, and small gradients keep their digits in fp16.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Compression = Literal["none", "fp16", "bf16", "int8"]

BLOCK = 256
"""Elements under one scale. Larger: fewer bytes (int8: 1.6 % are scales), coarser where large and
small gradients are neighbours."""
_ALIGNMENT = 4
"""Alignment of a bucket's first byte, so that scales can be read in place."""


class Format(NamedTuple):
    """What one element takes, and whether blocks have scales."""

    code: np.dtype[Any]
    has_scales: bool


FORMATS: dict[Compression, Format] = {
    "fp16": Format(np.dtype(np.uint16), has_scales=True),
    "bf16": Format(np.dtype(np.uint16), has_scales=False),
    "int8": Format(np.dtype(np.int8), has_scales=True),
}


def num_scales(kind: Compression, num_elements: int) -> int:
    """Return how many scales a packed bucket begins with.

    Args:
        kind: the packed format.
        num_elements: elements of the bucket.
    """
    return -(-num_elements // BLOCK) if FORMATS[kind].has_scales else 0


def packed_nbytes(kind: Compression, num_elements: int) -> int:
    """Return the bytes of a packed bucket, with its padding.

    Args:
        kind: the packed format.
        num_elements: elements of the bucket.
    """
    nbytes = 4 * num_scales(kind, num_elements) + FORMATS[kind].code.itemsize * num_elements
    return nbytes + -nbytes % _ALIGNMENT


def views_of_packed(
    kind: Compression, packed: Array, num_elements: int
) -> tuple[Array, Array, Array]:
    """Return scales, codes and padding of a packed bucket, as views.

    Args:
        kind: not "none".
        packed: uint8, of `packed_nbytes`, aligned to 4 bytes.
        num_elements: number of elements of the bucket.
    """
    code = FORMATS[kind].code
    middle = 4 * num_scales(kind, num_elements)
    end = middle + code.itemsize * num_elements
    return packed[:middle].view(np.float32), packed[middle:end].view(code), packed[end:]
