"""Refilled rows: whether a program fills one object again for each row.

Covers: whether two rows share memory.
Does not: copy rows (packer).
Threads: any; pure.

A chunk's rows are taken before they are encoded. A generator that yields `buffer` after
`buffer[:] = ...` would give the last row's values to all of them. The packer compares the first
two rows of a partition; where they share memory, it copies each further row as it comes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from feeding.columnar.builder import category_of

_FIXED = frozenset([int, float, bool, str, bytes, type(None)])


def is_refilled(first: Any, second: Any) -> bool:
    """Return whether a change in place of one row, or a part of it, may change the other."""
    kind = type(first)
    if kind in _FIXED or kind is not type(second):
        return False
    category = category_of(kind)
    if category in ("array", "list", "dict", "bytearray") and first is second:
        return True
    if category == "array":
        return np.may_share_memory(_array(first), _array(second))
    if category == "dict":
        return any(is_refilled(part, second.get(key)) for key, part in first.items())
    return category in ("list", "tuple", "row") and any(map(is_refilled, first, second))


def _array(value: Any) -> np.ndarray[Any, Any]:
    return value if isinstance(value, np.ndarray) else np.asarray(value.toArray())
