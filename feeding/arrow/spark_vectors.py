"""Spark vectors: the Arrow struct behind VectorUDT to rows of float64.

Covers: dense and sparse vectors.
Does not: know Spark.
Threads: any; pure.

The struct is (type: int8, size: int32, indices: list<int32>, values: list<double>). Type 1 is
dense: `values` is the vector; type 0 is sparse: `values` are the items at `indices`, the others are
0.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from feeding.arrow.arrays import bounds, numbers
from feeding.columnar.chunk import Array

_FIELDS = ("type", "size", "indices", "values")


class BadVector(ValueError):
    """A vector that contradicts itself.

    Args:
        row: its number in the array, from 0.
        text: what is wrong, for the message.
    """

    def __init__(self, row: int, text: str) -> None:
        super().__init__(text)
        self.row = row


def is_vector(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is the struct behind VectorUDT."""
    return (
        kind.id == pa.lib.Type_STRUCT
        and kind.num_fields == len(_FIELDS)
        and tuple(kind.field(place).name for place in range(len(_FIELDS))) == _FIELDS
        and kind.field(0).type.id == pa.lib.Type_INT8
        and kind.field(3).type.id == pa.lib.Type_LIST
        and kind.field(3).type.value_type.id == pa.lib.Type_DOUBLE
    )


def holds_sparse(batch: pa.RecordBatch) -> bool:
    """Return whether a record batch has sparse vectors, which take far more bytes once dense."""
    return any(is_vector(each.type) and bool(_is_sparse(each).any()) for each in batch.columns)


def lengths(array: pa.StructArray) -> Array:
    """Return the items of each of n vectors once it is dense, int64[n]; of a null, 0.

    Raises:
        BadVector: a sparse vector has less than none.
    """
    sizes = np.where(_is_sparse(array), _sizes(array.field(1)), np.diff(bounds(array.field(3))))
    if (wrong := sizes < 0).any():
        row = int(wrong.argmax())
        raise BadVector(row, f"a vector of {sizes[row]} items")
    return sizes


def spread(array: pa.StructArray) -> tuple[Array, Array]:
    """Return all items of a null-free array of n vectors, float64[items], and offsets int64[n + 1].

    A view if all vectors are dense. A sparse vector becomes dense, with as many items as its size.

    Raises:
        BadVector: the indices of a vector do not fit it.
    """
    values, starts = _items(array.field(3))
    is_sparse = _is_sparse(array)
    if not is_sparse.any():
        return values, starts
    num_values, sizes = np.diff(starts), lengths(array)
    indices, index_starts = _items(array.field(2))
    _check_counts(is_sparse, np.diff(index_starts), num_values)
    row = np.repeat(np.arange(len(array)), num_values)
    place = np.arange(len(values)) - starts[row]
    place[is_sparse[row]] = indices
    # An index beyond its vector would set an item of another one.
    if (wrong := (place < 0) | (place >= sizes[row])).any():
        at = int(wrong.argmax())
        text = f"an item at {place[at]} of a vector of {sizes[row[at]]} items"
        raise BadVector(int(row[at]), text)
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    out = np.zeros(offsets[-1])
    out[offsets[row] + place] = values
    return out, offsets


def _check_counts(is_sparse: Array, num_indices: Array, num_values: Array) -> None:
    wrong = num_indices != np.where(is_sparse, num_values, 0)
    if wrong.any():
        row = int(wrong.argmax())
        of = f"{num_values[row]} values" if is_sparse[row] else "a dense vector"
        raise BadVector(row, f"{num_indices[row]} indices of {of}")


def _is_sparse(array: pa.StructArray) -> Array:
    found: Array = numbers(array.field(0).fill_null(1)) == 0
    return found


def _items(lists: pa.ListArray) -> tuple[Array, Array]:
    found = bounds(lists)
    items = lists.values.slice(found[0], found[-1] - found[0])
    return numbers(items), found - found[0]


def _sizes(array: pa.Array) -> Array:
    """Dense vectors have no size: 0."""
    return numbers(array.fill_null(0))
