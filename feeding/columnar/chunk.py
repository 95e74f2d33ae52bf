"""Chunk: consecutive rows of one partition as contiguous column buffers, and its wire format.

Covers: the layout of the payload, encoding, decoding with every check before use.
Does not: read Python rows (encode), send or receive (sender, receiver).
Threads: any; pure, frozen data.

Payload: the buffers of all columns in schema order, each padded to a multiple of 8 bytes.
    tensor       values                num_rows * prod(shape) items of `stored`
    ragged       offsets, values       int64[num_rows + 1] in items, then data_items of `stored`
    bytes, str   offsets, data         int64[num_rows + 1] in bytes, then data_items bytes
Little-endian. `stored` may be narrower than the column's dtype if it holds all values: Python ints
0..255 (pixels) are int64 for readers of rows and one byte each on the wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from feeding.columnar.schema import DTYPES, Name, Schema, numpy_dtype
from feeding.errors import ChunkError

MAX_ROWS = 1 << 24
"""Most rows of a chunk; bounds columns whose rows take no bytes."""
_ALIGNMENT = 8
_OFFSET_BYTES = 8

Array = npt.NDArray[Any]
"""An array of a column's dtype; where the dtype is known, NDArray[np.int64] and so on."""
Offsets = npt.NDArray[np.int64]
"""Where each of n rows begins in joined values, and the end of the last: int64[n + 1]."""
Count = Annotated[int, msgspec.Meta(ge=0)]


class ChunkMeta(msgspec.Struct, frozen=True, array_like=True):
    """Header of a chunk: the origin of its rows and the layout of its payload."""

    feed: Name
    epoch: Count
    partition: Count
    first_row: Count
    num_rows: Count
    schema: Schema
    stored: tuple[Name, ...]
    """Per column: the dtype of its values in the payload ("" for bytes and str)."""
    data_items: tuple[int, ...]
    """Per column: items (ragged) or bytes (bytes, str) after the offsets; 0 for tensor."""
    last_in_partition: bool = False
    mode: Literal["train", "inference"] = "train"
    session: Count = 0
    """Inference: the session that the results belong to."""


@dataclass(frozen=True, slots=True)
class Column:
    """Data of one column: `values` as stored, `offsets` for every kind except tensor."""

    values: Array
    offsets: Offsets | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of both arrays."""
        return self.values.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def rows(self, start: int, stop: int) -> Column:
        """Return rows `start` to `stop`, `stop` excluded; values are a view."""
        if self.offsets is None:
            return Column(self.values[start:stop])
        bounds = self.offsets[start : stop + 1]
        return Column(self.values[bounds[0] : bounds[-1]], bounds - bounds[0])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows as columns; the arrays may be read-only views of one receive buffer."""

    meta: ChunkMeta
    columns: tuple[Column, ...]
    position: int = 0
    """Index of the chunk's first row among all accepted rows of its epoch; the worker sets it."""

    @property
    def num_rows(self) -> int:
        """Rows in this chunk."""
        return self.meta.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.num_bytes for column in self.columns)

    def rows(self, start: int, stop: int) -> Chunk:
        """Return rows `start` to `stop`, `stop` excluded, as a chunk; values are views."""
        if start == 0 and stop == self.num_rows:
            return self
        columns = tuple(column.rows(start, stop) for column in self.columns)
        meta = msgspec.structs.replace(
            self.meta,
            first_row=self.meta.first_row + start,
            num_rows=stop - start,
            data_items=data_items(columns),
            last_in_partition=self.meta.last_in_partition and stop == self.num_rows,
        )
        return Chunk(meta, columns)

    def encode(self) -> list[bytes | memoryview]:
        """Return the payload as buffers over the columns' own memory."""
        buffers: list[bytes | memoryview] = []
        for column in self.columns:
            for array in (column.offsets, column.values):
                if array is None or not array.nbytes:
                    continue
                buffers.append(memoryview(array.data).cast("B"))
                if padding := -array.nbytes % _ALIGNMENT:
                    buffers.append(bytes(padding))
        return buffers


def data_items(columns: tuple[Column, ...]) -> tuple[int, ...]:
    """Return `ChunkMeta.data_items` of these columns."""
    return tuple(0 if column.offsets is None else column.values.size for column in columns)


def payload_bytes(meta: ChunkMeta) -> int:
    """Check a meta, and return the exact payload size that it implies, in bytes.

    Raises:
        ChunkError: the meta contradicts itself; names the field. Nothing was allocated.
    """
    meta.schema.check()
    num_columns = len(meta.schema.columns)
    if len(meta.stored) != num_columns or len(meta.data_items) != num_columns:
        raise ChunkError(
            f"{num_columns} columns with {len(meta.stored)} stored dtypes and "
            f"{len(meta.data_items)} lengths"
        )
    if meta.num_rows > MAX_ROWS:
        raise ChunkError(f"{meta.num_rows} rows in a chunk, the limit is {MAX_ROWS}")
    return sum(
        _padded(values_bytes) + _padded(offsets_bytes)
        for values_bytes, offsets_bytes in (
            _column_bytes(meta, index) for index in range(num_columns)
        )
    )


def decode(meta: ChunkMeta, payload: memoryview) -> Chunk:
    """Return a chunk of views into a payload.

    Args:
        meta: checked by `payload_bytes`.
        payload: exactly `payload_bytes(meta)` bytes.

    Raises:
        ChunkError: offsets decrease or exceed the data, or a bool is neither 0 nor 1.
    """
    columns = []
    position = 0
    for index, spec in enumerate(meta.schema.columns):
        values_bytes, offsets_bytes = _column_bytes(meta, index)
        offsets = None
        if spec.kind != "tensor":
            offsets = _view(payload, position, offsets_bytes, np.dtype("<i8"))
            position += _padded(offsets_bytes)
            _check_offsets(offsets, meta.data_items[index], spec.name)
        stored = np.dtype(np.uint8) if not meta.stored[index] else numpy_dtype(meta.stored[index])
        values = _view(payload, position, values_bytes, stored)
        position += _padded(values_bytes)
        if stored == np.bool_ and values_bytes and values.view(np.uint8).max() > 1:
            raise ChunkError(f"column {spec.name!r}: a bool is neither 0 nor 1")
        if spec.kind == "tensor":
            values = values.reshape((meta.num_rows, *spec.shape))
        columns.append(Column(values, offsets))
    return Chunk(meta, tuple(columns))


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _ALIGNMENT


def _column_bytes(meta: ChunkMeta, index: int) -> tuple[int, int]:
    """Return the sizes of a column's values and offsets, in bytes."""
    spec, stored, items = meta.schema.columns[index], meta.stored[index], meta.data_items[index]
    if items < 0:
        raise ChunkError(f"column {spec.name!r}: {items} items")
    if spec.kind in ("bytes", "str"):
        if stored:
            raise ChunkError(
                f"column {spec.name!r}: {spec.kind} has no stored dtype, got {stored!r}"
            )
        return items, (meta.num_rows + 1) * _OFFSET_BYTES
    if stored not in DTYPES or not np.can_cast(stored, spec.dtype, "safe"):
        raise ChunkError(f"column {spec.name!r}: {stored!r} cannot hold {spec.dtype}")
    item_bytes = np.dtype(stored).itemsize
    if spec.kind == "ragged":
        return items * item_bytes, (meta.num_rows + 1) * _OFFSET_BYTES
    if items:
        raise ChunkError(f"column {spec.name!r}: a tensor has no item count, got {items}")
    return meta.num_rows * math.prod(spec.shape) * item_bytes, 0


def _view(payload: memoryview, start: int, num_bytes: int, dtype: np.dtype[Any]) -> Array:
    if not num_bytes:
        return np.empty(0, dtype)
    return np.frombuffer(payload[start : start + num_bytes], dtype)


def _check_offsets(offsets: Offsets, data_items: int, name: str) -> None:
    if offsets[0] != 0 or offsets[-1] != data_items:
        raise ChunkError(
            f"column {name!r}: offsets run from {offsets[0]} to {offsets[-1]} "
            f"for {data_items} items"
        )
    if (offsets[1:] < offsets[:-1]).any():
        raise ChunkError(f"column {name!r}: offsets decrease")
