"""Hypothesis strategies of msgspec types: values that keep every limit that the type declares.

Covers: what msgspec.inspect says of a type.      Does not: rules of a `__post_init__`.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

Strategy = st.SearchStrategy[Any]
MAX_ITEMS = 3
LARGEST = 2**62
LARGEST_FLOAT = 1e6
TEXT = st.characters(exclude_categories=["Cs"])  # half of a surrogate pair has no UTF-8


@functools.cache  # hypothesis validates a strategy once
def values_of(kind: Any) -> Strategy:
    """Return values of a type."""
    return _Values().of(inspect.type_info(kind))


class _Values:
    def __init__(self) -> None:
        self._made: dict[type, Strategy] = {}

    def of(self, info: inspect.Type) -> Strategy:
        method = getattr(self, f"_{type(info).__name__.lower()}")
        found: Strategy = method(info)
        return found

    def _metadata(self, info: inspect.Metadata) -> Strategy:
        return self.of(info.type)

    def _booltype(self, _: inspect.BoolType) -> Strategy:
        return st.booleans()

    def _nonetype(self, _: inspect.NoneType) -> Strategy:
        return st.none()

    def _inttype(self, info: inspect.IntType) -> Strategy:
        low = info.ge if info.ge is not None else -LARGEST if info.gt is None else info.gt + 1
        high = info.le if info.le is not None else LARGEST if info.lt is None else info.lt - 1
        return st.integers(low, high)

    def _floattype(self, info: inspect.FloatType) -> Strategy:
        assert info.gt is None
        assert info.lt is None
        low = -LARGEST_FLOAT if info.ge is None else info.ge
        return st.floats(low, LARGEST_FLOAT if info.le is None else info.le)

    def _strtype(self, info: inspect.StrType) -> Strategy:
        if info.pattern is not None:
            return st.from_regex(info.pattern.removesuffix("$") + r"\Z")
        return st.text(TEXT, min_size=info.min_length or 0, max_size=_few(info))

    def _bytestype(self, info: inspect.BytesType) -> Strategy:
        return st.binary(min_size=info.min_length or 0, max_size=_few(info))

    def _literaltype(self, info: inspect.LiteralType) -> Strategy:
        return st.sampled_from(info.values)

    def _enumtype(self, info: inspect.EnumType) -> Strategy:
        return st.sampled_from(list(info.cls))

    def _uniontype(self, info: inspect.UnionType) -> Strategy:
        return st.one_of(*(self.of(each) for each in info.types))

    def _vartupletype(self, info: inspect.VarTupleType) -> Strategy:
        least = info.min_length or 0
        items = st.lists(self.of(info.item_type), min_size=least, max_size=_few(info))
        return items.map(tuple)

    def _tupletype(self, info: inspect.TupleType) -> Strategy:
        return st.tuples(*(self.of(each) for each in info.item_types))

    def _dicttype(self, info: inspect.DictType) -> Strategy:
        return st.dictionaries(
            self.of(info.key_type), self.of(info.value_type), max_size=_few(info)
        )

    def _structtype(self, info: inspect.StructType) -> Strategy:
        if info.cls not in self._made:
            # Deferred: a struct may hold others of its own kind.
            self._made[info.cls] = st.deferred(lambda: self._built(info))
        return self._made[info.cls]

    def _built(self, info: inspect.StructType) -> Strategy:
        return st.builds(info.cls, **{field.name: self.of(field.type) for field in info.fields})

    def _dataclasstype(self, info: inspect.DataclassType) -> Strategy:
        return st.builds(info.cls, **{field.name: self.of(field.type) for field in info.fields})


def _few(info: Any) -> int:
    """Return how many items or letters to make at most."""
    low, high = info.min_length or 0, info.max_length
    return low + MAX_ITEMS if high is None else min(high, low + MAX_ITEMS)


def structs_in(kinds: Any) -> set[type]:
    """Return all structs that values of these types may contain, the types themselves included."""
    found: set[type] = set()
    left = [inspect.type_info(kind) for kind in kinds]
    while left:
        info = left.pop()
        if isinstance(info, inspect.StructType):
            if info.cls in found:
                continue
            found.add(info.cls)
            left += [field.type for field in info.fields]
        for name in ("type", "item_type", "key_type", "value_type"):
            if isinstance(inner := getattr(info, name, None), inspect.Type):
                left.append(inner)
        left += getattr(info, "types", ()) + getattr(info, "item_types", ())
    return found


def declared_in(module: Any) -> set[type]:
    """Return the structs that a module declares, without its private ones."""
    return {
        each
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, msgspec.Struct)
        and each.__module__ == module.__name__
        and not each.__name__.startswith("_")
    }
