"""Partition columns: values in directory names of partitioned data, `day=2026-01-31/hour=3/part-0`.

Covers: PartitionColumn: its values by file and their type.
Does not: list files (reading.discover).
Threads: any; pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from feeding.columnar.schema import ColumnSpec

_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class PartitionColumn:
    """One key of the directory names.

    Args:
        name: the key.
        dtype: int64, if all values are integers, float64, if all are numbers, else text ("").
        values: by file; None for Spark's null.
    """

    name: str
    dtype: str
    values: Mapping[str, Any]

    @property
    def spec(self) -> ColumnSpec:
        """Spec of the column in batches."""
        if self.dtype:
            return ColumnSpec(self.name, "tensor", "scalar", self.dtype)
        return ColumnSpec(self.name, "str", "str")

    def repeated(self, path: str, num_rows: int, fill: Any) -> npt.NDArray[Any]:
        """Return a file's value for each of its rows, dtype[n] or object[n].

        Args:
            path: of the file.
            num_rows: n.
            fill: replaces Spark's null.
        """
        value = self.values[path]
        return np.full(num_rows, fill if value is None else value, self.dtype or object)


def partition_columns(paths: Sequence[str]) -> dict[str, PartitionColumn]:
    """Return the columns whose keys are in the directory names of all files, by name."""
    found = [_keys_of(path) for path in paths]
    names = [name for name in found[0] if all(name in keys for keys in found)] if found else []
    columns = {}
    for name in names:
        texts = {path: keys[name] for path, keys in zip(paths, found, strict=True)}
        dtype, convert = _type_of({text for text in texts.values() if text is not None})
        values = {path: None if text is None else convert(text) for path, text in texts.items()}
        columns[name] = PartitionColumn(name, dtype, values)
    return columns


def _keys_of(path: str) -> dict[str, str | None]:
    found = {}
    for part in path.split("/")[:-1]:
        key, is_pair, value = part.partition("=")
        if is_pair and key:
            found[unquote(key)] = None if value == _NULL else unquote(value)
    return found


def _type_of(texts: set[str]) -> tuple[str, type]:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            numbers = [kind(text) for text in texts if _is_plain(text)]
            if len(numbers) == len(texts) and all(abs(number) < 1 << 63 for number in numbers):
                return ("int64" if kind is int else "float64"), kind
    return "", str


def _is_plain(text: str) -> bool:
    """Return whether Spark also reads it as a number: no spaces, underscores or names."""
    return bool(text) and set(text) <= set("0123456789+-.eE")
