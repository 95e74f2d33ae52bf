"""Host paths: files of this host by names that are equal on every host that has a copy of them.

SparkFiles, archives of YARN and local copies have a directory of their own on each executor.

Covers: the common directory of a data set, and its absolute paths without it.
Does not: change URLs, or paths relative to a process's directory: they are equal already.
Threads: any; pure.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

from feeding.reading.splits import SourceFile


def without_directory(files: Iterable[SourceFile]) -> list[SourceFile]:
    """Return files by path, those of this host below the directory that they have in common.

    The order is that of the given paths, in which workers share them. Files of this host lose their
    versions: of a copy it is the time of copying.

    Args:
        files: all files of one data set.
    """
    in_order = [
        each if "://" in each.path else dataclasses.replace(each, version="")
        for each in sorted(files)
    ]
    directory = common_directory(in_order)
    return [dataclasses.replace(each, path=below(directory, each.path)) for each in in_order]


def common_directory(files: Iterable[SourceFile]) -> str:
    """Return the directory that all files of this host have in common; empty: there are none.

    Args:
        files: all files of one data set.
    """
    directories = {os.path.dirname(each.path) for each in files if os.path.isabs(each.path)}
    if not directories:
        return ""
    common = os.path.commonpath(directories)
    while "=" in os.path.basename(common):  # a value of a partition tells files apart
        common = os.path.dirname(common)
    return common


def below(directory: str, path: str) -> str:
    """Return a file's name that is equal on every host.

    Args:
        directory: the `common_directory` of its data set.
        path: path of the file.
    """
    return os.path.relpath(path, directory) if os.path.isabs(path) else path
