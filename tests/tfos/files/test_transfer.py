"""Directories that are sent and fetched: whole, in place of the old one, and never elsewhere."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from feeding.errors import PathError
from feeding.filesystem.interface import FileStatus
from feeding.filesystem.local import LocalFileSystem
from feeding.filesystem.location import parse
from feeding.filesystem.registry import filesystem_for
from feeding.filesystem.walking import walk
from tests.support.full_disk import file_limit
from tests.support.hostile_names import NAMES_THAT_LEAD_ASTRAY
from tfos.files import transfer
from tfos.files.export_target import refuse_other_content
from tfos.files.transfer import download, file_pieces, upload


def tree(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else b"/"
        for path in root.rglob("*")
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    (root / "variables").mkdir(parents=True)
    (root / "assets").mkdir()
    (root / "saved_model.pb").write_bytes(b"graph")
    (root / "variables" / "data").write_bytes(b"values")
    return root


def test_a_directory_goes_there_and_back_and_replaces_the_old_one(model, tmp_path):
    target = parse(str(tmp_path / "out" / "served"))
    Path(target.path).mkdir(parents=True)
    (Path(target.path) / "old").write_text("old")
    upload(model, target)
    assert tree(tmp_path / "out" / "served") == tree(model)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["served"]
    download(target, tmp_path / "back")
    assert tree(tmp_path / "back") == tree(model)


def test_of_two_writers_that_replace_a_directory_the_slower_one_leaves_nothing(
    model, tmp_path, monkeypatch
):
    target = tmp_path / "out" / "served"
    upload(model, parse(str(target)))
    rename, calls = LocalFileSystem.rename, []

    def overtaken(fs: LocalFileSystem, *args: str, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 2:  # the old one is aside
            target.mkdir()
            (target / "saved_model.pb").write_bytes(b"of another writer")
        rename(fs, *args, **options)

    monkeypatch.setattr(LocalFileSystem, "rename", overtaken)
    with pytest.raises(FileExistsError, match="it exists"):
        upload(model, parse(str(target)))
    assert tree(target) == {"saved_model.pb": b"of another writer"}
    assert [path.name for path in target.parent.iterdir()] == ["served"]


@pytest.mark.fault("F40")
@pytest.mark.parametrize("refused", [1, 2])
def test_a_directory_that_cannot_be_replaced_stays(model, tmp_path, monkeypatch, refused):
    target = tmp_path / "out" / "served"
    upload(model, parse(str(target)))
    before = tree(target)
    (model / "saved_model.pb").write_bytes(b"another")
    rename, calls = LocalFileSystem.rename, []

    def refuse(fs: LocalFileSystem, *args: str, **options: Any) -> None:
        calls.append(args)
        if len(calls) == refused:
            raise OSError("the NameNode is away")
        rename(fs, *args, **options)

    monkeypatch.setattr(LocalFileSystem, "rename", refuse)
    with pytest.raises(OSError, match="the NameNode is away"):
        upload(model, parse(str(target)))
    assert tree(target) == before
    assert [path.name for path in target.parent.iterdir()] == ["served"]


def test_the_file_that_a_full_disk_does_not_take_is_named(tmp_path):
    original = parse(f"memory://transfers/{secrets.token_hex(4)}")
    filesystem_for(str(original)).write(str(original), bytes(5000))
    here, copy = filesystem_for(str(tmp_path)), tmp_path / "copy"
    with file_limit(4096):
        with pytest.raises(OSError, match=f"'{copy}'"):
            download(original, copy)
        with pytest.raises(OSError, match=f"'{tmp_path}/written'"):
            here.write(f"{tmp_path}/written", bytes(5000))
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.attack("A18")
def test_what_is_no_regular_file_is_not_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            list(file_pieces(path, limit_bytes=4))


def test_of_a_file_that_grows_is_read_what_it_was(tmp_path, monkeypatch):
    """A log that is written faster than it is sent would never end."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", 4)
    log = tmp_path / "log"
    log.write_bytes(b"0123456789")
    assert list(file_pieces(log, limit_bytes=6)) == [b"0123", b"45"]
    pieces = file_pieces(log)
    found = [next(pieces)]
    with log.open("ab") as file:
        file.write(b"more")
    assert [*found, *pieces] == [b"0123", b"4567", b"89"]


@pytest.mark.attack("A18")
def test_names_that_lead_astray_are_neither_sent_nor_fetched(tmp_path):
    made = 0
    for number, name in enumerate(NAMES_THAT_LEAD_ASTRAY):
        hostile = tmp_path / f"hostile-{number}"
        hostile.mkdir()
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            continue  # no name on this disk
        try:
            (hostile / name).write_text("hostile")
        except (OSError, UnicodeEncodeError):
            continue
        made += 1
        copy = tmp_path / "copy"
        source, target = parse(str(hostile)), parse(str(copy))
        for move in (partial(upload, hostile, target), partial(download, source, copy)):
            with pytest.raises(PathError) as refused:
                move()
            assert str(refused.value).isascii()
            assert str(refused.value).isprintable()
        assert list(copy.rglob("*")) == []
        copy.rmdir()
    assert made >= 20
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("hostile-")]


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        list(file_pieces(tmp_path / "link"))


def at_copy(monkeypatch: pytest.MonkeyPatch, look: Callable[[str], None]) -> None:
    """Look before each file that a store without a rename copies to its name."""
    real = MemoryFileSystem.cp_file

    def copy(fs: MemoryFileSystem, source: str, target: str, **options: Any) -> None:
        look(target)
        real(fs, source, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "cp_file", copy)


def test_a_store_without_renames_shows_the_last_file_last(model, tmp_path, monkeypatch):
    """A reader takes the directory for whole once this file is there."""
    place = f"memory://{secrets.token_hex(4)}/served"
    target, files = parse(place), filesystem_for(place)
    (model / "assets" / "words").write_bytes(b"of the first")
    seen: list[dict[str, bytes]] = []

    def look(_: str) -> None:
        if files.exists(f"{place}/saved_model.pb"):
            copy = tmp_path / secrets.token_hex(4)
            download(target, copy)
            seen.append(tree(copy))

    at_copy(monkeypatch, look)
    upload(model, target, last="saved_model.pb")
    assert seen == []
    first = tree(model)
    (model / "assets" / "words").unlink()
    (model / "variables" / "data").write_bytes(b"others")
    (model / "saved_model.pb").write_bytes(b"another graph")
    upload(model, target, last="saved_model.pb")
    assert seen
    assert {key: value for key, value in seen[0].items() if value != b"/"} == {
        key: value for key, value in first.items() if value != b"/"
    }
    assert all(each == seen[0] for each in seen)
    monkeypatch.undo()
    download(target, tmp_path / "back")
    found = {key: value for key, value in tree(tmp_path / "back").items() if value != b"/"}
    assert found == {"saved_model.pb": b"another graph", "variables/data": b"others"}


@pytest.mark.parametrize("has_old", [False, True])
def test_a_directory_that_is_cut_in_a_store_has_no_last_file(model, monkeypatch, has_old):
    place = f"memory://{secrets.token_hex(4)}/served"
    target, files = parse(place), filesystem_for(place)
    if has_old:
        upload(model, target, last="saved_model.pb")

    def fail(path: str) -> None:
        if path.endswith("/served/variables/data"):
            raise OSError(errno.EIO, "the store is away")

    with monkeypatch.context() as patched:
        at_copy(patched, fail)
        with pytest.raises(OSError, match=r"the store is away"):
            upload(model, target, last="saved_model.pb")
    assert not files.exists(f"{place}/saved_model.pb")
    refuse_other_content(target)  # the next export may go there
    upload(model, target, last="saved_model.pb")
    assert files.exists(f"{place}/saved_model.pb")


@pytest.mark.parametrize("odd", ["2026-01-01T10:00/events", "events:0"])
def test_a_name_that_is_refused_in_the_old_directory_changes_nothing(model, tmp_path, odd):
    place = f"memory://{secrets.token_hex(4)}/served"
    target, files = parse(place), filesystem_for(place)
    upload(model, target, last="saved_model.pb")
    files.write(f"{place}/{odd}", lambda: iter([b"of another program"]))

    def there() -> list[FileStatus]:
        return list(walk(files, place, lambda _: False))

    before = there()
    (model / "saved_model.pb").write_bytes(b"another graph")
    with pytest.raises(PathError, match="cannot name a file below"):
        upload(model, target, last="saved_model.pb")
    assert there() == before
