"""Files of this host: what is on the disk, descriptors, disks without hard links."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

import pytest

from feeding.filesystem.local import LocalFileSystem, sync_tree


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


@pytest.fixture
def synced(tmp_path, monkeypatch) -> list[tuple[str, bool]]:
    """What was synced, and whether `file` or `directory` had its name by then."""
    noted: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        named = (tmp_path / "file").exists() or (tmp_path / "directory").exists()
        noted.append((os.path.relpath(path, tmp_path), named))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", noting)
    return noted


def test_a_written_file_is_on_the_disk_before_it_has_its_name(tmp_path, synced):
    LocalFileSystem().write(tmp_path / "file", b"x" * 100)
    (staged, had_name), *rest = synced
    assert (staged[:6], had_name) == (".file.", False)
    assert rest == [(".", True)]  # the name itself


def test_a_renamed_directory_has_its_name_on_the_disk(tmp_path, synced):
    (tmp_path / "staged").mkdir()
    LocalFileSystem().rename(tmp_path / "staged", tmp_path / "directory")
    assert synced == [(".", True)]


def test_a_directory_is_synced_from_below_without_what_its_links_lead_to(tmp_path, synced):
    (tmp_path / "staged" / "inner").mkdir(parents=True)
    (tmp_path / "staged" / "inner" / "a").write_bytes(b"a")
    (tmp_path / "staged" / "inner" / "link").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "staged" / "inner" / "pipe")
    sync_tree(tmp_path / "staged")
    assert [path for path, _ in synced] == ["staged/inner/a", "staged/inner", "staged"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_mount_that_cannot_sync_directories_is_written_to_and_a_broken_disk_is_reported(
    tmp_path, monkeypatch, number
):
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", failing)
    refused = pytest.raises(OSError, match="Input/output error")
    with refused if number == errno.EIO else contextlib.nullcontext():
        LocalFileSystem().write(tmp_path / "file", b"x")
    assert (tmp_path / "file").read_bytes() == b"x"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_mount_that_syncs_no_file_opened_to_read_keeps_what_others_wrote(
    tmp_path, monkeypatch, number
):
    (tmp_path / "file").write_bytes(b"x")

    def failing(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", failing)
    refused = pytest.raises(OSError, match="Input/output error")
    with refused if number == errno.EIO else contextlib.nullcontext():
        sync_tree(tmp_path / "file")


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
