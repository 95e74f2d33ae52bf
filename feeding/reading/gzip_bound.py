"""Bound of gzip files: how many bytes may come of the compressed ones.

Covers: the ratio over a whole file, from a size on at which it matters.
Does not: decompress (the readers of each format), know which files are gzip (discover).      Pure.
"""

from __future__ import annotations

from feeding.config import MIB

_FROM_BYTES = 16 * MIB
"""Up to this size a high ratio is harmless."""


def beyond_ratio(num_made: int, num_stored: int, max_ratio: int) -> str:
    """Return what is wrong with a file whose bytes are too many; empty if they are not.

    Args:
        num_made: decompressed bytes so far.
        num_stored: compressed bytes that they came from.
        max_ratio: largest ratio of the two; `max_gzip_ratio` of the limits.
    """
    if num_made <= max(_FROM_BYTES, max_ratio * num_stored):
        return ""
    return f"{num_stored} compressed bytes became {num_made}, max_gzip_ratio is {max_ratio}"
