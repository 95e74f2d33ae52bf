"""Types of a manifest's fields: what a server would refuse is refused where it is written.

Covers: the check of a record's values against its annotations, by the rules of decoding; the text
of its error.
Does not: check ranges (the records do).      Pure.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from ps.errors import PSSettingsError


def check_types(record: msgspec.Struct, owner: str) -> None:
    """Refuse a value that no other process could read.

    Args:
        record: a record of the manifest.
        owner: whose settings these are, for the error.

    Raises:
        PSSettingsError: names the field, its value and what is allowed.
    """
    for name, kind in _kinds(type(record)):
        value = getattr(record, name)
        if _fits(value, kind):
            continue
        advice = ""
        if type(value).__module__ == "numpy":
            advice = "; pass x.tolist(), which is of Python's own types"
        raise PSSettingsError(
            f"{owner}: {name} must be {_allowed(kind)}, got {value!r} "
            f"({type(value).__name__}){advice}"
        )


@functools.cache
def _kinds(record: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    """Return the names and types of a record's fields, which msgspec evaluates at each call."""
    return tuple((field.name, field.type) for field in msgspec.structs.fields(record))


def _fits(value: object, kind: Any) -> bool:
    try:
        msgspec.to_builtins(value)  # refuses what cannot be written: numpy's str is a str, too
        read = msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError):
        return False
    return read is value or not isinstance(read, msgspec.Struct)  # a dict would become a struct


def _allowed(kind: Any) -> str:
    """Return what a field's type allows, in words."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return " or ".join(_name(part) for part in parts)


def _name(kind: Any) -> str:
    if kind is types.NoneType:
        return "None"
    return str(kind) if get_args(kind) else str(kind.__name__)
