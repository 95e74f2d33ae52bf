"""DataFrame columns: which ones a feed can carry, and how it fills missing values.

Covers: refusing columns by name and type before a job runs, `columns=` and `nulls=` of train().
Does not: read rows (feeding.arrow.encoder), import pyspark: types are known by their typeName().
Runs in: the driver.      Pure.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feeding.columnar.schema import (
    MAX_COLUMNS,
    MAX_DEPTH,
    MAX_NAME,
    MAX_SCHEMA_BYTES,
    most_bytes,
)
from tfos.errors import SettingsError

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_INTEGER_BITS = {"byte": 8, "short": 16, "integer": 32, "long": 64}
_NUMBERS = {*_INTEGER_BITS, "float", "double", "decimal"}
_GREATEST_FLOAT = 3.4028235e38
"""A larger number becomes infinite in 32 bits."""
_ROUNDED = {"float", "double", "decimal"}
_TEXTS = {"string", "char", "varchar"}
MICROSECONDS = {"timestamp", "timestamp_ntz"}
"""Types that reach workers as integers: microseconds since 1970."""
ROUNDED_TIMES = (
    "which rounds the microseconds since 1970 of a timestamp; make a column of what counts in it: "
    "F.hour(name), F.dayofweek(name), or seconds since a start"
)
"""The text after the dtype that rounds them, with what to do."""
_SCALARS = {*_NUMBERS, *_TEXTS, "boolean", "binary", "date", *MICROSECONDS}
_REMEDIES = {
    "map": "select values from it: F.col(name)['key']",
    "void": "it holds only nulls: drop it",
    "variant": "select values from it: F.variant_get(name, '$.path', 'double')",
    "daytimeinterval": "cast it to a number: F.col(name).cast('long')",
    "yearmonthinterval": "cast it to a number of months: F.col(name).cast('int')",
    "interval": "convert it to a number: F.extract(F.lit('DAYS'), name)",
    "time": "convert it to a number: F.hour(name) * 60 + F.minute(name)",
    "matrixudt": "convert it to an array: a udf that returns its toArray().tolist()",
}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One column of the feed; `kind` is Spark's name of its type, of the items for lists."""

    name: str
    kind: str
    is_list: bool = False

    def __str__(self) -> str:
        return f"{self.name}: array<{self.kind}>" if self.is_list else f"{self.name}: {self.kind}"


def select(names: Sequence[str], columns: object) -> tuple[int, ...]:
    """Return the positions of the chosen columns.

    Args:
        names: columns of the DataFrame.
        columns: names of the chosen ones, in the feed's order; None: all.

    Raises:
        SettingsError: a column is missing or duplicate, or no column is chosen.
    """
    chosen: list[Any]
    if columns is None:
        chosen = list(names)
    elif isinstance(columns, str) or not isinstance(columns, Sequence):
        raise SettingsError(f"columns must be a list of names, got {columns!r}.")
    else:
        chosen = list(columns)
        if odd := [each for each in chosen if not isinstance(each, str)]:  # a Column has no ==
            raise SettingsError(
                f"columns must be names, got {odd[0]!r} ({type(odd[0]).__name__}); for an "
                "expression, feed df.select(…)"
            )
    if not chosen:
        raise SettingsError("the DataFrame has no columns to feed; select at least one.")
    for name in chosen:
        if chosen.count(name) > 1:
            raise SettingsError(
                f"column {name!r} exists twice: rename one, for example by df.toDF(...)."
            )
    return positions_of(names, chosen)


def positions_of(names: Sequence[str], asked: Sequence[str], what: str = "") -> tuple[int, ...]:
    """Return the positions of columns, each of which may be asked for several times.

    Args:
        names: columns of the DataFrame.
        asked: names of some of them.
        what: the user's name of the argument that names them; "": columns=.

    Raises:
        SettingsError: a column is missing, or the DataFrame has several of that name.
    """
    for name in asked:
        if (count := names.count(name)) != 1:
            found = "has no such column" if not count else f"has {count} of them"
            raise SettingsError(
                f"{what or f'columns={list(asked)}'}: {name!r}: the DataFrame {found}: it has "
                f"{list(names)}; name columns that exist once, df.toDF(...) renames them"
            )
    return tuple(map(names.index, asked))


def check_plain(name: str, kind: Any) -> None:
    """Refuse a struct where a column fills one place: its fields are several.

    Args:
        name: the column's name.
        kind: its type.

    Raises:
        SettingsError: the column is a struct.
    """
    if kind.typeName() == "struct":
        raise SettingsError(
            f"column {name!r} is {kind.simpleString()}; select its fields as columns: "
            f"df.withColumn('x', F.col('{name}.x'))"
        )


def check_ids(leaf: Leaf, dtype: str) -> None:
    """Refuse a column of floats that ids are made of: two ids may have become one of them.

    Args:
        leaf: the column.
        dtype: dtype of the model's input.

    Raises:
        SettingsError: the column has floats or decimals.
    """
    if leaf.kind in _ROUNDED:
        raise SettingsError(
            f"feature column {leaf}: the model takes ids of {dtype} there, and {leaf.kind} columns "
            "reach a model as floats, which have no odd numbers above 2^24 or 2^53. Make a column "
            "of long from the original ids: F.col(name).cast('long')"
        )


def check_times(leaf: Leaf, dtype: str) -> None:
    """Refuse a column of timestamps that floats would round.

    Args:
        leaf: the column.
        dtype: dtype of the model's input.

    Raises:
        SettingsError: the column has timestamps, and the input takes floats.
    """
    if leaf.kind in MICROSECONDS and dtype.startswith(("float", "bfloat")):
        raise SettingsError(
            f"feature column {leaf}: the model takes {dtype} there, {ROUNDED_TIMES}"
        )


def leaves(fields: Sequence[tuple[str, Any]]) -> tuple[Leaf, ...]:
    """Return the columns of the feed for these columns of a DataFrame, given as (name, type).

    Raises:
        SettingsError: a type that a feed cannot carry; names column, type and remedy.
    """
    found = tuple(leaf for name, kind in fields for leaf in _leaves(name, kind, 1))
    if len(found) > MAX_COLUMNS:
        raise SettingsError(
            f"the DataFrame has {len(found)} columns, a feed carries {MAX_COLUMNS}; combine some "
            "by F.array(), or name those to feed in columns=."
        )
    names = [leaf.name for leaf in found]
    for name in names:
        if len(name) > MAX_NAME:
            raise SettingsError(
                f"column {name[:40]!r}… has a name of {len(name)} characters, a feed carries at "
                f"most {MAX_NAME}; rename it by df.withColumnRenamed()."
            )
    num_bytes = most_bytes(names)
    if num_bytes > MAX_SCHEMA_BYTES:
        raise SettingsError(
            f"the names and types of {len(found)} columns take up to {num_bytes} bytes, a feed "
            f"carries {MAX_SCHEMA_BYTES}; shorten the names by df.toDF(...), combine columns by "
            "F.array(), or name those to feed in columns=."
        )
    twice = next(iter(Counter(names) - Counter(set(names))), None)
    if twice is not None:
        raise SettingsError(f"column {twice!r} is also a field of a struct; rename one of them.")
    return found


_ARRAY_REMEDY = "explode it, flatten it, or convert it to one string: F.to_json(name)"


def _leaves(name: str, kind: Any, depth: int) -> Iterator[Leaf]:
    type_name = kind.typeName()
    if type_name == "struct":
        if depth >= MAX_DEPTH:
            raise SettingsError(
                f"column {name!r}: structs nest deeper than {MAX_DEPTH}; select the fields to feed "
                "as columns, such as F.col('struct.field').alias('field')."
            )
        if not kind.fields:
            raise SettingsError(f"column {name!r} is a struct without fields: drop it.")
        for field in kind.fields:
            yield from _leaves(f"{name}.{field.name}", field.dataType, depth + 1)
    elif type_name == "vectorudt":
        yield Leaf(name, "double", is_list=True)
    elif type_name == "array":
        item = kind.elementType
        while item.typeName() == "array":
            item = item.elementType
        is_flat = item is kind.elementType
        if item.typeName() not in _SCALARS - {"binary"} - (set() if is_flat else _TEXTS):
            raise _refused(name, kind, _ARRAY_REMEDY)
        yield Leaf(name, item.typeName(), is_list=True)
    elif type_name in _SCALARS:
        yield Leaf(name, type_name)
    else:
        raise _refused(name, kind, _REMEDIES.get(type_name, "cast or drop it"))


def _refused(name: str, kind: Any, remedy: str) -> SettingsError:
    return SettingsError(
        f"column {name!r} is {kind.simpleString()}, which a feed cannot carry; {remedy}."
    )


def fills(found: Sequence[Leaf], nulls: object) -> dict[str, Any]:
    """Return the fill values of missing values by column; other columns must not have nulls.

    Args:
        found: the columns.
        nulls: "error"; a value for every column that it fits, as df.na.fill; or values by column.

    Raises:
        SettingsError: a column does not exist, or a value does not fit its column.
    """
    if isinstance(nulls, str) and nulls == "error":
        return {}
    if isinstance(nulls, Mapping):
        by_name = {leaf.name: leaf for leaf in found}
        for name in nulls:
            if name not in by_name:
                raise SettingsError(
                    f"nulls= names {name!r}, which is not fed: {list(by_name)} are."
                )
        return {name: _fill(by_name[name], value) for name, value in nulls.items()}
    kinds = next(
        (kinds for types, kinds in _FILLED_BY if isinstance(nulls, types)), frozenset[str]()
    )
    if not kinds:
        raise SettingsError(
            f"nulls must be 'error', a number, a bool, a str or a dict of values by column, "
            f"got {nulls!r}."
        )
    return {leaf.name: _fill(leaf, nulls) for leaf in found if leaf.kind in kinds}


_FILLED_BY: tuple[tuple[Any, frozenset[str]], ...] = (
    (bool, frozenset(["boolean"])),
    ((int, float), frozenset(_NUMBERS)),
    (str, frozenset(_TEXTS)),
)


def _fill(leaf: Leaf, value: Any) -> Any:
    try:
        if leaf.is_list and isinstance(value, list | tuple):
            return [_converted(leaf, item) for item in value]
        return _converted(leaf, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise SettingsError(f"nulls: {value!r} does not fit column {leaf}; {error}.") from None


def _converted(leaf: Leaf, value: Any) -> Any:
    convert = _CONVERTERS.get(leaf.kind)
    if convert is not None:
        return convert(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a number is needed")
    bits = _INTEGER_BITS.get(leaf.kind)
    if bits is None:
        if leaf.kind == "float" and _GREATEST_FLOAT < abs(value) < math.inf:
            raise ValueError(f"a number up to {_GREATEST_FLOAT} is needed")
        return float(value)
    if value != int(value) or not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise ValueError(f"a whole number of {bits} bits is needed")
    return int(value)


def _of(kind: type, what: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"{what} is needed")
        return value

    return check


def _days(value: Any) -> int:
    if isinstance(value, datetime.datetime) or not isinstance(value, datetime.date):
        raise TypeError("a datetime.date is needed")
    return (value - _EPOCH.date()).days


def _microseconds(value: Any) -> int:
    # pandas' NaT is a datetime that does not equal itself.
    if not isinstance(value, datetime.datetime) or value != value:
        raise TypeError("a datetime.datetime is needed")
    if value.tzinfo is None:
        value = value.replace(tzinfo=datetime.UTC)
    passed: datetime.timedelta = value - _EPOCH
    return passed // datetime.timedelta(microseconds=1)


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "boolean": _of(bool, "a bool"),
    "binary": _of(bytes, "bytes"),
    "date": _days,
    "timestamp": _microseconds,
    "timestamp_ntz": _microseconds,
    **dict.fromkeys(_TEXTS, _of(str, "a str")),
}


def quoted(name: str) -> str:
    """Return a column's name as Spark takes it, dots and backticks included.

    Args:
        name: the name in the DataFrame.
    """
    return "`" + name.replace("`", "``") + "`"
