"""Directories that are sent and fetched: whole, in place of the old one, and never elsewhere."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from feeding.errors import PathError
from feeding.filesystem.local import LocalFileSystem
from feeding.filesystem.location import parse
from tests.support.hostile_names import NAMES_THAT_LEAD_ASTRAY
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


@pytest.mark.attack("A18")
def test_what_is_no_regular_file_is_not_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            list(file_pieces(path, limit_bytes=4))


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
