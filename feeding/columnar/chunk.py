"""A chunk: some consecutive rows of one partition as contiguous column buffers.

Covers: the chunk's layout on the wire, encode, decode with every check before use.
Does not: look at Python rows (encode, packer), travel (feeder, channel).      Pure.

Payload: the buffers of all columns in schema order, each padded to a multiple of 8 bytes.
    tensor       values                num_rows * prod(shape) items of `stored`
    ragged       offsets, values       int64[num_rows + 1] in items, then data_items of `stored`
    bytes, str   offsets, data         int64[num_rows + 1] in bytes, then data_items bytes
Little-endian. `stored` may be narrower than the column's dtype when that loses nothing: Python ints
0..255 (pixels) are int64 to whoever reads rows and one byte each on the wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from feeding.columnar.schema import DTYPES, Name, Schema, numpy_dtype
from feeding.errors import ChunkError

BAD_META = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes from a stranger; the middle one is no MsgspecError."""
MAX_ROWS = 1 << 24
"""Most rows of a chunk; bounds what columns without bytes can claim."""
_ALIGNMENT = 8
_OFFSET_BYTES = 8

Array = np.ndarray[Any, np.dtype[Any]]
Count = Annotated[int, msgspec.Meta(ge=0)]


class ChunkMeta(msgspec.Struct, frozen=True, array_like=True):
    """Where a chunk's rows come from and how its payload is laid out."""

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
    """Inference: which conversation the results belong to."""


@dataclass(frozen=True, slots=True)
class Column:
    """Data of one column: `values` as stored; `offsets` for every kind but tensor."""

    values: Array
    offsets: Array | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of both arrays."""
        return self.values.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def cut(self, start: int, stop: int) -> Column:
        """Return rows `start` to `stop`."""
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
    """Given by the worker: where its first row stands among all rows accepted of its epoch."""

    @property
    def num_rows(self) -> int:
        """Rows in this chunk."""
        return self.meta.num_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.num_bytes for column in self.columns)

    def cut(self, start: int, stop: int) -> Chunk:
        """Return some of its rows as a chunk of their own, over the same memory where possible."""
        if start == 0 and stop == self.num_rows:
            return self
        columns = tuple(column.cut(start, stop) for column in self.columns)
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
    """Return what ChunkMeta says of these columns."""
    return tuple(0 if column.offsets is None else column.values.size for column in columns)


def payload_bytes(meta: ChunkMeta) -> int:
    """Return the exact payload size that this meta implies, after checking it for contradictions.

    Raises:
        ChunkError: names the field; nothing was allocated.
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
    """Make a chunk of views into `payload`, whose length `payload_bytes(meta)` already confirmed.

    Raises:
        ChunkError: offsets are not monotone or leave their data, or a bool is neither 0 nor 1.
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
    """Bytes of values and of offsets of one column."""
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


def _check_offsets(offsets: Array, data_items: int, name: str) -> None:
    if offsets[0] != 0 or offsets[-1] != data_items:
        raise ChunkError(
            f"column {name!r}: offsets run from {offsets[0]} to {offsets[-1]} "
            f"for {data_items} items"
        )
    if offsets.size > 1 and bool((offsets[1:] < offsets[:-1]).any()):
        raise ChunkError(f"column {name!r}: offsets go back")
