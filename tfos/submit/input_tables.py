"""The tables [inputs] and [output] of a job file.

Covers: the short and the long form of an input, the refusal of anything else by the key's name.
Does not: list or copy files (tfos.files.worker_files).      Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from tfos.errors import SettingsError
from tfos.files.inputs import NAME, Access, InputFiles, Share

PLACE = "a URL, or an absolute path on Spark's default file system"
_PLACE = re.compile(r"(/|[A-Za-z][A-Za-z0-9+.-]*://).*")
_FIELDS = ("path", "mode", "share")


def place(value: Any) -> str | None:
    """Return a directory or file that every host finds; None if it is refused."""
    is_text = isinstance(value, str) and "\0" not in value
    return value if is_text and _PLACE.fullmatch(value) else None


def inputs(table: object) -> tuple[InputFiles, ...]:
    """Return the inputs of the table.

    Args:
        table: `inputs` of the file.

    Raises:
        SettingsError: names the key, its value and what is allowed.
    """
    if not isinstance(table, Mapping):
        raise SettingsError(f"inputs = {table!r}: allowed is a table [inputs].")
    return tuple(_input(name, value) for name, value in table.items())


def _input(name: str, value: object) -> InputFiles:
    key = f"inputs.{name}"
    if not NAME.fullmatch(name):
        raise SettingsError(f"{key}: an input's name has letters, digits, _ and - only.")
    fields = value if isinstance(value, Mapping) else {"path": value}
    if "path" not in fields:
        raise SettingsError(f"{key}.path is missing: {PLACE}.")
    return InputFiles(name=name, **dict(_checked(key, fields)))


def _checked(key: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for field, value in fields.items():
        if field not in _FIELDS:
            near = difflib.get_close_matches(field, _FIELDS, n=1) or [", ".join(_FIELDS)]
            raise SettingsError(f"unknown key {key}.{field}; did you mean {near[0]}?")
        if field == "path":
            allowed, is_allowed = PLACE, place(value) is not None
        else:
            names = get_args(Access if field == "mode" else Share)
            allowed, is_allowed = " or ".join(map(repr, names)), value in names
        if not is_allowed:
            raise SettingsError(f"{key}.{field} = {value!r}: allowed is {allowed}.")
        yield field, value
