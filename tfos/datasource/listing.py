"""The files that a read of Spark is about, each with the values of its directories.

Covers: paths as Spark means them, `key=value` directories, which files are looked at as a sample.
Does not: read records.
Runs in: a Python process on the driver's host.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from feeding.data_files import data_files, is_plain
from feeding.errors import SettingsError
from feeding.filesystem.choose import filesystem_for
from feeding.filesystem.hadoop_conf import (
    configuration_directory,
    read_configuration,
    user_name,
)
from feeding.filesystem.location import parse
from feeding.splits import SourceFile
from tfos.datasource.options import TFRecordOptions
from tfos.datasource.partition_paths import Kind, partition_kinds, partition_values
from tfos.paths import absolute_path

_MAGIC = frozenset("*?[{")


@dataclass(frozen=True, slots=True)
class Listing:
    """Files, sorted by path, and what their directories say."""

    files: Sequence[SourceFile]
    values: Sequence[dict[str, str | None]]
    """Of each file."""
    kinds: dict[str, Kind]
    """The partition columns, by name."""

    def sample(self, count: int) -> list[SourceFile]:
        """Return some files that are not empty, from all over the list, the first among them."""
        full = [file for file in self.files if file.size_bytes]
        count = min(count, len(full))
        return [full[index * len(full) // count] for index in range(count)]


def complete_path(path: str) -> str:
    """Return a path as Spark would mean it, with what makes it the same on every host.

    Without a scheme it is on `fs.defaultFS` of HADOOP_CONF_DIR, else on this host.
    """
    settings = read_configuration(configuration_directory(os.environ))
    default_fs = settings.get("fs.defaultFS", "file:///")
    user = user_name(os.environ)
    return absolute_path(path, default_fs=default_fs, working_dir=os.getcwd(), user=user)


def list_files(options: TFRecordOptions, *, may_be_empty: bool = False) -> Listing:
    """Return the files below the paths of a read.

    Args:
        options: paths and basePath.
        may_be_empty: whether a directory without any data file is fine.

    Raises:
        FileNotFoundError: a path has no file.
        DataError: files lie below directories of different columns.
        SettingsError: a path is not below basePath.
    """
    found: dict[str, tuple[SourceFile, dict[str, str | None]]] = {}
    for path in map(complete_path, options.paths):
        base = _base(path, options.base_path)
        try:
            files = data_files(path, can_be_cut=is_plain)
        except FileNotFoundError:
            if not (may_be_empty and filesystem_for(path).exists(path)):
                raise
            files = []
        for file in files:
            found[file.path] = (file, partition_values(file.path, base))
    pairs = [found[path] for path in sorted(found)]
    kinds = partition_kinds({file.path: values for file, values in pairs})
    return Listing([file for file, _ in pairs], [values for _, values in pairs], kinds)


def _base(path: str, said: str) -> str:
    location = parse(path)
    if said:
        base = str(parse(complete_path(said)))
        if not f"{location}/".startswith(base.rstrip("/") + "/"):
            raise SettingsError(f"{location} is not below basePath {base}")
        return base
    parts = location.path.split("/")
    fixed = next((n for n, part in enumerate(parts) if _MAGIC & set(part)), len(parts))
    return str(location.at("/".join(parts[:fixed]) or "/"))
