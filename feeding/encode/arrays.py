"""Array packer: results that a model returns as arrays to chunks, without Python code per row.

Covers: which results count as arrays, their rows, ArrayPacker.
Does not: encode results given row by row (packer).
Threads: one per packer; pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from feeding.columnar.builder import ADVICE, NO_MASK, Collector
from feeding.columnar.chunk import MAX_ROWS, Array, Chunk
from feeding.columnar.schema import DTYPES, WHOLE_ROW, ColumnGroup, ColumnSpec, Node
from feeding.encode.packer import Packer
from feeding.encode.values import encode_values
from feeding.errors import ResultCountError, ResultTypeError


@dataclass(frozen=True, slots=True)
class Columns:
    """The results of one batch: arrays [n, ...] by name, or one array alone."""

    arrays: dict[str, Array]
    num_rows: int
    has_names: bool

    def __len__(self) -> int:
        return self.num_rows

    def rows(self, start: int, stop: int) -> Columns:
        """Return rows `start` to `stop`, `stop` excluded; views."""
        arrays = {name: array[start:stop] for name, array in self.arrays.items()}
        return Columns(arrays, stop - start, self.has_names)


def columns_of(results: Any) -> Columns | None:
    """Return an array, or a dict of arrays, as columns; None for anything else but a dict.

    Raises:
        ResultCountError: the arrays of a dict have different lengths.
        ResultTypeError: a value of a dict is no array with rows, or an array is masked.
    """
    named = isinstance(results, Mapping)
    arrays = {str(k): v for k, v in results.items()} if named else {WHOLE_ROW: results}
    masked = [k for k, v in arrays.items() if isinstance(v, np.ma.MaskedArray)]
    if masked:
        where = f" in {masked[0]!r}" if named else ""
        raise ResultTypeError(f"batch_results got a masked array{where}: {NO_MASK}")
    found = {k: np.asarray(v) for k, v in arrays.items() if hasattr(v, "__array__")}
    odd = [name for name in arrays if name not in found or not found[name].ndim]
    if named and odd:
        kind = type(arrays[odd[0]]).__name__
        raise ResultTypeError(
            f"batch_results got a dict with {odd[0]!r} of {kind}, expected arrays whose first "
            "dimension is the rows: make it one by np.asarray(...), or return a list with one "
            "result per row"
        )
    if odd or not arrays:
        return None
    lengths = {name: len(array) for name, array in found.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{length} of {name!r}" for name, length in lengths.items())
        raise ResultCountError(f"batch_results got arrays of different lengths: {counts}")
    return Columns(found, next(iter(lengths.values())), named)


class ArrayPacker(Packer):
    """A packer that also takes whole arrays."""

    def pack_columns(self, columns: Columns) -> Iterator[Chunk]:
        """Yield chunks of about `chunk_bytes` that hold copies of these rows.

        Raises:
            RowError: an array's dtype fits no column.
        """
        row_bytes = sum(array.nbytes for array in columns.arrays.values()) // max(1, len(columns))
        most = min(MAX_ROWS, max(1, self._config.chunk_bytes // max(1, row_bytes)))
        for start in range(0, len(columns), most):
            part = columns.rows(start, min(start + most, len(columns)))
            out = self._collector()
            for name, array in part.arrays.items():
                _add(out, array, name)
            names = tuple(part.arrays)
            layout: Node = None
            if part.has_names:
                layout = ColumnGroup("dict", names, (None,) * len(names))
            yield self._finish(out, layout, len(part))
            self._row += len(part)

    def _check_bytes(self, chunk: Chunk) -> None:
        """Take a row of any size: unlike a worker, a feeder has room for what it fetches."""


def _add(out: Collector, array: Array, name: str) -> None:
    if array.dtype.kind in "USO":
        if encode_values(out, array.tolist(), name) is not None:
            raise out.refuse(name, 0, f"an array of groups of values; {ADVICE}")
        return
    dtype = array.dtype.newbyteorder("=")
    if dtype.name not in DTYPES:
        raise out.refuse(name, 0, f"array of {array.dtype}; {ADVICE}")
    spec = ColumnSpec(
        name, "tensor", "numpy" if array.ndim == 1 else "array", dtype.name, array.shape[1:]
    )
    # A copy: the chunk waits to be fetched, and the model may write its next results in place.
    out.add(spec, np.array(array, dtype, order="C"))
