"""Inputs: named data files of a job, of which each worker has its share or all.

Covers: InputFiles and its checks, which files are a worker's.
Does not: list or copy files (tfos.files.worker_files), read rows (`ctx.read` does).
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, get_args

from rpc.field_texts import with_field_texts
from tfos.errors import SettingsError
from tfos.files import paths

Access: TypeAlias = Literal["list", "download"]
Share: TypeAlias = Literal["part", "all"]
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
Item = TypeVar("Item")


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class InputFiles:
    """`ClusterConfig(inputs=(InputFiles(name="train", path="hdfs:///data"),))`: data files."""

    name: str
    """Key of `ctx.inputs`: letters, digits, _ and -."""
    path: str
    """A file, directory or pattern, with a scheme or on Spark's default file system. In directories
    names that begin with _ or . or end with ._COPYING_ do not count."""
    mode: Access = "list"
    """`list`: a worker has the files' paths. `download`: it has local copies, made when main_fun
    first asks for them and removed when the node ends."""
    share: Share = "part"
    """`part`: each file is one worker's, in turns in the order of their paths. `all`: each worker
    has all of them."""

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise SettingsError(
                f"an input's name must be letters, digits, _ and -, got {self.name!r}."
            )
        path: object = self.path
        if not isinstance(path, str) or not path:
            raise SettingsError(
                f"path of input {self.name!r} must be a path or URL, got {self.path!r}."
            )
        paths.user_location(self.path, f"input {self.name!r}")
        for field, allowed in (("mode", Access), ("share", Share)):
            value = getattr(self, field)
            if value not in get_args(allowed):
                names = " or ".join(map(repr, get_args(allowed)))
                raise SettingsError(
                    f"{field} of input {self.name!r} must be {names}, got {value!r}."
                )

    def share_of(self, files: Sequence[Item], rank: int, num_workers: int) -> list[Item]:
        """Return the files of a worker.

        Args:
            files: all files, in the same order for every worker.
            rank: the worker's rank.
            num_workers: number of workers that train together.
        """
        return list(files) if self.share == "all" else list(files[rank::num_workers])


def check_names(inputs: Sequence[InputFiles]) -> None:
    """Refuse two inputs of one name."""
    names = [each.name for each in inputs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(f"inputs has the name {twice[0]!r} twice: give each its own name.")
