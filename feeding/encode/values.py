"""Value encoding: values of Python rows to columns; decides each value's kind and how a row nests.

Covers: scalars, text, bytes, arrays, groups (tuple, list, dict, Row).
Does not: vectors of Python numbers (vectors), size chunks (packer).
Threads: any; pure.

Column by Python value:
    int float bool str bytes, numpy scalar             one column of scalars
    numpy array                                        a tensor of its dtype
    list of numbers, list of equally long such lists   a vector or tensor
    one-dimensional ones of differing lengths          ragged
    tuple of more than 3 numbers of one type           a vector
    any other tuple or list                            a group: one column per position
    dict with str keys, Row, namedtuple                a group: one column per name
pyspark's Row is recognised by its attributes; pyspark is never imported.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from feeding.columnar.builder import (
    ADVICE,
    NO_MASK,
    Collector,
    Values,
    category_of,
    describe,
    dtype_name,
    is_number,
    offsets_of,
)
from feeding.columnar.schema import (
    DTYPES,
    MAX_DEPTH,
    WHOLE_ROW,
    ColumnGroup,
    ColumnSpec,
    Node,
    ValueKind,
)
from feeding.encode.vectors import check_ints, encode_vectors, is_held

MAX_PLAIN_TUPLE = 3
"""Tuples up to this length are (x, y, sample_weight), even of numbers only."""

_TEXTS_ADVICE = (
    "lists of texts need one length in all rows. Join each to one text, '\\n'.join(texts), and "
    "split it again in ctx.dataset(…, map_fn=...) with tf.strings.split(x, '\\n'). array<string> "
    "columns of a DataFrame may have any length"
)


def encode_values(out: Collector, values: Values, name: str = "", depth: int = 0) -> Node:
    """Add the columns for one value per row.

    Args:
        out: collects the columns of the chunk.
        values: one per row, at least one.
        name: name of the column or group; empty for the whole row.
        depth: groups around the values.

    Returns:
        How the columns nest in a row.

    Raises:
        RowError: a value fits no column; names partition, row, column and value.
    """
    category = _common_category(out, values, name)
    if category in ("dict", "row") or (
        category in ("list", "tuple") and _is_group(category, values)
    ):
        return _encode_group(out, category, values, name, depth)
    column = name or WHOLE_ROW
    if category in ("list", "tuple"):
        encode_vectors(out, category, values, column)
    elif category == "array":
        _encode_arrays(out, values, column)
    elif category == "numpy":
        _encode_numpy_scalars(out, values, column)
    elif category in ("str", "bytes", "bytearray"):
        _encode_text(out, category, values, column)
    else:
        _encode_scalars(out, category, values, column)
    return None


def _common_category(out: Collector, values: Values, name: str) -> str:
    categories = {category_of(kind) for kind in set(map(type, values))}
    if len(categories) == 1 and not categories & {"None", "other"}:
        return categories.pop()
    if categories == {"int", "float"}:
        return "float"
    for row, value in enumerate(values):
        if category_of(type(value)) in ("None", "other"):
            advice = NO_MASK if isinstance(value, np.ma.MaskedArray) else ADVICE
            raise out.refuse(name, row, f"{describe(value)}; {advice}")
    expected = category_of(type(values[0]))
    odd = next(i for i, value in enumerate(values) if category_of(type(value)) != expected)
    raise out.refuse(
        name,
        odd,
        f"{describe(values[odd])}, but earlier rows have {describe(values[0])}; "
        "all rows of a column need one type",
    )


def _encode_scalars(out: Collector, category: str, values: Values, name: str) -> None:
    dtype = {"int": "int64", "float": "float64", "bool": "bool"}[category]
    try:
        array = np.array(values, dtype)
    except OverflowError:
        row = next(i for i, value in enumerate(values) if not is_held(value, dtype))
        raise out.refuse(name, row, f"{values[row]} does not fit {dtype}") from None
    check_ints(out, array, values, name, 0)
    out.add(ColumnSpec(name, "tensor", "scalar", array.dtype.name), array)


def _encode_numpy_scalars(out: Collector, values: Values, name: str) -> None:
    first = values[0].dtype
    for row, value in enumerate(values):
        if value.dtype != first:
            raise out.refuse(name, row, f"{value.dtype} scalar, but earlier rows have {first}")
    array = np.array(values, first)
    out.add(ColumnSpec(name, "tensor", "numpy", array.dtype.name), array)


def _encode_text(out: Collector, category: str, values: Values, name: str) -> None:
    encoded = values
    if category == "str":
        try:
            encoded = [value.encode() for value in values]
        except UnicodeEncodeError as error:
            row = next(i for i, value in enumerate(values) if value == error.object)
            raise out.refuse(name, row, f"text that is not UTF-8: {error.reason}") from None
    data = np.frombuffer(b"".join(encoded), np.uint8)
    kind = "str" if category == "str" else "bytes"
    spec = ColumnSpec(name, kind, cast("ValueKind", category))  # type: ignore[arg-type] # a Literal
    out.add(spec, data, offsets_of(encoded))


def _encode_arrays(out: Collector, values: Values, name: str) -> None:
    arrays = [value if isinstance(value, np.ndarray) else value.toArray() for value in values]
    first = arrays[0]
    wanted = dtype_name(first.dtype)  # the same in both byte orders
    for row, array in enumerate(arrays):
        if dtype_name(array.dtype) != wanted or wanted not in DTYPES:
            before = "" if row == 0 else f", but earlier rows have {first.dtype}"
            raise out.refuse(name, row, f"array of {array.dtype}{before}; {ADVICE}")
    dtype = first.dtype.newbyteorder("=")
    if all(array.shape == first.shape for array in arrays):
        spec = ColumnSpec(name, "tensor", "array", dtype.name, first.shape)
        out.add(spec, np.stack(arrays).astype(dtype, copy=False))
        return
    if any(array.ndim != 1 for array in arrays):
        odd = next(i for i, array in enumerate(arrays) if array.shape != first.shape)
        text = f"array of shape {arrays[odd].shape}, but earlier rows have {first.shape}"
        raise out.refuse(name, odd, text)
    spec = ColumnSpec(name, "ragged", "array", dtype.name)
    out.add(spec, np.concatenate(arrays).astype(dtype, copy=False), offsets_of(arrays))


def _encode_group(
    out: Collector, category: str, values: Values, name: str, depth: int
) -> ColumnGroup:
    if depth >= MAX_DEPTH:
        raise out.refuse(name, 0, f"values nest deeper than {MAX_DEPTH}")
    if category == "dict":
        names = _dict_names(out, values, name)
        parts = [[value[key] for value in values] for key in names]
    else:
        names = _tuple_names(out, category, values, name)
        try:
            parts = [list(part) for part in zip(*values, strict=True)]
        except ValueError:
            odd = next(i for i, value in enumerate(values) if len(value) != len(values[0]))
            text = f"{len(values[odd])} values, but earlier rows have {len(values[0])}"
            if all(isinstance(one, str | bytes) for one in (*values[odd], *values[0])):
                text += f"; {_TEXTS_ADVICE}"
            raise out.refuse(name, odd, text) from None
    children = tuple(
        encode_values(out, part, f"{name}.{child}" if name else child, depth + 1)
        for child, part in zip(names, parts, strict=True)
    )
    return ColumnGroup(cast("Any", category), names, children)


def _tuple_names(out: Collector, category: str, values: Values, name: str) -> tuple[str, ...]:
    if category != "row":
        return tuple(map(str, range(len(values[0]))))
    names = _field_names(values[0])
    for row, value in enumerate(values):
        if _field_names(value) != names:
            text = f"fields {list(_field_names(value))}, but earlier rows have {list(names)}"
            raise out.refuse(name, row, text)
    return names


def _dict_names(out: Collector, values: Values, name: str) -> tuple[str, ...]:
    keys = values[0].keys()
    for row, value in enumerate(values):
        if value.keys() != keys:
            text = f"keys {sorted(map(str, value))}, but earlier rows have {sorted(map(str, keys))}"
            raise out.refuse(name, row, text)
    for key in keys:
        if not isinstance(key, str):
            raise out.refuse(name, 0, f"key {describe(key)}; keys must be str")
    return tuple(keys)


def _field_names(row: Any) -> tuple[str, ...]:
    # A Row made without names has no __fields__: it is read by position.
    names = getattr(row, "__fields__", None) or getattr(row, "_fields", None)
    return tuple(map(str, names)) if names else tuple(map(str, range(len(row))))


def _is_group(category: str, values: Values) -> bool:
    """Return whether lists or tuples are groups of columns (True) or vectors of numbers."""
    first = next((value for value in values if len(value)), ())
    kinds = set(map(type, first))
    if category == "tuple":
        same_number = len(kinds) == 1 and is_number(next(iter(kinds)))
        return not (same_number and len(first) > MAX_PLAIN_TUPLE)
    if all(map(is_number, kinds)):
        return False
    return kinds != {list} or not _is_rectangular(first)


def _is_rectangular(value: Values) -> bool:
    """Return whether nested lists of numbers have one length on each level."""
    kinds = set(map(type, value))
    if kinds != {list}:
        return bool(kinds) and all(map(is_number, kinds))
    return len(set(map(len, value))) == 1 and all(map(_is_rectangular, value))
