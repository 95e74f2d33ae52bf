"""Options of the format "tfrecord": names, allowed values, defaults.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from feeding.config import MIB
from feeding.errors import FeedSettingsError
from feeding.reading.bad_records import BadData

RecordType = Literal["Example", "ByteArray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TFRecordOptions:
    """Options of one read or write."""

    paths: tuple[str, ...]
    """Paths as the user gave them; a write has one."""
    record_type: RecordType = "Example"
    """Form of a record; ByteArray: the raw record in one binary column."""
    gzip: bool = False
    """Whether to write compressed files; a read detects it per file."""
    partition_by: tuple[str, ...] = ()
    """Columns that become `key=value` directories of a write."""
    if_exists: Literal["append", "error"] = "append"
    """Behaviour of a write in Spark's mode "append" if the directory has files."""
    base_path: str = ""
    """Directory where `key=value` directories begin; empty: each path that is read."""
    drop_malformed: bool = False
    """Whether damaged records are left out instead of failing the read."""
    max_skipped: int = 100
    """Damaged records that one task may leave out."""
    sample_files: int = 8
    """Number of files in the sample for schema inference, spread over the list."""
    sample_records: int = 256
    """Number of records of each file in the sample."""
    binary_features: frozenset[str] = field(default_factory=frozenset)
    """Bytes features to infer as binary even if they look like text."""
    partition_bytes: int = 32 * MIB
    """Bytes of files that one task of a read gets."""

    def bad_data(self) -> BadData:
        """Return a new policy for damaged records; one for each task."""
        return BadData("skip", self.max_skipped) if self.drop_malformed else BadData()


def parse_options(given: Mapping[str, str]) -> TFRecordOptions:
    """Return the options that Spark collected from a user; names are case-insensitive.

    Raises:
        FeedSettingsError: an unknown option, or an invalid value.
    """
    found: dict[str, Any] = {"paths": _paths(given)}
    for name, value in given.items():
        if name.lower() in ("path", "paths"):
            continue
        option = _OPTIONS.get(name.lower())
        if option is None:
            known = ", ".join(sorted(spelling for _, _, spelling in _OPTIONS.values()))
            raise FeedSettingsError(f"tfrecord has no option {name!r}; it has {known}")
        field_name, read, spelling = option
        try:
            found[field_name] = read(value)
        except ValueError as error:
            raise FeedSettingsError(f"option {spelling} is {value!r}; it must be {error}") from None
    return TFRecordOptions(**found)


def _paths(given: Mapping[str, str]) -> tuple[str, ...]:
    lowered = {name.lower(): value for name, value in given.items()}
    paths = [lowered["path"]] if lowered.get("path") else []
    paths += json.loads(lowered.get("paths", "[]"))
    if not paths:
        raise FeedSettingsError("no path was given; call load(path) or save(path)")
    return tuple(paths)


def _one_of(**spellings: Any) -> Callable[[str], Any]:
    def read(value: str) -> Any:
        if value.lower() not in spellings:
            raise ValueError(f"one of {', '.join(spellings)}")
        return spellings[value.lower()]

    return read


def _count(value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"a number >= {least}")
    return int(value)


def _names(value: str) -> tuple[str, ...]:
    names: Sequence[Any] = json.loads(value) if value.startswith("[") else value.split(",")
    found = tuple(str(name).strip() for name in names)
    if not all(found) or len(set(found)) < len(found):
        raise ValueError("names of different columns, with commas between them")
    return found


def _record_type(value: str) -> RecordType:
    if value.lower() == "example":
        return "Example"
    if value.lower() == "bytearray":
        return "ByteArray"
    raise ValueError(
        "Example or ByteArray; read SequenceExample as ByteArray and decode it yourself"
    )


def _compression(value: str) -> bool:
    kind = value.rpartition(".")[2].lower().removesuffix("codec")  # Hadoop's name of a class
    if kind not in ("", "none", "uncompressed", "gzip"):
        raise ValueError("gzip or none")
    return kind == "gzip"


_MODE = _one_of(failfast=False, dropmalformed=True)
_OPTIONS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    spelling.lower(): (field_name, read, spelling)
    for spelling, field_name, read in (
        ("recordType", "record_type", _record_type),
        ("compression", "gzip", _compression),
        ("codec", "gzip", _compression),
        ("partitionBy", "partition_by", _names),
        ("ifExists", "if_exists", _one_of(append="append", error="error")),
        ("basePath", "base_path", str),
        ("mode", "drop_malformed", _MODE),
        ("maxSkipped", "max_skipped", lambda value: _count(value, 0)),
        ("sampleFiles", "sample_files", lambda value: _count(value, 1)),
        ("sampleRecords", "sample_records", lambda value: _count(value, 1)),
        ("binaryFeatures", "binary_features", lambda value: frozenset(_names(value))),
        ("maxPartitionBytes", "partition_bytes", lambda value: _count(value, 1)),
    )
}
"""Field, reader and spelling of each option, by lower-case name."""
