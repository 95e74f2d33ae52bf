"""The archive's bytes: decided by names and contents alone; never half of one."""

from __future__ import annotations

import os
import tarfile
from functools import partial

import pytest

from tfos.errors import SettingsError
from tfos.pack import archive
from tfos.pack.contents import Entry


def entries(directory):
    directory.mkdir()
    for name in ("b", "a"):
        (directory / name).write_text(name * 1000)
    return [
        Entry("x/b", directory / "b", is_executable=True),
        Entry("x/y/link", link="../b"),
        Entry("a", directory / "a"),
    ]


def written(target, entries):
    sizes: list[int] = []
    archive.write(target, entries, 6, sizes.append)
    assert sorted(sizes) == [0, 1000, 1000]
    return target.read_bytes()


@pytest.mark.parametrize("suffix", archive.SUFFIXES)
def test_times_modes_and_order_do_not_change_a_byte(tmp_path, suffix):
    first = entries(tmp_path / "first")
    second = entries(tmp_path / "second")[::-1]
    os.utime(second[0].source, (1, 1))
    second[0].source.chmod(0o600)
    assert written(tmp_path / f"1{suffix}", first) == written(tmp_path / f"2{suffix}", second)


def test_it_has_directories_before_files_with_their_modes(tmp_path):
    target = tmp_path / "env.tar.gz"
    written(target, entries(tmp_path / "files"))
    with tarfile.open(target, "r:gz") as tar:
        found = [(each.name, oct(each.mode), each.uid, each.mtime) for each in tar]
        assert tar.getmember("x/y/link").linkname == "../b"
    assert found == [
        ("a", "0o644", 0, archive.TIME_S),
        ("x", "0o755", 0, archive.TIME_S),
        ("x/b", "0o755", 0, archive.TIME_S),
        ("x/y", "0o755", 0, archive.TIME_S),
        ("x/y/link", "0o777", 0, archive.TIME_S),
    ]


def test_a_failure_leaves_the_older_archive_and_nothing_else(tmp_path):
    target = tmp_path / "env.tar"
    target.write_text("older")
    with pytest.raises(FileNotFoundError):
        archive.write(target, [Entry("a", tmp_path / "gone")], 6, lambda _: None)
    assert target.read_text() == "older"
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_is_told_with_the_archives_path(tmp_path, monkeypatch):
    full_disk = partial(open, "/dev/full", "wb", 0)
    monkeypatch.setattr(archive, "_opened", lambda *_: full_disk())
    target = tmp_path / "env.tar"
    with pytest.raises(OSError, match="No space left on device") as full:
        archive.write(target, entries(tmp_path / "files"), 6, lambda _: None)
    assert full.value.filename == str(target)
    assert not target.exists()


def test_a_name_that_nobody_unpacks_and_a_missing_directory_are_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"env.zip does not end in .tar.gz, .tgz, .tar"):
        archive.check_target(tmp_path / "env.zip")
    with pytest.raises(SettingsError, match=r"there is no directory .*missing for env.tar"):
        archive.check_target(tmp_path / "missing" / "env.tar")


def test_a_place_that_cannot_be_written_is_refused_by_the_name_that_was_given(tmp_path):
    (tmp_path / "d.tar").mkdir()
    with pytest.raises(SettingsError, match=f"^{tmp_path}/d.tar is a directory; name a file"):
        archive.check_target(tmp_path / "d.tar")
    long = f"{'x' * 250}.tar"  # which leaves no room for a name beside it
    with pytest.raises(SettingsError, match=rf"/{long} cannot be written: File name too long;"):
        archive.check_target(tmp_path / long)
    archive.check_target(tmp_path / "env.tar")
    assert [each.name for each in tmp_path.iterdir()] == ["d.tar"]
