"""Digests, counts and finite numbers: the field types that all files of a checkpoint share.

Covers: their encoding and their checks.      Does not: know what they describe.
Threads: none; every function is independent.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec
import numpy as np

from ps.errors import CheckpointError

Array = np.ndarray[Any, Any]

_DIGEST_BYTES = 16

MAX_COUNT = (1 << 62) - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


def digest(*parts: bytes | bytearray | memoryview) -> str:
    """Return the hex digest that checkpoints use."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def refuse_nonfinite(array: Array, what: str) -> None:
    """Raise unless all values are finite: a checkpoint is never worse than the one before.

    Args:
        array: any shape, floats.
        what: names the array in the message.
    """
    count = array.size - int(np.count_nonzero(np.isfinite(array)))
    if count:
        raise CheckpointError(f"{what} has {count} of {array.size} values NaN or infinite")
