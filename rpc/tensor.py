"""Tensor specs: what a message's meta says about the arrays in its payload.

Covers: the struct, its size in bytes, the check of specs that a peer sent.
Does not: hold data, allocate, decode the meta around it.  Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from rpc.errors import LimitExceeded, ProtocolError
from rpc.limits import Limits

MAX_RANK = 32
MAX_BYTES = 2**63 - 1

ITEM_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}
"""Bytes per element of every dtype that may travel; little-endian."""


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, dtype and shape of one tensor whose bytes stand in the payload, C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the payload; only meaningful for a checked spec."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def check_specs(specs: Sequence[TensorSpec], limits: Limits) -> int:
    """Check specs from a peer and return the bytes they announce together.

    Raises:
        LimitExceeded: a count, name, rank or size is above its limit.
        ProtocolError: a dtype is unknown, a dimension negative, or a name stands twice.
    """
    if len(specs) > limits.max_tensors:
        raise LimitExceeded(f"{len(specs)} tensors exceed max_tensors={limits.max_tensors}")
    seen: set[str] = set()
    total = 0
    for index, spec in enumerate(specs):
        _check_name(spec.name, index, seen, limits)
        total += _checked_nbytes(spec)
        if total > limits.max_payload_bytes:
            raise LimitExceeded(
                f"tensors up to {spec.name!r} announce {total} bytes,"
                f" max_payload_bytes={limits.max_payload_bytes}"
            )
    return total


def _check_name(name: str, index: int, seen: set[str], limits: Limits) -> None:
    name_bytes = len(name.encode("utf-8", "surrogatepass"))
    if name_bytes > limits.max_name_bytes:
        raise LimitExceeded(
            f"name of tensor {index} has {name_bytes} bytes, max_name_bytes={limits.max_name_bytes}"
        )
    if name in seen:
        raise ProtocolError(f"name {name!r} stands twice (again as tensor {index})")
    seen.add(name)


def _checked_nbytes(spec: TensorSpec) -> int:
    item_bytes = ITEM_BYTES.get(spec.dtype)
    if item_bytes is None:
        raise ProtocolError(
            f"dtype of {spec.name!r} is {spec.dtype[:32]!r}; allowed: {', '.join(ITEM_BYTES)}"
        )
    if len(spec.shape) > MAX_RANK:
        raise LimitExceeded(
            f"shape of {spec.name!r} has rank {len(spec.shape)}, at most {MAX_RANK}"
        )
    nbytes = item_bytes
    for axis, dim in enumerate(spec.shape):
        if dim < 0:
            raise ProtocolError(f"shape of {spec.name!r} has dimension {dim} at axis {axis}")
        # A zero elsewhere must not hide dimensions whose product overflows an index.
        nbytes *= max(dim, 1)
        if nbytes > MAX_BYTES:
            raise LimitExceeded(
                f"shape of {spec.name!r} overflows at axis {axis}: more than {MAX_BYTES} bytes"
            )
    return 0 if 0 in spec.shape else nbytes
