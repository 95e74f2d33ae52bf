"""Spark's vectors as Arrow carries them → rows of float64.

Covers: the struct behind VectorUDT, dense and sparse.      Does not: know Spark.      Pure.

The struct is (type: int8, size: int32, indices: list<int32>, values: list<double>). type 1 is
dense: values alone; type 0 is sparse: `values` stand at `indices`, every other item is 0.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from feeding.arrow.arrays import bounds, numbers
from feeding.columnar.chunk import Array

_FIELDS = ("type", "size", "indices", "values")


def is_vector(kind: pa.DataType) -> bool:
    """Tell whether an Arrow type is the struct behind VectorUDT."""
    return (
        kind.id == pa.lib.Type_STRUCT
        and kind.num_fields == len(_FIELDS)
        and tuple(kind.field(place).name for place in range(len(_FIELDS))) == _FIELDS
        and kind.field(0).type.id == pa.lib.Type_INT8
        and kind.field(3).type.id == pa.lib.Type_LIST
        and kind.field(3).type.value_type.id == pa.lib.Type_DOUBLE
    )


def spread(array: pa.StructArray) -> tuple[Array, Array]:
    """Return all items of an array of vectors without nulls, and where each row begins.

    Dense rows are views. Sparse ones are as large as their size says.
    """
    values, starts = _items(array.field(3))
    is_sparse = numbers(array.field(0)) == 0
    if not is_sparse.any():
        return values, starts
    num_values = np.diff(starts)
    sizes = np.where(is_sparse, _sizes(array.field(1)), num_values)
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    row = np.repeat(np.arange(len(array)), num_values)
    place = np.arange(len(values)) - starts[row]
    place[is_sparse[row]] = _items(array.field(2))[0]
    out = np.zeros(offsets[-1])
    out[offsets[row] + place] = values
    return out, offsets


def _items(lists: pa.ListArray) -> tuple[Array, Array]:
    found = bounds(lists)
    items = lists.values.slice(found[0], found[-1] - found[0])
    return numbers(items), found - found[0]


def _sizes(array: pa.Array) -> Array:
    """Dense vectors have no size: 0."""
    return numbers(array.fill_null(0))
