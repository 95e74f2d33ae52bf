"""Inference results: columns of result chunks to Arrow arrays of the announced types.

Covers: which column of a chunk fills which field, conversion without Python code per row, refusals.
Does not: fetch results (sender.inference), join them with their rows (sender.arrow_inference).
Threads: any; pure.

A float column takes any float that it does not make infinite. An int or float column takes ints
that it holds exactly. Text, bytes and bool columns take only their own type. A list (of lists)
takes a vector (tensor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from feeding.arrow.arrays import DTYPES
from feeding.columnar.chunk import Array, Chunk, Column
from feeding.columnar.ranges import unheld
from feeding.columnar.schema import ColumnGroup, ColumnSpec
from feeding.errors import ResultTypeError


def arrays_of(chunk: Chunk, fields: Sequence[pa.Field]) -> list[pa.Array]:
    """Return one array per field, each with the rows of the chunk.

    Args:
        chunk: chunk of results.
        fields: announced names and types.

    Raises:
        ResultTypeError: a column does not fit; names the field, its type and the result's.
    """
    return [
        _convert(spec, column, field, chunk.num_rows)
        for (spec, column), field in zip(_matched(chunk, fields), fields, strict=True)
    ]


def _matched(chunk: Chunk, fields: Sequence[pa.Field]) -> list[tuple[ColumnSpec, Column]]:
    """Return the column for each field: by name where the results have names, else by position."""
    schema = chunk.meta.schema
    columns = list(zip(schema.columns, chunk.columns, strict=True))
    layout = schema.layout
    names = [field.name for field in fields]
    named = isinstance(layout, ColumnGroup) and layout.kind in ("dict", "row")
    if len(columns) != len(fields) or (named and set(schema.names) != set(names)):
        expected = ", ".join(f"{field.name} {_shown(field.type)}" for field in fields)
        raise ResultTypeError(
            f"results hold {schema}, expected {expected}: return as many values with these "
            "names from main_fun, or announce other names and types in output="
        )
    if named:
        return [columns[schema.names.index(name)] for name in names]
    return columns


def _convert(spec: ColumnSpec, column: Column, field: pa.Field, num_rows: int) -> pa.Array:
    kind = field.type
    if spec.kind in ("bytes", "str"):
        if (pa.types.is_string if spec.kind == "str" else pa.types.is_binary)(kind):
            offsets = _offsets(column.offsets, field)
            return _from_buffers(kind, num_rows, [offsets, column.values])
        raise _misfit(spec, field)
    if spec.kind == "ragged":
        if not pa.types.is_list(kind):
            raise _misfit(spec, field)
        values = _numbers(column.values, spec, field, kind.value_type)
        return _from_buffers(kind, num_rows, [_offsets(column.offsets, field)], values)
    return _tensor(column.values, spec, field, kind)


def _tensor(values: Array, spec: ColumnSpec, field: pa.Field, kind: pa.DataType) -> pa.Array:
    """Convert a tensor: each list level of the type takes one dimension of the values."""
    if values.ndim == 1:
        return _numbers(values, spec, field, kind)
    if not pa.types.is_list(kind):
        raise _misfit(spec, field)
    num_rows, width = values.shape[:2]
    inner = _tensor(
        values.reshape(num_rows * width, *values.shape[2:]), spec, field, kind.value_type
    )
    offsets = _offsets(np.arange(num_rows + 1, dtype=np.int64) * width, field)
    return _from_buffers(kind, num_rows, [offsets], inner)


def _numbers(values: Array, spec: ColumnSpec, field: pa.Field, kind: pa.DataType) -> pa.Array:
    if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise _misfit(spec, field)
    dtype = np.dtype(DTYPES[kind.id])
    logical = np.dtype(spec.dtype)
    if (logical.kind == "b") != (dtype.kind == "b") or (logical.kind == "f" != dtype.kind):
        raise _misfit(spec, field)
    if dtype.kind == "b":
        return _from_buffers(kind, len(values), [np.packbits(values, bitorder="little")])
    if (found := unheld(values, dtype)) is not None:
        shown, how = _shown(field.type), ""
        others = {"double": np.dtype("float64"), "bigint": np.dtype("int64")}
        for name, other in others.items():
            if dtype.kind in ("f", other.kind) and unheld(values, other) is None:
                announced = f"{field.name} {shown.replace(str(kind), name)}"
                how = f"announce a wider type, such as output={announced!r}, or "
                break
        raise ResultTypeError(
            f"results for column {field.name!r} go from {found[0]} to {found[1]}, expected "
            f"{shown}, which does not hold them: {how}convert them in main_fun"
        )
    return _from_buffers(kind, len(values), [np.ascontiguousarray(values, dtype)])


def _offsets(offsets: Array | None, field: pa.Field) -> Array:
    if offsets is None or offsets[-1] > np.iinfo(np.int32).max:
        raise ResultTypeError(
            f"results for column {field.name!r} are more than Arrow holds in one batch; answer "
            "fewer rows at a time"
        )
    return offsets.astype(np.int32)


def _from_buffers(
    kind: pa.DataType, length: int, buffers: Sequence[Array], child: pa.Array | None = None
) -> pa.Array:
    # An empty numpy array gives Arrow no address.
    wrapped: list[Any] = [
        pa.py_buffer(data) if data.size else pa.py_buffer(b"") for data in buffers
    ]
    children = [] if child is None else [child]
    return pa.Array.from_buffers(kind, length, [None, *wrapped], children=children)


def _misfit(spec: ColumnSpec, field: pa.Field) -> ResultTypeError:
    got = str(spec).removeprefix(f"{spec.name}: ")
    return ResultTypeError(
        f"results for column {field.name!r} are {got}, expected {_shown(field.type)}: convert them "
        f"in main_fun, or announce their type: output={f'{field.name} TYPE'!r}"
    )


def _shown(kind: pa.DataType) -> str:
    return f"array<{_shown(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)
