"""Column builder: the columns of one chunk under construction, and the category of Python values.

Covers: Collector, category_of, offsets_of.
Does not: read values (encode.values, encode.vectors).
Threads: one per collector; pure.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from feeding.columnar.chunk import Array, Column
from feeding.columnar.schema import DTYPES, ColumnSpec
from feeding.errors import RowError

Values = Sequence[Any]
ADVICE = "a column holds numbers, text, bytes, or arrays and lists of numbers; fill or drop others"
NO_MASK = "a masked array's mask is not sent: give its filled() values, and its mask as more values"


@dataclass(slots=True)
class Collector:
    """The columns of a chunk so far.

    Args:
        partition: partition of the rows, for errors.
        first_row: number of the chunk's first row in its partition, for errors.
        number_codes: last struct code by column; kept from chunk to chunk (encode.vectors).
    """

    partition: int
    first_row: int
    number_codes: dict[str, str] = field(default_factory=dict)
    specs: list[ColumnSpec] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)

    def add(self, spec: ColumnSpec, values: Array, offsets: Array | None = None) -> None:
        """Append a column.

        Args:
            spec: name, kind, dtype and shape of one row.
            values: [n, *shape], [items] or uint8[bytes]; the dtype may be narrower than the spec's.
            offsets: int64[n + 1] for every kind except tensor.
        """
        array = np.ascontiguousarray(values)
        self.specs.append(spec)
        self.columns.append(Column(array, offsets))
        self.stored.append(dtype_name(array.dtype) if spec.dtype else "")

    def refuse(self, name: str, row: int, text: str) -> RowError:
        """Return the error for a value, with its partition, row and column.

        Args:
            name: name of the column; empty for the whole row.
            row: within the chunk.
            text: what was found, and what to do.
        """
        where = f"partition {self.partition}, row {self.first_row + row}"
        return RowError(f"{where}, column {name!r}: {text}" if name else f"{where}: {text}")


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return `dtype.name`, cached: numpy builds the text each time, in 5 µs."""
    return dtype.name


def offsets_of(values: Values | Array) -> Array:
    """Return the offsets of n values in their concatenation: int64[n + 1]."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    return offsets


def category_of(kind: type) -> str:
    """Return the category of a type: int, float, ..., list, tuple, row, dict, None or other."""
    exact = _EXACT.get(kind)
    if exact is not None:
        return exact
    if issubclass(kind, np.generic):
        return "numpy" if np.dtype(kind).name in DTYPES else "other"
    if issubclass(kind, tuple):
        # pyspark's Row has asDict, a namedtuple has _fields.
        return "row" if hasattr(kind, "asDict") or hasattr(kind, "_fields") else "tuple"
    if hasattr(kind, "toArray"):
        return "array"
    return next((name for base, name in _EXACT.items() if issubclass(kind, base)), "other")


def is_number(kind: type) -> bool:
    """Return whether a vector may hold values of this type."""
    return category_of(kind) in _NUMBERS


def describe(value: Any) -> str:
    """Return a value, shortened, and its type, for errors."""
    text = repr(value)
    shown = text if len(text) <= 40 else text[:37] + "..."
    return "None" if value is None else f"{shown} ({type(value).__name__})"


_NUMBERS = ("int", "float", "bool", "numpy")
_EXACT: dict[type, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    bytes: "bytes",
    bytearray: "bytearray",
    list: "list",
    tuple: "tuple",
    dict: "dict",
    np.ma.MaskedArray: "other",
    np.ndarray: "array",
    type(None): "None",
}
