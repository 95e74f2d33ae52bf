"""Arrow columns as a model's inputs, and its outputs as Arrow columns, without Python code per row.

Covers: reading columns, ragged rows, text; refusals that name partition, row and column; the types
of output columns.
Does not: know what fits an input (tfos.predict.fitting), call models (tfos.predict.predictor).
Threads: any; pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from feeding.arrow.arrays import plain
from feeding.arrow.encoder import ArrowEncoder
from feeding.columnar.batch import BatchColumn, Ragged
from feeding.columnar.builder import Collector
from feeding.columnar.ops import Columns, row_of
from feeding.columnar.texts import unpacked
from feeding.errors import RowError
from tfos.errors import SettingsError
from tfos.feed.dataframe_columns import ROUNDED_TIMES
from tfos.predict.fitting import Array, Misfit, fitted, in_shape, side_by_side
from tfos.predict.signature import TensorInfo

_TYPES = {
    "bool": ("boolean", "bool"),
    "int8": ("tinyint", "int8"),
    "uint8": ("smallint", "int16"),
    "int16": ("smallint", "int16"),
    "uint16": ("int", "int32"),
    "int32": ("int", "int32"),
    "uint32": ("bigint", "int64"),
    "int64": ("bigint", "int64"),
    "float16": ("float", "float32"),
    "bfloat16": ("float", "float32"),
    "float32": ("float", "float32"),
    "float64": ("double", "float64"),
    "object": ("binary", "object"),
}
"""Spark's type of an output column, and numpy's type of its values, by the output's dtype."""


def column_type(name: str, info: TensorInfo) -> str:
    """Return the type of an output's column, in Spark's notation.

    Args:
        name: name of the output.
        info: its dtype and shape.

    Raises:
        SettingsError: no column can hold it.
    """
    if not info.has_rank:
        raise SettingsError(
            f"output {name!r} has an unknown number of dimensions, so its column has no type. "
            "Name other outputs, or save the model with output.set_shape(…) in its function"
        )
    if info.is_ragged:
        raise SettingsError(
            f"output {name!r} has lists of any length (ragged), which no column of this version "
            "holds. End the model with .to_tensor(), or name other outputs"
        )
    kind = _TYPES.get(info.dtype, ("", ""))[0]
    if not kind:
        raise SettingsError(f"output {name!r} is {info}, which no column holds; name another one")
    return "array<" * len(info.shape) + kind + ">" * len(info.shape)


class Inputs:
    """Makes a model's inputs from record batches of one partition.

    Args:
        names: names of the columns, for errors.
        inputs: names of the inputs, with the positions of their columns.
        infos: dtype and shape by input.
        partition: number of the partition, for errors.
    """

    def __init__(
        self,
        names: Sequence[str],
        inputs: Sequence[tuple[str, tuple[int, ...]]],
        infos: Sequence[TensorInfo],
        partition: int,
    ) -> None:
        self._names = tuple(names)
        self._inputs = tuple(zip(inputs, infos, strict=True))
        self._partition = partition
        self._first_row = 0

    def of(self, batch: pa.RecordBatch) -> Columns:
        """Return an array [n, *shape], or Ragged, per input; views of the batch where possible.

        Raises:
            RowError: a value does not fit; names partition, row and column.
        """
        out = Collector(self._partition, self._first_row)
        self._first_row += batch.num_rows
        for name, array in zip(self._names, batch.columns, strict=True):
            self._encode(out, name, array)
        found: list[BatchColumn] = []
        for (name, places), info in self._inputs:
            for place in places if info.is_float else ():
                if _is_timestamp(batch.schema.types[place]):
                    text = f"a timestamp; input {name!r} is {info}, {ROUNDED_TIMES}"
                    raise out.refuse(self._names[place], 0, text)
            parts = [_fitted(out, place, name, info, len(places) > 1) for place in places]
            found.append(parts[0] if len(parts) == 1 else _side_by_side(out, name, info, parts))
        return tuple(found)

    def _encode(self, out: Collector, name: str, array: pa.Array) -> None:
        array = plain(array)
        if array.null_count:
            row = int(array.is_null().index(True).as_py())
            text = "null; F.coalesce() replaces it, df.na.drop() drops such rows"
            raise out.refuse(name, row, text)
        before = len(out.specs)
        one = pa.RecordBatch.from_arrays([array], [name])
        ArrowEncoder((name,)).encode(out, one)
        if len(out.specs) != before + 1:
            raise out.refuse(name, 0, "a struct; name its fields as columns: 'struct.field'")


def _is_timestamp(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_timestamp(kind))


def _fitted(out: Collector, place: int, name: str, info: TensorInfo, is_part: bool) -> BatchColumn:
    """Return a column in the dtype and shape of an input, or of one part of it."""
    spec, column = out.specs[place], out.columns[place]
    if spec.value == "texts":
        texts, offsets = _lists_of_texts(column.values, column.offsets, spec.name)
        texts = _cast(out, spec.name, texts, name, info, offsets)
        if info.is_ragged:
            return Ragged(texts, offsets)
        lengths = np.diff(offsets)
        if (lengths != lengths[:1]).any():
            raise _wrong_length(out, spec.name, offsets, name, info)
        values = texts.reshape(len(lengths), -1)
    elif spec.kind in ("str", "bytes"):
        values = _texts(column.values, column.offsets)
    elif spec.kind == "tensor":
        values = column.values
    elif info.is_ragged:
        offsets = _offsets(column.offsets)
        return Ragged(_cast(out, spec.name, column.values, name, info, offsets), offsets)
    else:
        raise _wrong_length(out, spec.name, column.offsets, name, info)
    values = _cast(out, spec.name, values, name, info)
    if info.is_ragged:
        return _ragged(values)
    return values if is_part else _shaped(out, spec.name, values, name, info)


def _shaped(out: Collector, column: str, values: Array, name: str, info: TensorInfo) -> Array:
    found = in_shape(values, info.shape)
    if found is not None:
        return found
    got = "a number" if values.ndim == 1 else f"rows of shape {values.shape[1:]}"
    raise out.refuse(column, 0, f"{got}; input {name!r} is {info}")


def _side_by_side(out: Collector, name: str, info: TensorInfo, parts: Sequence[Any]) -> Array:
    columns = ", ".join(spec.name for spec in out.specs)
    return _shaped(out, columns, side_by_side(parts), name, info)


def _wrong_length(
    out: Collector, column: str, offsets: Any, name: str, info: TensorInfo
) -> RowError:
    lengths = np.diff(offsets)
    if None in info.shape:
        row = int(np.argmax(lengths != lengths[0]))
        text = f"{lengths[row]} values, {lengths[0]} in the rows before; lists of several lengths"
        return out.refuse(column, row, f"{text} do not fit input {name!r}, {info}: pad them")
    size = math.prod(side or 1 for side in info.shape)
    row = int(np.argmax(lengths != size))
    return out.refuse(column, row, f"{lengths[row]} values; input {name!r} is {info}")


def _ragged(values: Array) -> Ragged:
    """Return rows of equal length as Ragged."""
    if values.ndim == 1:
        return Ragged(values, np.arange(len(values) + 1, dtype=np.int64))
    num_rows, width = values.shape[:2]
    offsets = np.arange(num_rows + 1, dtype=np.int64) * width
    return Ragged(values.reshape(num_rows * width, *values.shape[2:]), offsets)


def _offsets(offsets: Any) -> Array:
    return np.asarray(offsets, np.int64)


def _texts(data: Any, offsets: Any) -> Array:
    """Return texts as object [n] of bytes."""
    buffers = [None, pa.py_buffer(_offsets(offsets)), pa.py_buffer(data.tobytes())]
    found: Array = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers).to_numpy(
        zero_copy_only=False
    )
    return found


def _lists_of_texts(data: Any, offsets: Any, name: str) -> tuple[Array, Array]:
    """Return the texts of all rows as object [texts] of bytes, and each row's offsets."""
    view = memoryview(data.tobytes())
    rows = [unpacked(view[low:high], name) for low, high in itertools.pairwise(offsets)]
    found = np.array([text.encode() for row in rows for text in row] or [b""], object)
    ends = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return found[: ends[-1]], ends


def _cast(
    out: Collector, column: str, values: Array, name: str, info: TensorInfo, offsets: Any = None
) -> Array:
    """Return values in an input's dtype; `offsets` are those of ragged rows."""
    found = fitted(values, name, info)
    if isinstance(found, Misfit):
        raise out.refuse(column, row_of(offsets, found.place), found.text)
    return found


def arrow_column(values: Array, info: TensorInfo) -> pa.Array:
    """Return an output as an Arrow array: a list level for each dimension after the rows.

    Args:
        values: [rows, *shape].
        info: dtype of the output.
    """
    dtype = _TYPES[info.dtype][1]
    return _lists(values if dtype == "object" else values.astype(dtype, copy=False))


def _lists(values: Array) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values, pa.binary()) if values.dtype == object else pa.array(values)
    num_rows, width = values.shape[:2]
    inner = _lists(values.reshape(num_rows * width, *values.shape[2:]))
    offsets = np.arange(num_rows + 1, dtype=np.int32) * np.int32(width)
    return pa.ListArray.from_arrays(pa.array(offsets), inner)
