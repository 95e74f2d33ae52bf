"""Differences of two manifests as text. Pure.

Covers: the sentences of ManifestMismatch.      Does not: decide whether a difference matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from ps.manifest.manifest import GroupSpec, Manifest, TableSpec
from ps.manifest.rule_spec import Descent

MAX_SHOWN = 8
_FIELDS = ("consistency", "reduction", "staleness_bound", "staleness_aware", "bucket_bytes")


def manifest_differences(expected: Manifest, found: Manifest) -> tuple[str, ...]:
    """Return one short sentence per difference, the most important first, at most MAX_SHOWN.

    Args:
        expected: this side's.
        found: the other side's.
    """
    sentences = list(_differences(expected, found))
    if len(sentences) > MAX_SHOWN:
        left = len(sentences) - MAX_SHOWN
        sentences = [*sentences[:MAX_SHOWN], f"and {left} more"]
    return tuple(sentences)


def _differences(expected: Manifest, found: Manifest) -> Iterator[str]:
    ours = {group.name: group for group in expected.groups}
    theirs = {group.name: group for group in found.groups}
    yield from _names("group", ours.keys(), theirs.keys())
    for name in sorted(ours.keys() & theirs.keys()):
        yield from _group_differences(ours[name], theirs[name])
    tables = {table.name: table for table in expected.tables}
    others = {table.name: table for table in found.tables}
    yield from _names("table", tables.keys(), others.keys())
    for name in sorted(tables.keys() & others.keys()):
        yield from _table_differences(tables[name], others[name])
    for field in _FIELDS:
        one, other = getattr(expected, field), getattr(found, field)
        if one != other:
            yield f"{field}: expected {one!r}, found {other!r}"


def _group_differences(ours: GroupSpec, theirs: GroupSpec) -> Iterator[str]:
    where = f"group {ours.name!r}"
    if ours.dtype != theirs.dtype:
        yield f"{where}: expected dtype {ours.dtype}, found {theirs.dtype}"
    if ours.rule != theirs.rule:
        yield f"{where}: expected rule {_text(ours.rule)}, found {_text(theirs.rule)}"
    if ours.compression != theirs.compression:
        yield f"{where}: expected compression {ours.compression}, found {theirs.compression}"
    shapes = {param.name: param.shape for param in ours.params}
    found = {param.name: param.shape for param in theirs.params}
    yield from _names(f"{where}: parameter", shapes.keys(), found.keys())
    for name, shape in shapes.items():
        if name in found and found[name] != shape:
            yield f"{where}: {name!r} expected shape {shape}, found {found[name]}"
    if shapes == found and ours.params != theirs.params:
        pairs = zip(shapes, found, strict=True)
        one, other = next(pair for pair in pairs if pair[0] != pair[1])
        yield (
            f"{where}: the same parameters in another order, expected {one!r} where {other!r} was "
            "found"
        )


def _table_differences(ours: TableSpec, theirs: TableSpec) -> Iterator[str]:
    for field in TableSpec.__struct_fields__:
        one, other = getattr(ours, field), getattr(theirs, field)
        if one != other and field != "id_source":  # which no hash has
            yield f"table {ours.name!r}: expected {field} {_text(one)}, found {_text(other)}"


def _text(setting: Any) -> str:
    """Return a setting; a rule without the many settings that it does not use."""
    if not isinstance(setting, Descent):
        return repr(setting)
    values = ((name, getattr(setting, name)) for name in setting.__struct_fields__)
    used = ", ".join(f"{name}={value!r}" for name, value in values if value is not None)
    return f"{type(setting).__name__}({used})"


def _names(what: str, ours: Set[str], theirs: Set[str]) -> Iterator[str]:
    for name in sorted(ours - theirs):
        yield f"{what} {name!r} is missing"
    for name in sorted(theirs - ours):
        yield f"{what} {name!r} is unexpected"
