"""Check record of an index: which files were compared with their digests, once per boot of a host.

    CACHE/index-KEY/checked.json   `CheckRecord`, written after the comparison

All processes of a host that open an index trust the record of the first one that read it, unless
the kernel reports a later write to the files. Decision 064 states what that misses.

Covers: writing the record, and whether a record is valid.
Does not: read an index or compare digests (tfos.serving.index_files).
Threads: any; any number of processes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from ps import codec
from rpc.endpoint import boot_id
from rpc.errors import UNREADABLE

RECORD = "checked.json"
TICK_NS = 20_000_000
"""Twice the longest tick of Linux' file clock: a younger file may still be written to without
a new timestamp."""


class _File(msgspec.Struct, frozen=True, array_like=True):
    """The file system's metadata of a file; any write to it changes `ctime_ns`."""

    name: str
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def at(cls, path: Path) -> Self:
        found = path.stat()
        return cls(path.name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class CheckRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `checked.json`: these files had the digests of this manifest."""

    boot: str
    """The kernel's boot id: after a power loss, the disk may lack what was in memory."""
    manifest: str
    """Digest of the index's manifest."""
    files: tuple[_File, ...]

    @classmethod
    def of(cls, manifest: str, paths: Sequence[Path], now_ns: int) -> Self | None:
        """Return the record of files in their current state; None: they are too young to tell.

        Args:
            manifest: digest of the index's manifest.
            paths: paths of the files, which exist.
            now_ns: an earlier time, by the file clock.
        """
        files = tuple(map(_File.at, paths))
        if any(file.ctime_ns > now_ns - TICK_NS for file in files):
            return None
        return cls(boot=boot_id(), manifest=manifest, files=files)

    def is_at(self, directory: Path) -> bool:
        """Return whether an index has exactly this record.

        Args:
            directory: directory of the index.
        """
        try:
            return codec.json((directory / RECORD).read_bytes(), CheckRecord) == self
        except (OSError, *UNREADABLE):
            return False

    def write(self, directory: Path) -> None:
        """Put the record beside an index; a failed write is ignored.

        Args:
            directory: directory of the index.
        """
        with suppress(OSError):
            descriptor, staged = tempfile.mkstemp(prefix=f".{RECORD}.", dir=directory)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(msgspec.json.encode(self))
                Path(staged).replace(directory / RECORD)
            except OSError:
                Path(staged).unlink()
                raise
