"""File listing of a Spark read, each file with the values of its directories.

Covers: paths in Spark's sense, `key=value` directories, the sample of files.
Does not: read records.
Runs in: a Python process on the driver's host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from feeding.errors import FeedSettingsError
from feeding.filesystem.hdfs.hadoop_conf import (
    configuration_directory,
    read_configuration,
    user_name,
)
from feeding.filesystem.location import HADOOP, LOCAL, parse
from feeding.filesystem.registry import filesystem_for
from feeding.reading.discover import data_files, is_plain, named_once
from feeding.reading.partition_paths import Kind, partition_kinds, partition_values
from feeding.reading.splits import SourceFile
from tfos.datasource.options import TFRecordOptions
from tfos.files.paths import absolute_path, two_slashes


@dataclass(frozen=True, slots=True)
class Listing:
    """Files, sorted by path, and the values of their directories."""

    files: Sequence[SourceFile]
    values: Sequence[dict[str, str | None]]
    """Directory values of each file."""
    kinds: dict[str, Kind]
    """The partition columns, by name."""

    def sample(self, count: int) -> list[SourceFile]:
        """Return `count` files that are not empty, spread over the list, including the first."""
        full = [file for file in self.files if file.size_bytes]
        count = min(count, len(full))
        return [full[index * len(full) // count] for index in range(count)]


def complete_path(path: str) -> str:
    """Return a path as Spark resolves it, complete, so that it is the same on every host.

    A path without a scheme is on `fs.defaultFS` of HADOOP_CONF_DIR, else on this host.

    Raises:
        FeedSettingsError: the path has a scheme without the host that it needs.
    """
    settings = read_configuration(configuration_directory(os.environ))
    return path_on(path, settings.get("fs.defaultFS", "file:///"), user_name(os.environ))


def path_on(path: str, default_fs: str, user: str = "") -> str:
    """Return a path as listings name it, without a scheme on `default_fs`.

    Args:
        path: as the user wrote it.
        default_fs: Spark's default file system, as a URL.
        user: user whose home has the relative paths; "": none.

    Raises:
        FeedSettingsError: the path has a scheme, but no host where one is needed.
    """
    path = two_slashes(path)
    if default_fs.startswith("file:") and "://" not in path:
        path = f"file://{os.path.abspath(path)}"
    whole = absolute_path(path, default_fs=default_fs, working_dir=os.getcwd(), user=user)
    scheme, separator, rest = whole.partition("://")
    if scheme.lower() in HADOOP | {LOCAL}:  # where two slashes are one
        rest = re.sub("/+", "/", rest)
    return f"{scheme}{separator}{rest}"


def list_files(options: TFRecordOptions, *, may_be_empty: bool = False) -> Listing:
    """Return the files below the paths of a read.

    Args:
        options: paths and basePath.
        may_be_empty: whether a directory without any data file is fine.

    Raises:
        FileNotFoundError: a path has no file.
        DataError: files lie below directories of different columns.
        FeedSettingsError: a path is not below basePath, or is given twice.
    """
    found: dict[str, tuple[SourceFile, dict[str, str | None]]] = {}
    for path in named_once(map(complete_path, options.paths)):
        base = _base(path, options.base_path)
        try:
            files = data_files(path, is_splittable=is_plain)
        except FileNotFoundError:
            if not (may_be_empty and filesystem_for(path).exists(path)):
                raise
            files = []
        for file in files:
            found[file.path] = (file, partition_values(file.path, base or file.base))
    pairs = [found[path] for path in sorted(found)]
    kinds = partition_kinds({file.path: values for file, values in pairs})
    return Listing([file for file, _ in pairs], [values for _, values in pairs], kinds)


def _base(path: str, said: str) -> str:
    """Return the basePath that a path lies below; "": none was given."""
    if not said:
        return ""
    location = parse(path)
    base = str(parse(complete_path(said)))
    if not f"{location}/".startswith(base.rstrip("/") + "/"):
        raise FeedSettingsError(f"{location} is not below basePath {base}")
    return base
