"""Rules of what is packed: which files of the standard library and of the packages stay behind.

Covers: the rules, walking a directory by them, links.
Does not: find the directories (tfos.pack.python_home), read a file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tfos.errors import UnsupportedError

OF_STDLIB = (
    *("site-packages", "dist-packages"),  # the base's packages are not this environment's
    *("test", "*/tests", "*/test", "lib-dynload/_test*", "lib-dynload/_ctypes_test*"),
    *("lib-dynload/xx*", "idlelib", "turtledemo", "tkinter", "lib-dynload/_tkinter.*"),
    *("ensurepip", "config-*", "EXTERNALLY-MANAGED"),
)
"""Python's own tests, what opens windows, and what builds or installs packages."""
OF_PACKAGES = (
    *("tests", "*/tests", "*/include", "*.a"),
    *("pip", "pip-*.dist-info"),
    *("__editable__*", "*.dist-info/direct_url.json"),
    "pyspark/jars",  # the cluster has Spark's Java
)
"""Tests, headers and static libraries, the installer, traces of this host, Spark's jars."""
CACHE = "__pycache__"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or link of the archive."""

    name: str
    """Path inside the archive."""
    source: Path | None = None
    """File that has the bytes; None: a link."""
    link: str = ""
    """What a link leads to, relative to its own directory."""
    is_executable: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """Patterns of paths below one directory; `*` matches slashes, too."""

    left_out: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """Patterns that override `left_out`."""
    needed: frozenset[str] = frozenset()
    """Paths of modules that a node imports, which `left_out` leaves where they are."""
    unwanted: tuple[str, ...] = ()
    """Patterns that the user leaves out, whatever imports them: half a package would be worse."""

    def leave_out(self, name: str) -> bool:
        """Say whether a file or directory, with all below it, stays behind."""
        if name.rpartition("/")[2] == CACHE:
            return True
        if _matches(name, self.kept):
            return False
        if _matches(name, self.unwanted):
            return True
        if not _matches(name, self.left_out):
            return False
        return not any(each == name or each.startswith(f"{name}/") for each in self.needed)

    def given_up(self) -> list[str]:
        """Return the names of packages and modules of `needed` that stay behind."""
        gone = (name for name in self.needed if any(map(self.leave_out, _with_parents(name))))
        return sorted({name.partition("/")[0].removesuffix(".py") for name in gone})


def files_below(root: Path, at: str, rules: Rules, inside: str = "") -> Iterator[Entry]:
    """Yield what is packed of a directory, sorted by path.

    Args:
        root: the directory.
        at: where it is in the archive.
        rules: what stays behind.
        inside: directory below `root` to begin with; empty: `root` itself.

    Raises:
        UnsupportedError: a link to a directory elsewhere.
    """
    for found in sorted(os.scandir(root / inside), key=lambda each: each.name):
        name = f"{inside}/{found.name}" if inside else found.name
        if rules.leave_out(name):
            continue
        path = Path(found.path)
        if found.is_symlink() and (link := _link_inside(root, path)):
            yield Entry(f"{at}/{name}", link=link)
        elif found.is_symlink() and found.is_dir():
            raise UnsupportedError(
                f"{path} is a link to the directory {path.resolve()}, outside of {root}: put a "
                "copy of it there, or leave it out with --leave-out"
            )
        elif found.is_dir():
            yield from files_below(root, at, rules, name)
        elif found.is_file():  # no socket, no link to nothing
            is_executable = bool(found.stat().st_mode & 0o100)
            yield Entry(f"{at}/{name}", path, is_executable=is_executable)


def unmatched(patterns: Collection[str], roots: Collection[Path]) -> list[str]:
    """Return the patterns that match no file and no directory, and so change nothing.

    Args:
        patterns: patterns of paths below the directories.
        roots: the directories.
    """
    names = {
        (Path(directory) / name).relative_to(root).as_posix()
        for root in roots
        for directory, below, files in os.walk(root)
        for name in (*below, *files)
    }
    return [each for each in patterns if not any(fnmatchcase(name, each) for name in names)]


def _link_inside(root: Path, path: Path) -> str:
    """Return what a link to a place below `root` leads to, relative to the link; else nothing."""
    target = Path(path.parent, os.readlink(path))
    resolved = os.path.normpath(target)
    if not target.exists() or not Path(resolved).is_relative_to(root):
        return ""
    return os.path.relpath(resolved, path.parent)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split("/")
    return ("/".join(parts[: count + 1]) for count in range(len(parts)))


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
