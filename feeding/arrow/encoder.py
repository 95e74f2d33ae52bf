"""Arrow encoder: record batches to columns of a chunk, without Python code per row.

Covers: the kind of column that an array becomes, nesting of structs, missing values.
Does not: size chunks (packer), read an array's memory (arrays), know Spark.
Threads: one; an encoder remembers which columns are ragged.

Column by Arrow type:
    int, float, bool                      a scalar of the same dtype
    decimal                               float64, the nearest
    date / timestamp                      int32 days / int64 microseconds since 1970-01-01 (UTC)
    string, binary                        text, bytes
    list of numbers                       tensor (n,) while every row has n, else ragged
    list of strings                       lists of texts, of any length
    list of lists of numbers              tensor; every row of the chunk needs the same shape
    the struct of Spark's VectorUDT       as a list of float64; sparse vectors become dense
    any other struct                      a group: one column per field, named `struct.field`
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from feeding.arrow.arrays import DTYPES, LISTS, TEXTS, bounds, numbers, plain, text
from feeding.arrow.spark_vectors import BadVector, is_vector, spread
from feeding.columnar.builder import Collector
from feeding.columnar.chunk import Array
from feeding.columnar.ops import row_of
from feeding.columnar.schema import MAX_DEPTH, ColumnGroup, ColumnSpec, Node, ValueKind
from feeding.columnar.texts import packed


class ArrowEncoder:
    """Encodes the record batches of one partition.

    Args:
        names: names of the columns; None: those of the batch.
        fills: value that replaces a missing one, by column (`struct.field` inside structs), of the
            type that the column is read as. For lists: a number replaces a missing item, a list
            replaces a missing row. Other columns must have no missing values.
    """

    def __init__(
        self, names: tuple[str, ...] | None = None, fills: Mapping[str, Any] | None = None
    ) -> None:
        self._names = names
        self._fills = fills or {}
        self._lengths: dict[str, int] = {}
        """Length of the rows of each list column so far; -1: ragged."""

    def encode(self, out: Collector, batch: pa.RecordBatch) -> Node:
        """Add the columns of a batch of at least one row.

        Args:
            out: collects the columns of the chunk.
            batch: consecutive rows of the partition.

        Returns:
            How the columns nest in a row.

        Raises:
            RowError: a value does not fit; names partition, row, column and value.
        """
        names = self._names or tuple(batch.schema.names)
        children = tuple(
            self._encode(out, name, array) for name, array in zip(names, batch.columns, strict=True)
        )
        return ColumnGroup("row", names, children)

    def _encode(self, out: Collector, name: str, array: pa.Array, depth: int = 1) -> Node:
        array = plain(array)
        kind = array.type
        vectors = is_vector(kind)
        if kind.id == pa.lib.Type_STRUCT and not vectors:
            return self._group(out, name, array, depth)
        if array.null_count:
            array = self._filled(out, name, array)
        if kind.id in DTYPES:
            out.add(ColumnSpec(name, "tensor", "scalar", DTYPES[kind.id]), numbers(array))
        elif kind.id in TEXTS:
            spec = ColumnSpec(name, "str", "str")
            if TEXTS[kind.id] == "bytes":
                spec = ColumnSpec(name, "bytes", "bytes")
            else:
                _check_text(out, name, array)
            out.add(spec, *text(array))
        elif vectors:
            self._add_rows(out, name, *_spread(out, name, array), "array")
        elif kind.id in LISTS and _holds_texts(kind):
            texts, rows = self._inside(out, name, array)
            _check_text(out, name, texts, rows)
            out.add(ColumnSpec(name, "bytes", "texts"), *packed(*text(texts), rows))
        elif kind.id in LISTS:
            self._add_rows(out, name, *self._items(out, name, array), "list")
        else:
            raise out.refuse(name, 0, f"{kind}; a feed has no place for it: cast or drop it")
        return None

    def _group(self, out: Collector, name: str, array: pa.StructArray, depth: int) -> ColumnGroup:
        if depth >= MAX_DEPTH:
            raise out.refuse(name, 0, f"structs nest deeper than {MAX_DEPTH}")
        names = tuple(field.name for field in array.type)
        # Unlike field(), flatten() makes the fields of a missing struct missing.
        children = tuple(
            self._encode(out, f"{name}.{child}", part, depth + 1)
            for child, part in zip(names, array.flatten(), strict=True)
        )
        return ColumnGroup("row", names, children)

    def _add_rows(
        self, out: Collector, name: str, values: Array, offsets: Array, value: ValueKind
    ) -> None:
        """Add rows `values[offsets[i]:offsets[i + 1]]`, as a tensor if they have one shape."""
        lengths = np.diff(offsets)
        length, inner = int(lengths[0]), values.shape[1:]
        odd = np.flatnonzero(lengths != length)
        if not len(odd) and (inner or self._lengths.setdefault(name, length) == length):
            spec = ColumnSpec(name, "tensor", value, values.dtype.name, (length, *inner))
            out.add(spec, values.reshape(len(lengths), length, *inner))
            return
        if inner:
            shapes = f"{(int(lengths[odd[0]]), *inner)}, but earlier rows have {(length, *inner)}"
            raise out.refuse(name, int(odd[0]), f"nested list of shape {shapes}")
        # Ragged from now on: the rows of a later chunk may have one length by chance.
        self._lengths[name] = -1
        out.add(ColumnSpec(name, "ragged", value, values.dtype.name), values, offsets)

    def _items(
        self, out: Collector, name: str, lists: pa.Array, outer: Array | None = None
    ) -> tuple[Array, Array]:
        """Return all items of lists, [items, *shape of an item], and the offsets of the lists.

        `outer`: offsets of the rows among these lists, if the lists are inside others.
        """
        items, offsets = self._inside(out, name, lists, outer)
        rows = offsets if outer is None else offsets[outer]
        if items.type.id in DTYPES:
            return numbers(items), offsets
        if items.type.id not in LISTS:
            text = f"lists of {items.type}; a feed takes lists of numbers, and of texts by itself"
            raise out.refuse(name, 0, text)
        values, inner = self._items(out, name, items, rows)
        lengths = np.diff(inner)
        length = int(lengths[0]) if len(lengths) else 0
        odd = np.flatnonzero(lengths != length)
        if len(odd):
            text = f"inner list of {lengths[odd[0]]} items, but earlier ones have {length}"
            raise out.refuse(name, row_of(rows, int(odd[0])), f"{text}; they need one length")
        return values.reshape(len(lengths), length, *values.shape[1:]), offsets

    def _inside(
        self, out: Collector, name: str, lists: pa.Array, outer: Array | None = None
    ) -> tuple[pa.Array, Array]:
        """Return all items of lists without nulls, and the offsets of the lists; see _items."""
        found = bounds(lists)
        items = plain(lists.values.slice(found[0], found[-1] - found[0]))
        offsets = found - found[0]
        if items.null_count:
            rows = offsets if outer is None else offsets[outer]
            items = self._filled(out, name, items, rows)
        return items, offsets

    def _filled(
        self, out: Collector, name: str, array: pa.Array, rows: Array | None = None
    ) -> pa.Array:
        """Return the array with nulls replaced; `rows`: offsets of the rows, for items of lists."""
        missing = array.is_null()
        at = int(missing.index(True).as_py())
        value = self._fills.get(name)
        wants_list = array.type.id in LISTS or is_vector(array.type)
        if value is None or isinstance(value, list) != wants_list:
            raise out.refuse(name, row_of(rows, at), _no_fill(name, rows, wants_list=wants_list))
        if not wants_list:
            return pc.fill_null(array, pa.scalar(value, array.type))
        filler = {"type": 1, "values": value} if is_vector(array.type) else value
        if array.type.id in LISTS and pa.types.is_decimal(array.type.value_type):
            filler = [Decimal(str(item)) for item in value]
        try:
            both = pa.concat_arrays([array, pa.array([filler], array.type)])
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            text = f"null, and nulls= {value} makes no {array.type}; df.na.drop() drops rows"
            raise out.refuse(name, row_of(rows, at), text) from None
        mask = missing.to_numpy(zero_copy_only=False)
        return both.take(pa.array(np.where(mask, len(array), np.arange(len(array)))))


def _spread(out: Collector, name: str, array: pa.Array) -> tuple[Array, Array]:
    try:
        return spread(array)
    except BadVector as error:
        raise out.refuse(name, error.row, str(error)) from None


def _holds_texts(lists: pa.DataType) -> bool:
    items = plain(pa.nulls(0, lists.value_type)).type
    return TEXTS.get(items.id) == "str"


def _check_text(out: Collector, name: str, texts: pa.Array, rows: Array | None = None) -> None:
    """Refuse text that is not UTF-8: Spark's strings may hold any bytes.

    `rows`: offsets of the rows, for items of lists.
    """
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        raw = pa.large_binary() if texts.type == pa.large_string() else pa.binary()
        at = next(place for place, value in enumerate(texts.view(raw)) if not _is_utf8(value))
        advice = "read it as binary, or F.decode() it from its own encoding"
        raise out.refuse(name, row_of(rows, at), f"text that is not UTF-8; {advice}") from None


def _is_utf8(value: pa.Scalar) -> bool:
    try:
        value.as_py().decode()
    except UnicodeDecodeError:
        return False
    return True


def _no_fill(name: str, rows: Array | None, *, wants_list: bool) -> str:
    value = "[..]" if wants_list else "value"
    # Estimators and predictions take no nulls=, so what every caller can do comes first.
    advice = "null; F.coalesce() replaces it, df.na.drop() drops rows"
    if rows is not None:
        advice = "null inside a list; F.array_compact() drops it, F.transform() replaces it"
    return f"{advice}, and cluster.train takes nulls={{{name!r}: {value}}}"
