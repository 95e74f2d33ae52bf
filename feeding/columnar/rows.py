"""Row reconstruction: columns of a chunk back to the Python rows that they were made of.

Covers: rows_of, column_values.
Does not: make numpy batches (receiver.batch_reader).
Threads: any; pure.

Numbers come back as Python numbers of the same value; only a column that mixed int and float comes
back as float. Lists, tuples, arrays, dicts and Rows keep their type (a Row is a schema.FeedRow).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from feeding.columnar.chunk import Chunk
from feeding.columnar.schema import ValueKind, numpy_dtype
from feeding.columnar.texts import unpacked
from feeding.errors import ChunkError


def rows_of(chunk: Chunk, start: int = 0, stop: int | None = None) -> list[Any]:
    """Return rows of a chunk as Python objects.

    Args:
        chunk: chunk of n rows.
        start: first row.
        stop: end, excluded; None: n.
    """
    end = chunk.num_rows if stop is None else stop
    leaves = [column_values(chunk, index, start, end) for index in range(len(chunk.columns))]
    return chunk.meta.schema.rows(leaves, end - start)


def column_values(chunk: Chunk, index: int, start: int, stop: int) -> list[Any]:
    """Return one column's values, each as the Python type that it had.

    Args:
        chunk: chunk of n rows.
        index: index of the column.
        start: first row.
        stop: end, excluded.

    Raises:
        ChunkError: text that is not UTF-8.
    """
    spec, column = chunk.meta.schema.columns[index], chunk.columns[index]
    if spec.kind == "tensor":
        values = column.values[start:stop].astype(numpy_dtype(spec.dtype), copy=False)
        if spec.value == "array":
            return [np.array(row) for row in values]
        if spec.value == "numpy":
            return list(values)
        items = values.tolist()
        return list(map(tuple, items)) if spec.value == "tuple" else items
    if column.offsets is None:
        raise ChunkError(f"column {spec.name!r} has no offsets")
    bounds = column.offsets[start : stop + 1].tolist()
    spans = itertools.pairwise(bounds)
    if spec.kind == "ragged":
        base = bounds[0]
        part = column.values[base : bounds[-1]].astype(numpy_dtype(spec.dtype))
        if spec.value == "array":
            return [np.array(part[low - base : high - base]) for low, high in spans]
        flat = part.tolist()
        make = tuple if spec.value == "tuple" else list
        return [make(flat[low - base : high - base]) for low, high in spans]
    return _texts(spec.value, column.values.data, bounds, spec.name)


def _texts(value: ValueKind, data: memoryview, bounds: list[int], name: str) -> list[Any]:
    spans = itertools.pairwise(bounds)
    if value == "bytes":
        return [bytes(data[low:high]) for low, high in spans]
    if value == "bytearray":
        return [bytearray(data[low:high]) for low, high in spans]
    if value == "texts":
        return [unpacked(data[low:high], name) for low, high in spans]
    try:
        return [str(data[low:high], "utf-8") for low, high in spans]
    except UnicodeDecodeError as error:
        raise ChunkError(f"column {name!r}: text that is not UTF-8: {error.reason}") from None
