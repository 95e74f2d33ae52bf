"""Packages of fsspec that keep listings: what other processes write is seen."""

from __future__ import annotations

from typing import Any, ClassVar

import fsspec
import pytest

from feeding.errors import FileChanged
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.fsspec_files import FsspecFileSystem
from feeding.filesystem.location import parse
from feeding.formats.text.source import TextSource
from feeding.reading.splits import Split


class Listing(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """One directory of an object store that keeps its listing, and never forgets it."""

    protocol = "listing"
    stored: ClassVar[dict[str, bytes]] = {}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path in self.stored:
            path = self._parent(path)
        if path not in self.dircache:
            self.dircache[path] = self._listed()
        return self.dircache[path]

    def _listed(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "size": len(data), "type": "file"} for name, data in self.stored.items()
        ]

    def cat_file(self, path: str, start: int = 0, end: int | None = None, **_: Any) -> bytes:
        return self.stored[self._strip_protocol(path)][start:end]


class Private(Listing):
    """Keeps its listing at a place of its own."""

    protocol = "private"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._kept: list[dict[str, Any]] = []

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self._kept = self._kept or self._listed()
        return self._kept

    def invalidate_cache(self, path: str | None = None) -> None:
        self._kept = []


@pytest.fixture(params=[Listing, Private])
def scheme(request, monkeypatch):
    kind = request.param
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
    monkeypatch.setattr(kind, "stored", {"bucket/a": b"one\n"})
    return kind.protocol


def test_what_others_write_is_seen(scheme):
    root = f"{scheme}://bucket"
    files = FsspecFileSystem(parse(root), FileSystemConfig())
    stored = fsspec.get_filesystem_class(scheme).stored
    assert [each.size_bytes for each in files.entries(root)] == [4]
    stored["bucket/a"] = b"one\ntwo\n"
    stored["bucket/b"] = b""
    assert [each.size_bytes for each in files.entries(root)] == [8, 0]
    stored["bucket/a"] = b"o\n"
    assert files.status(f"{root}/a").size_bytes == 2
    assert files.open(f"{root}/a").size_bytes == 2


def test_a_file_that_changed_after_it_was_listed_is_refused(scheme):
    source = TextSource(f"{scheme}://bucket/a")
    fsspec.get_filesystem_class(scheme).stored["bucket/a"] = b"one\ntwo\n"
    with pytest.raises(FileChanged, match="had 4 bytes when it was listed, now 8"):
        list(source.read(Split(f"{scheme}://bucket/a", 0, 4)))
