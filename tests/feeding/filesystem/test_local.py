"""Files of this host: what is on the disk, descriptors, disks without hard links."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from feeding.filesystem.local import LocalFileSystem


def descriptors_below(directory: Path) -> list[str]:
    found = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(each)
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith(str(directory)):
            found.append(target)
    return found


def test_a_written_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced: list[int] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        assert not (tmp_path / "file").exists()
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", noting)
    LocalFileSystem().write(tmp_path / "file", b"x" * 100)
    assert synced == [100]


def test_a_reader_gives_its_descriptor_back(tmp_path):
    files = LocalFileSystem()
    files.write(tmp_path / "file", b"x")
    with files.open(tmp_path / "file") as kept:
        assert descriptors_below(tmp_path) == [str(tmp_path / "file")]
    assert descriptors_below(tmp_path) == []
    kept.close()
    dropped = files.open(tmp_path / "file")
    assert dropped.read_range(0, 1) == b"x"
    del dropped
    assert descriptors_below(tmp_path) == []
    with pytest.raises(IsADirectoryError) as refused:
        files.open(tmp_path)
    assert descriptors_below(tmp_path) == [], refused


def test_what_is_neither_file_nor_directory_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file") as refused:
        LocalFileSystem().open(tmp_path / "pipe")
    assert (refused.value.errno, refused.value.filename) == (errno.EINVAL, str(tmp_path / "pipe"))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_disk_without_hard_links_still_renames(tmp_path, monkeypatch, number):
    def refuses(*_: object, **__: object) -> None:
        raise OSError(number, "no links")

    files = LocalFileSystem()
    monkeypatch.setattr("os.link", refuses)
    files.write(tmp_path / "a", b"a", overwrite=False)
    files.rename(tmp_path / "a", tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["b"]
    files.write(tmp_path / "c", b"c")
    with pytest.raises(OSError, match="no links"):  # another one has made it meanwhile
        files.rename(tmp_path / "c", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"a"


def test_a_full_disk_at_a_rename_is_no_disk_without_links(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    files = LocalFileSystem()
    files.write(tmp_path / "a", b"a")
    monkeypatch.setattr("os.link", full)
    with pytest.raises(OSError, match="no space"):
        files.rename(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]
