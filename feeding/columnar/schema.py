"""Schema of the rows of a feed: the columns, and how they nest inside a row.

Covers: ColumnSpec, ColumnGroup, Schema; rebuilding nested values from columns; FeedRow, which takes
the place of pyspark's Row.
Does not: hold data (chunk), read rows (encode.values).
Threads: any; pure, frozen data.

A row is a tree whose leaves are columns, depth first:
    5.0 / [1, 2, 3] / ndarray / "text"   one leaf                       names: ("value",)
    ([..784 ints..], 3)                  ColumnGroup("tuple")           names: ("0", "1")
    Row(features=[..], label=3)          ColumnGroup("row")             names: ("features", "label")
    ({"a": 1, "b": 2}, 3)                a ColumnGroup in a ColumnGroup names: ("0.a", "0.b", "1")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from feeding.errors import ChunkError

MAX_COLUMNS = 4096
MAX_DEPTH = 8
MAX_DIMENSIONS = 8
MAX_ITEMS = 1 << 34
"""Most items of one row's tensor; a dimension of 0 counts as 1, as in numpy's size check."""
MAX_SCHEMA_BYTES = 768 << 10
"""Limit of an encoded schema; a chunk's meta holds it (feeding.protocol.messages.LIMITS)."""
_COLUMN_BYTES = 96
"""Most bytes of an encoded column beside its name, which the schema has twice."""
WHOLE_ROW = "value"
"""Name of the only column of rows that are one value."""

DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)

MAX_NAME = 256
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Kind = Literal["tensor", "ragged", "bytes", "str"]
ValueKind = Literal[
    "scalar", "numpy", "list", "tuple", "array", "bytes", "bytearray", "texts", "str"
]


class ColumnSpec(msgspec.Struct, frozen=True, array_like=True):
    """One column: `dtype` and `shape` are those of one row's value.

    tensor: every row has `shape`.   ragged: one-dimensional, every row its own length.
    bytes, str: no dtype.            `value` is the Python type a consumer of rows gets back;
    "texts": a list of str, which one value of bytes holds (feeding.columnar.texts).

    Of files, which no chunk carries, bytes may have a shape, and "texts" are any number of str or
    bytes in a row, which a batch has as a Ragged of objects.
    """

    name: Name
    kind: Kind
    value: ValueKind
    dtype: Name = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        dims = "[?]" if self.kind == "ragged" else str(list(self.shape)) if self.shape else ""
        kind = "texts" if self.value == "texts" else self.dtype or self.kind
        return f"{self.name}: {kind}{dims}"


class ColumnGroup(msgspec.Struct, frozen=True, array_like=True):
    """A row, or a part of one, of several values; a child is a group, or None for a column."""

    kind: Literal["tuple", "list", "dict", "row"]
    names: tuple[Name, ...]
    children: tuple[Node, ...]


Node = ColumnGroup | None


class Schema(msgspec.Struct, frozen=True, array_like=True):
    """The columns of a feed in depth-first order of `layout`."""

    columns: tuple[ColumnSpec, ...]
    layout: Node = None

    def __str__(self) -> str:
        return "(" + ", ".join(map(str, self.columns)) + ")"

    @classmethod
    def of_dict(cls, columns: Iterable[ColumnSpec]) -> Schema:
        """Return the schema of rows that are dicts of these columns."""
        specs = tuple(columns)
        names = tuple(spec.name for spec in specs)
        return cls(specs, ColumnGroup("dict", names, (None,) * len(names)))

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(column.name for column in self.columns)

    def check(self) -> None:
        """Refuse a schema that contradicts itself or exceeds a limit.

        Raises:
            ChunkError: names the field.
        """
        if len(self.columns) > MAX_COLUMNS:
            raise ChunkError(f"{len(self.columns)} columns, the limit is {MAX_COLUMNS}")
        leaves = _count_leaves(self.layout, depth=0)
        if leaves != len(self.columns):
            raise ChunkError(f"the layout has {leaves} leaves for {len(self.columns)} columns")
        if len(set(self.names)) != len(self.columns):
            raise ChunkError("two columns have the same name")
        for column in self.columns:
            _check_column(column)

    def nest(self, leaves: Sequence[Any]) -> Any:
        """Return one value per column in the nesting of a row; a Row becomes a dict."""
        return _nest(self.layout, iter(leaves))

    def rows(self, leaves: Sequence[list[Any]], num_rows: int) -> list[Any]:
        """Return rows, rebuilt from the values of each column.

        Args:
            leaves: per column, `num_rows` values.
            num_rows: also counts rows without any column.
        """
        return _rows(self.layout, iter(leaves), num_rows)


def most_bytes(names: Iterable[str]) -> int:
    """Return how many bytes an encoded schema of columns with these names takes at most."""
    return sum(2 * len(name.encode(errors="replace")) + _COLUMN_BYTES for name in names)


class FeedRow(tuple[Any, ...]):
    """A row with named fields: equal to the tuple of its values, read by position or by name.

    As in pyspark's Row, `name in row` looks for a field.
    """

    __slots__ = ()
    __fields__: tuple[str, ...] = ()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return tuple.__getitem__(self, self._position(key, KeyError))
        return tuple.__getitem__(self, key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # numpy asks each row for several
            raise AttributeError(name)
        return tuple.__getitem__(self, self._position(name, AttributeError))

    def __contains__(self, name: object) -> bool:
        return name in self.__fields__

    def _position(self, name: str, error: type[Exception]) -> int:
        try:
            return self.__fields__.index(name)
        except ValueError:
            raise error(f"no field {name!r}; the row has {list(self.__fields__)}") from None

    def asDict(self, recursive: bool = False) -> dict[str, Any]:
        """Return the fields as a dict.

        Args:
            recursive: whether rows inside of the row, its lists and its dicts become dicts, too.
        """
        values = map(_as_dicts, self) if recursive else self
        return dict(zip(self.__fields__, values, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_row, (self.__fields__, tuple(self))

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in zip(self.__fields__, self, strict=True))
        return f"Row({fields})"


def _as_dicts(value: Any) -> Any:
    if isinstance(value, FeedRow):
        return value.asDict(recursive=True)
    if isinstance(value, list):
        return list(map(_as_dicts, value))
    if isinstance(value, dict):
        return {key: _as_dicts(each) for key, each in value.items()}
    return value


def row_class(names: tuple[str, ...]) -> type[FeedRow]:
    """Return a FeedRow class for these fields; one class per chunk keeps rows small."""
    return type("Row", (FeedRow,), {"__slots__": (), "__fields__": names})


def _make_row(names: tuple[str, ...], values: tuple[Any, ...]) -> FeedRow:
    return row_class(names)(values)


def _count_leaves(node: Node, depth: int) -> int:
    if node is None:
        return 1
    if depth >= MAX_DEPTH:
        raise ChunkError(f"values nest deeper than {MAX_DEPTH}")
    if len(node.names) != len(node.children):
        raise ChunkError(f"a group has {len(node.names)} names for {len(node.children)} values")
    return sum(_count_leaves(child, depth + 1) for child in node.children)


def _check_column(column: ColumnSpec) -> None:
    numeric = column.kind in ("tensor", "ragged")
    if numeric != (column.dtype in DTYPES):
        raise ChunkError(f"column {column.name!r}: dtype {column.dtype!r} for kind {column.kind}")
    if len(column.name) > MAX_NAME:
        raise ChunkError(f"column name of {len(column.name)} characters, the limit is {MAX_NAME}")
    if (
        len(column.shape) > MAX_DIMENSIONS
        or any(dim < 0 for dim in column.shape)
        or math.prod(max(dim, 1) for dim in column.shape) > MAX_ITEMS
    ):
        raise ChunkError(f"column {column.name!r}: impossible shape {column.shape}")
    if column.shape and column.kind != "tensor":
        raise ChunkError(f"column {column.name!r}: kind {column.kind} has no shape")
    if column.value not in _VALUES_OF[column.kind]:
        raise ChunkError(f"column {column.name!r}: value {column.value} for kind {column.kind}")
    if column.value in ("scalar", "numpy") and column.shape:
        raise ChunkError(f"column {column.name!r}: a {column.value} has no shape")


_VALUES_OF: dict[str, tuple[str, ...]] = {
    "tensor": ("scalar", "numpy", "list", "tuple", "array"),
    "ragged": ("list", "tuple", "array"),
    "bytes": ("bytes", "bytearray", "texts"),
    "str": ("str",),
}


def _nest(node: Node, leaves: Iterator[Any]) -> Any:
    if node is None:
        return next(leaves)
    values = [_nest(child, leaves) for child in node.children]
    if node.kind in ("dict", "row"):
        return dict(zip(node.names, values, strict=True))
    return values if node.kind == "list" else tuple(values)


def _rows(node: Node, leaves: Iterator[list[Any]], num_rows: int) -> list[Any]:
    if node is None:
        return next(leaves)
    columns = [_rows(child, leaves, num_rows) for child in node.children]
    tuples = zip(*columns, strict=True) if columns else iter([()] * num_rows)
    if node.kind == "tuple":
        return list(tuples)
    if node.kind == "list":
        return list(map(list, tuples))
    if node.kind == "dict":
        return [dict(zip(node.names, values, strict=True)) for values in tuples]
    make: Callable[[tuple[Any, ...]], Any] = row_class(node.names)
    return [make(values) for values in tuples]


def is_shape(value: object, *, least: int) -> bool:
    """Return whether a value is a tuple of ints of at least `least`.

    Args:
        value: anything, for example from a message.
        least: smallest number allowed, 0 or 1.
    """
    return isinstance(value, tuple) and all(
        isinstance(size, int) and not isinstance(size, bool) and size >= least for size in value
    )


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian dtype for a name of DTYPES."""
    return np.dtype(name).newbyteorder("<")
