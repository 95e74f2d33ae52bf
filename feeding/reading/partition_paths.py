"""Partition paths (`key=value` directories): names that stay inside the root, and values back.

Covers: escaping as Spark and Hive do (pyarrow's escapes are read, too); Spark's types of values.
Does not: list directories (discover), make columns of batches (partitions).
Threads: any; pure.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import unquote

from feeding.errors import DataError, RowError
from feeding.filesystem.location import MAX_NAME_BYTES, shown

NULL_NAME = "__HIVE_DEFAULT_PARTITION__"
"""Directory value of null and the empty string."""
_ESCAPED = frozenset("\"#%'*/:=?\\{[]^\x7f") | {chr(code) for code in range(1, 32)}
_INT32, _INT64 = 2**31, 2**63

Kind = Literal["int", "bigint", "number", "date", "string"]
"""Spark's types; "number": any number, as float64."""
_INFERRED: tuple[Kind, ...] = ("int", "bigint", "date")


def directory_name(column: str, value: Any) -> str:
    """Return the path component for a value of a partition column.

    Args:
        column: name of the partition column.
        value: as Python has it; None: null.

    Raises:
        RowError: the name would exceed the limit of file systems, or contains a NUL.
    """
    text = "" if value is None else _text(value)
    name = f"{_escape(column)}={_escape(text) if text else NULL_NAME}"
    if "\0" in name:
        raise RowError(
            f"partition column {column!r} holds {shown(text)}: a directory name has no NUL"
        )
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise RowError(
            f"partition column {column!r} holds {shown(text)}, whose directory name has more than "
            f"{MAX_NAME_BYTES} bytes"
        )
    return name


def partition_values(path: str, base: str) -> dict[str, str | None]:
    """Return the values of the directories between a base and a file, in order.

    Args:
        path: path of the file.
        base: directory that was read.
    """
    found: dict[str, str | None] = {}
    above = "" if base == "." else base.rstrip("/") + "/"
    if not path.startswith(above):
        return found
    for part in path.removeprefix(above).split("/")[:-1]:
        column, equals, value = part.partition("=")
        if equals and column:
            found[unquote(column)] = None if value == NULL_NAME else unquote(value)
    return found


def partition_kinds(files: Mapping[str, Mapping[str, str | None]]) -> dict[str, Kind]:
    """Return the partition columns of files, and the common type of each column's values.

    Args:
        files: by path, its values (see partition_values).

    Raises:
        DataError: files lie below directories of different columns.
    """
    first, columns = "", None
    for path, values in files.items():
        if columns is None:
            first, columns = path, list(values)
        elif list(values) != columns:
            raise DataError(
                f"{first} has the partition columns {columns}, {path} has {list(values)}; read "
                "them separately, or set basePath"
            )
    return {
        column: first_kind((values[column] for values in files.values()), _INFERRED)
        for column in columns or ()
    }


def partition_value(column: str, text: str | None, kind: str) -> Any:
    """Return the value of a directory as a type that Spark calls `kind`.

    Args:
        column: name of the partition column, for messages.
        text: from the directory's name; None: null.
        kind: Spark's simple name of the type, for example "bigint".

    Raises:
        DataError: it is no such value.
    """
    if text is None:
        return None
    try:
        return _READERS[kind](text)
    except (KeyError, ValueError):
        raise DataError(
            f"the directory {column}={shown(text)} cannot be read as {kind}; read the column as "
            "string"
        ) from None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, datetime.date) else str(value)


def _escape(text: str) -> str:
    return "".join(f"%{ord(letter):02X}" if letter in _ESCAPED else letter for letter in text)


def first_kind(texts: Iterable[str | None], kinds: Sequence[Kind]) -> Kind:
    """Return the first kind as which all values of directories can be read, or "string".

    Args:
        texts: from the directories' names; None: null.
        kinds: to try, in this order.
    """
    said = [text for text in texts if text is not None]
    return next((kind for kind in kinds if said and _all_read_as(kind, said)), "string")


def _all_read_as(kind: Kind, texts: Sequence[str]) -> bool:
    try:
        for text in texts:
            (_number if kind == "number" else _READERS[kind])(text)
    except ValueError:
        return False
    return True


def _number(text: str) -> float:
    """Read what Spark also reads as a number: no spaces, underscores or names."""
    if re.fullmatch("[+-]?[0-9]+", text):
        return float(_integer(text, _INT64))  # a float would round a larger one
    found = float(text)
    if set(text) <= set("0123456789+-.eE") and math.isfinite(found):
        return found
    raise ValueError(text)


def _integer(text: str, bound: int) -> int:
    if not re.fullmatch("[+-]?[0-9]+", text) or not -bound <= int(text) < bound:
        raise ValueError(text)
    return int(text)


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _date(text: str) -> datetime.date:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        raise ValueError(text)
    return datetime.date.fromisoformat(text)


_READERS: dict[str, Any] = {
    "tinyint": lambda text: _integer(text, 2**7),
    "smallint": lambda text: _integer(text, 2**15),
    "int": lambda text: _integer(text, _INT32),
    "bigint": lambda text: _integer(text, _INT64),
    "boolean": _boolean,
    "date": _date,
    "float": float,
    "double": float,
    "string": str,
}
"""By Spark's name of a type."""
READABLE_KINDS = frozenset(_READERS)
WRITABLE_KINDS = READABLE_KINDS - {"float", "double"}
