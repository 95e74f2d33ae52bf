"""What every file system does alike: this host, a real HDFS, and one of fsspec's."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from feeding.errors import DataError, FileChanged, PathError
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.interface import FileSystem, is_other
from feeding.filesystem.readahead import ReadAhead
from feeding.filesystem.registry import filesystem_for
from feeding.filesystem.walking import walk
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)
ON_HDFS = pytest.param("hdfs", marks=pytest.mark.hdfs)


@dataclass
class Place:
    """A file system and a new directory on it."""

    fs: FileSystem
    root: str

    def __call__(self, name: str) -> str:
        return f"{self.root}/{name}"

    def read(self, name: str) -> bytes:
        with self.fs.open(self(name)) as reader:
            return reader.read_range(0, reader.size_bytes)

    def names(self, directory: str = "") -> list[str]:
        below = f"{self.root}/{directory}".rstrip("/")
        return [status.path.removeprefix(f"{below}/") for status in self.fs.entries(below)]


@pytest.fixture(params=["local", ON_HDFS, "memory"])
def place(request, tmp_path) -> Place:
    name = secrets.token_hex(4)
    if request.param == "local":
        root = str(tmp_path / name)
    elif request.param == "hdfs":
        root = f"{request.getfixturevalue('hdfs').url}/{name}"
    else:
        root = f"memory://{name}/files"
    fs = filesystem_for(root)
    fs.mkdirs(root)
    return Place(fs, root)


def test_what_is_written_is_read_back(place):
    data = os.urandom(100_000)
    place.fs.write(place("a/b/file"), data)
    status = place.fs.status(place("a/b/file"))
    assert (status.path, status.size_bytes) == (place("a/b/file"), len(data))
    assert (status.name, status.is_directory) == ("file", False)
    assert place.read("a/b/file") == data
    assert place.names("a/b") == ["file"]  # nothing else is left there


def test_ranges_stop_at_the_end_of_the_file(place):
    data = bytes(range(256)) * 40
    place.fs.write(place("file"), data)
    with place.fs.open(place("file")) as reader:
        assert reader.size_bytes == len(data)
        for offset, length in [(0, 10), (10_000, 1000), (10_239, 1), (10_240, 5), (99_999, 5)]:
            assert reader.read_range(offset, length) == data[offset : offset + length]
        begun = [reader.start_range(offset, 1000) for offset in range(0, 12_000, 1000)]
        assert b"".join(take() for take in begun) == data
        for offset, length in [(-1, 5), (0, -1)]:
            with pytest.raises(ValueError, match="a range of"):
                reader.read_range(offset, length)


def test_a_reader_serves_several_threads(place):
    data = os.urandom(200_000)
    place.fs.write(place("file"), data)
    with place.fs.open(place("file")) as reader, ThreadPoolExecutor(4) as pool:
        parts = pool.map(lambda offset: reader.read_range(offset, 5000), range(0, 200_000, 5000))
        assert b"".join(parts) == data


def test_a_file_is_read_ahead_from_any_byte(place):
    data = os.urandom(100_001)
    place.fs.write(place("file"), data)
    config = FileSystemConfig(range_bytes=4096, ranges_in_flight=3)
    for begin in (0, 5000, 4096, 99_999, len(data)):
        with ReadAhead(place.fs.open(place("file")), config, begin=begin) as file:
            assert file.read() == data[begin:]
            assert file.tell() == len(data)
            assert file.read(1) == b""
    with ReadAhead(place.fs.open(place("file")), config, begin=3) as file:
        block = bytearray(1000)
        assert file.readinto(block) == 1000
        assert block == data[3:1003]
        assert b"".join(file.ranges()) == data[1003:]
    for content in (data, data[:8000]):  # of two ranges the second one is the last
        place.fs.write(place("file"), content)
        with ReadAhead(place.fs.open(place("file")), config) as file:
            parts = [bytes(next(file.ranges()))]
            for _ in range(2):
                assert file.readinto(block) == 1000
                parts.append(bytes(block))
            assert b"".join([*parts, *file.ranges()]) == content


def test_a_file_that_is_replaced_while_it_is_open_is_never_read_half_old_half_new(place):
    old, new = b"o" * 100_000, b"n" * 100_000
    for later in (new, new + b"n"):
        place.fs.write(place("file"), old)
        with place.fs.open(place("file")) as reader:
            assert reader.read_range(0, 10) == old[:10]
            place.fs.write(place("file"), later)
            found = b""
            with contextlib.suppress(FileChanged):
                found = reader.read_range(50_000, 50_000)
            assert found in (b"", old[50_000:])


def test_a_version_tells_contents_apart(place):
    place.fs.write(place("d/file"), b"one")
    found = place.fs.status(place("d/file"))
    assert found.version
    assert place.fs.entries(place("d")) == [found]
    with place.fs.open(place("d/file")) as reader:
        assert reader.version == found.version

    def is_seen() -> bool:
        place.fs.write(place("d/file"), b"two")  # within a tick of its clock this host sees nothing
        return is_other(found.version, place.fs.status(place("d/file")).version)

    wait_until(is_seen, "another version")


def test_an_empty_file_is_a_file(place):
    place.fs.write(place("empty"), b"")
    assert place.fs.status(place("empty")).size_bytes == 0
    assert place.read("empty") == b""


def test_content_may_be_made_in_pieces(place):
    place.fs.write(place("file"), lambda: (bytes([i]) * i for i in range(5)))
    assert place.read("file") == b"\1\2\2\3\3\3\4\4\4\4"


def test_content_that_cannot_be_made_leaves_the_old_file(place):
    place.fs.write(place("file"), b"old")

    def pieces():
        yield b"new"
        raise ZeroDivisionError("while making it")

    with pytest.raises(ZeroDivisionError, match="while making it"):
        place.fs.write(place("file"), pieces)
    assert place.read("file") == b"old"
    assert place.names() == ["file"]


def test_a_file_is_collected_and_appears_at_the_end(place):
    with place.fs.create(place("file")) as file:
        file.write(b"one ")
        file.write(b"two")
        assert not place.fs.exists(place("file"))
    assert place.read("file") == b"one two"
    with pytest.raises(ZeroDivisionError), place.fs.create(place("file")) as file:
        file.write(b"never" * (1 // 0))
    assert place.read("file") == b"one two"
    assert place.names() == ["file"]


def test_overwriting_is_a_choice(place):
    place.fs.write(place("file"), b"old")
    with pytest.raises(FileExistsError) as refused:
        place.fs.write(place("file"), b"new", overwrite=False)
    assert refused.value.filename == place("file")
    assert place.read("file") == b"old"
    place.fs.write(place("another"), b"new", overwrite=False)
    assert place.read("another") == b"new"
    place.fs.write(place("file"), b"new")
    assert place.read("file") == b"new"


def test_a_directory_is_listed_in_order_with_sizes(place):
    for name, size in [("c", 3), ("a", 1), ("b/inner", 5)]:
        place.fs.write(place(name), b"x" * size)
    found = place.fs.entries(place.root)
    assert [(s.path, s.size_bytes, s.is_directory) for s in found] == [
        (place("a"), 1, False),
        (place("b"), 0, True),
        (place("c"), 3, False),
    ]
    assert found[1].version == ""  # nothing tells whether what is in it has changed
    place.fs.mkdirs(place("none"))
    assert place.fs.entries(place("none")) == []


def test_the_files_of_a_tree_without_what_is_hidden(place):
    seen = ["a", "b/c", "b/day=1/d", "b/day=2/d"]
    for name in [*seen, "_x", "b/_x/a", "b/day=1/_x"]:
        place.fs.write(place(name), name.encode())
    place.fs.mkdirs(place("none"))
    below = walk(place.fs, place.root, lambda name: name.startswith("_"))
    found = sorted(below, key=lambda each: each.path)
    assert found == [place.fs.status(place(name)) for name in seen]
    assert len(list(walk(place.fs, place("b/day=1"), lambda _: False))) == 2


@pytest.mark.parametrize("depth", [31, 32])
def test_a_tree_has_at_most_32_directories_above_a_file(place, depth):
    place.fs.write(place("/".join(["d"] * depth) + "/file"), b"x")
    if depth < 32:
        assert len(list(walk(place.fs, place.root, lambda _: False))) == 1
    else:
        with pytest.raises(DataError, match="nested more than 32 directories deep"):
            list(walk(place.fs, place.root, lambda _: False))


def test_patterns(place):
    for name in ["day=1/a.rec", "day=1/b.rec", "day=2/a.rec", "day=2/deep/c.rec", "x", ".hidden"]:
        place.fs.write(place(name), b"x")

    def matches(pattern: str) -> list[str]:
        return [s.path.removeprefix(f"{place.root}/") for s in place.fs.glob(place(pattern))]

    assert matches("*") == ["day=1", "day=2", "x"]
    assert matches("day=*/*.rec") == ["day=1/a.rec", "day=1/b.rec", "day=2/a.rec"]
    assert matches("day=[2-9]/?.rec") == ["day=2/a.rec"]
    assert matches("day={1,3}/[!a].rec") == ["day=1/b.rec"]
    assert matches("**/*.rec") == [*matches("day=*/*.rec"), "day=2/deep/c.rec"]
    assert matches("x") == ["x"]
    assert matches(".h*") == [".hidden"]
    assert matches("none/*") == matches("x/*") == matches("none") == []


def test_renaming(place):
    place.fs.write(place("a"), b"a")
    place.fs.write(place("b"), b"b")
    with pytest.raises(FileExistsError):
        place.fs.rename(place("a"), place("b"))
    assert place.read("b") == b"b"
    place.fs.rename(place("a"), place("b"), overwrite=True)
    assert place.read("b") == b"a"
    assert place.names() == ["b"]
    place.fs.write(place("from/inner"), b"i")
    place.fs.rename(place("from"), place("to"))
    assert place.names() == ["b", "to"]
    assert place.read("to/inner") == b"i"
    with pytest.raises(FileNotFoundError):
        place.fs.rename(place("from"), place("other"))


def test_a_directory_is_not_replaced(place):
    place.fs.write(place("file"), b"x")
    for name in ["empty", "full"]:
        place.fs.mkdirs(place(name))
    place.fs.write(place("full/inner"), b"x")
    for name in ["empty", "full"]:
        with pytest.raises((IsADirectoryError, FileExistsError)):
            place.fs.rename(place("file"), place(name))
        with pytest.raises(IsADirectoryError):
            place.fs.write(place(name), b"new")
    place.fs.write(place("other/inner"), b"x")
    for name in ["empty", "full"]:
        with pytest.raises(FileExistsError):
            place.fs.rename(place("other"), place(name))
    assert place.names() == ["empty", "file", "full", "other"]


def test_deleting(place):
    place.fs.write(place("d/inner"), b"x")
    assert place.fs.delete(place("none")) is False
    with pytest.raises(OSError, match="not empty") as refused:
        place.fs.delete(place("d"))
    assert (refused.value.errno, refused.value.filename) == (errno.ENOTEMPTY, place("d"))
    assert place.fs.delete(place("d"), recursive=True) is True
    assert not place.fs.exists(place("d"))
    assert not place.fs.exists(place("d/inner"))


def test_letters_of_patterns_in_a_name_mean_themselves(place):
    """Where a name is no pattern for its neighbours, they stay as they are."""
    for name in ("run1/step/one", "run[1]/step/one", "img0.png", "img[0].png", "img?.png"):
        place.fs.write(place(name), name.encode())
    place.fs.rename(place("run[1]/step"), place("run[1]/moved"))
    place.fs.rename(place("img?.png"), place("img*.png"))
    assert place.read("run[1]/moved/one") == b"run[1]/step/one"
    assert place.names("run[1]") == ["moved"]
    assert place.fs.delete(place("img[0].png")) is True
    assert place.fs.delete(place("img*.png")) is True
    assert place.fs.delete(place("run[1]"), recursive=True) is True
    assert place.names() == ["img0.png", "run1"]
    assert place.read("run1/step/one") == b"run1/step/one"
    assert place.read("img0.png") == b"img0.png"


def test_directories_are_made_once_or_again(place):
    place.fs.mkdirs(place("a/b/c"))
    place.fs.mkdirs(place("a/b/c"))
    assert place.fs.status(place("a/b/c")).is_directory
    place.fs.write(place("file"), b"x")
    with pytest.raises(FileExistsError):
        place.fs.mkdirs(place("file"))


def test_what_is_missing_is_named(place):
    for call in (place.fs.status, place.fs.open, place.fs.entries):
        with pytest.raises(FileNotFoundError) as refused:
            call(place("none"))
        assert refused.value.filename == place("none")
    assert not place.fs.exists(place("none"))


def test_files_are_not_directories(place):
    place.fs.write(place("file"), b"x")
    with pytest.raises(NotADirectoryError) as refused:
        place.fs.entries(place("file"))
    assert refused.value.filename == place("file")
    with pytest.raises(IsADirectoryError) as opened:
        place.fs.open(place.root)
    assert opened.value.filename == place.root
    assert not place.fs.exists(place("file/inner"))


def test_another_file_system_s_paths_are_refused(place):
    for path in ["hdfs://elsewhere:1/x", "memory://elsewhere/x", "ftp://elsewhere/x"]:
        with pytest.raises(PathError, match="is not on"):
            place.fs.status(path)


@pytest.mark.attack("A18")
def test_a_path_that_leads_astray_is_refused(place):
    for name in ["", "a\0b"]:
        with pytest.raises(PathError):
            place.fs.write(name and place(name), b"x")
    if "://" in place.root:
        for name in ["../x", "a/../../x", "./x", "a\u202eb", "a\nb"]:
            with pytest.raises(PathError, match="is refused"):
                place.fs.write(place(name), b"x")
    assert place.names() == []
