"""Refilled rows: copies where a program fills one object again for each row.

Covers: whether two rows share memory, copies of rows.
Does not: encode values (values), take rows (packer).
Threads: any; pure.

A chunk's rows are taken before they are encoded. A generator that yields `buffer` after
`buffer[:] = ...` would so give the last row's values to all of them. Rows that share nothing with
the one before, which is usual, are not copied. Only the first two rows of a partition are compared.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from feeding.columnar.builder import category_of, is_long_vector


def kept(first: Any, rows: Iterator[Any]) -> Iterator[Any]:
    """Return rows, as copies if the first of them shares memory with the row before it.

    Args:
        first: the row before `rows`; the caller has copied or encoded it.
        rows: not read ahead.
    """
    return itertools.chain.from_iterable(_parts(first, rows))  # compiled, 10 ns a row


def _parts(first: Any, rows: Iterator[Any]) -> Iterator[Iterable[Any]]:
    second = list(itertools.islice(rows, 1))
    is_refilled = any(_share(first, row) for row in second)
    del first
    yield map(copied, second) if is_refilled else second
    del second
    yield map(copied, rows) if is_refilled else rows


def copied(value: Any) -> Any:
    """Return a row, or a part of it, that later changes of the given one do not reach."""
    if type(value) is tuple:
        return tuple(map(copied, value))
    if type(value) is dict:
        return {key: copied(part) for key, part in value.items()}
    if type(value) is list and is_long_vector(value):
        return list(value)
    return copy.deepcopy(value)


def _share(first: Any, second: Any) -> bool:
    """Return whether a change of one row in place may change the other."""
    category = category_of(type(first))
    if category != category_of(type(second)):
        return False
    if category == "array":
        return np.may_share_memory(_array(first), _array(second))
    if category in ("list", "dict", "bytearray") and first is second:
        return True
    if category == "dict":
        return any(_share(part, second.get(key)) for key, part in first.items())
    return category in ("list", "tuple", "row") and any(map(_share, first, second))


def _array(value: Any) -> np.ndarray[Any, Any]:
    return value if isinstance(value, np.ndarray) else np.asarray(value.toArray())
