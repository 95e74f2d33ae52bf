"""Packages of fsspec that keep listings: what other processes write is seen."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from fsspec.utils import infer_storage_options

from feeding.columnar.ops import num_rows
from feeding.errors import DataError, FileChanged, PathError, StorageUnavailable
from feeding.filesystem import fsspec_files
from feeding.filesystem.bounded_calls import MAX_THREADS
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.fsspec_files import FsspecFileSystem, FsspecReader, Turns
from feeding.filesystem.location import parse
from feeding.filesystem.readahead import ReadAhead
from feeding.formats.csv.source import CsvSource
from feeding.formats.text import source
from feeding.formats.text.lines import LineLimits
from feeding.formats.text.source import TextSource
from feeding.formats.tfrecord import records
from feeding.formats.tfrecord.example import Feature
from feeding.formats.tfrecord.framing import RecordLimits, RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.formats.tfrecord.source import TFRecordSource
from feeding.reading.discover import data_files, is_plain
from feeding.reading.splits import Split, shares
from tests.support.waiting import WAIT_S, wait_until


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


class Told(Listing):
    """Tells of a file, besides its size, what `told` makes of its content."""

    protocol = "told"
    asked: ClassVar[list[Any]] = []
    told: ClassVar[Callable[[bytes], dict[str, Any]]] = staticmethod(lambda _: {})

    def _listed(self) -> list[dict[str, Any]]:
        told = type(self).told
        return [{**each, **told(self.stored[each["name"]])} for each in super()._listed()]

    def cat_file(  # type: ignore[override]  # as that of s3fs
        self,
        path: str,
        version_id: str | None = None,
        start: int | None = None,
        end: int | None = None,
        **_: Any,
    ) -> bytes:
        self.asked.append((version_id, start, end))
        return super().cat_file(path, start or 0, end, **_)


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


OLD, NEW = b"o" * 10, b"n" * 10
_DAY = datetime(2026, 11, 27, tzinfo=UTC)
TELLS: dict[str, Callable[[bytes], dict[str, Any]]] = {
    "s3fs": lambda data: {"ETag": f'"{data[:1].hex()}"', "LastModified": _DAY},
    "gcsfs": lambda data: {"generation": data[0], "etag": "same", "mtime": _DAY},
    "adlfs": lambda data: {"etag": data[:1].hex(), "last_modified": _DAY},
    "sftp": lambda data: {"mtime": _DAY + timedelta(seconds=data[0])},
    "webhdfs": lambda data: {"modificationTime": data[0]},
    "http": lambda data: {"Last-Modified": f"Fri, 27 Nov 2026 09:00:{data[0] % 60} GMT"},
}


@pytest.fixture
def told(monkeypatch) -> str:
    fsspec.register_implementation(Told.protocol, Told, clobber=True)
    monkeypatch.setattr(Told, "stored", {"bucket/a": OLD})
    monkeypatch.setattr(Told, "asked", [])
    return "told://bucket/a"


@pytest.mark.parametrize("package", TELLS)
def test_a_file_of_equal_size_that_replaces_an_open_one_is_refused(told, package, monkeypatch):
    monkeypatch.setattr(Told, "told", staticmethod(TELLS[package]))
    files = FsspecFileSystem(parse(told), FileSystemConfig())
    with files.open(told) as reader:
        begun = reader.start_range(0, 5)
        assert begun() == OLD[:5]
        Told.stored["bucket/a"] = NEW
        with pytest.raises(FileChanged, match=f"{told} was replaced while it was read: .* now "):
            reader.read_range(5, 5)


def test_a_file_that_was_replaced_before_its_end_is_refused_when_it_was_read(told, monkeypatch):
    monkeypatch.setattr(Told, "told", staticmethod(TELLS["s3fs"]))
    files = FsspecFileSystem(parse(told), FileSystemConfig())
    text = f"{told} was replaced while it was read"
    reader = files.open(told)
    reader.read_range(0, 3)
    Told.stored["bucket/a"] = NEW
    with pytest.raises(FileChanged, match=text), reader:
        assert reader.read_range(3, 3) == NEW[3:6]
    ahead = ReadAhead(files.open(told), FileSystemConfig(range_bytes=3), begin=2, ahead_until=2)
    assert ahead.read(1) == NEW[2:3]
    Told.stored["bucket/a"] = OLD
    with pytest.raises(FileChanged, match=text), ahead:
        pass
    assert ahead.closed


@pytest.mark.parametrize("how", ["closed", "dropped", "left by an error"])
def test_a_file_that_is_left_early_asks_its_store_for_nothing(told, monkeypatch, how):
    """A store that is away would hold each open file up for `patience_s`, and hide what failed."""
    monkeypatch.setattr(Told, "told", staticmethod(TELLS["s3fs"]))
    monkeypatch.setattr(Told, "stored", {"bucket/a": b"line\n" * 4})
    monkeypatch.setattr(source, "DEFAULTS", FileSystemConfig(range_bytes=5, ranges_in_flight=1))
    rows = TextSource(told, limits=LineLimits(block_bytes=5)).read(Split(told, 0, 10))
    reader = FsspecFileSystem(parse(told), FileSystemConfig()).open(told)
    next(rows)
    reader.read_range(0, 3)
    asked: list[str] = []

    def info(_: Any, path: str) -> dict[str, Any]:
        asked.append(path)
        return {}

    monkeypatch.setattr(fsspec_files, "_info", info)
    if how == "closed":
        reader.close()
    elif how == "dropped":
        rows.close()  # type: ignore[attr-defined]  # a generator
    else:
        with pytest.raises(KeyError), ReadAhead(reader, FileSystemConfig()):
            raise KeyError
    assert asked == []


def test_an_error_is_not_hidden_by_the_check_at_the_end(told, monkeypatch):
    monkeypatch.setattr(Told, "told", staticmethod(TELLS["s3fs"]))
    files = FsspecFileSystem(parse(told), FileSystemConfig())
    reader = files.open(told)
    reader.read_range(0, 3)
    Told.stored["bucket/a"] = NEW
    with pytest.raises(KeyError), reader:
        raise KeyError


@pytest.mark.parametrize("is_away", [False, True])
def test_damage_that_is_the_bytes_of_another_version_is_told_as_one(told, monkeypatch, is_away):
    monkeypatch.setattr(Told, "told", staticmethod(TELLS["s3fs"]))
    reader = FsspecFileSystem(parse(told), FileSystemConfig()).open(told)
    reader.read_range(0, 3)
    Told.stored["bucket/a"] = NEW
    if is_away:
        Told.stored.clear()
    damage = DataError("record 10: its CRC is wrong")
    with pytest.raises(DataError if is_away else FileChanged) as raised, reader:
        raise damage
    assert raised.value is damage or raised.value.__context__ is damage


def test_a_long_file_is_asked_for_its_version_at_some_ranges_alone(told, monkeypatch):
    monkeypatch.setattr(Told, "told", staticmethod(TELLS["s3fs"]))
    monkeypatch.setattr(Told, "stored", {"bucket/a": bytes(40)})
    files = FsspecFileSystem(parse(told), FileSystemConfig())
    infos, ask = [], fsspec_files._info

    def counted(inner: Any, path: str) -> dict[str, Any]:
        infos.append(path)
        return ask(inner, path)

    monkeypatch.setattr(fsspec_files, "_info", counted)
    with files.open(told) as reader:
        for offset in range(0, 40, 2):
            reader.read_range(offset, 2)
    assert len(infos) == 1 + 2 + 1  # at the opening, at each 8th range, at the end
    infos.clear()
    with files.open(told) as reader:
        reader.read_range(0, 40)
    assert len(infos) == 2
    infos.clear()
    with files.open(told) as reader:
        reader.read_range(0, 20)
    assert len(infos) == 2
    infos.clear()
    with files.open(told):
        pass
    assert len(infos) == 1


def test_a_range_is_asked_for_by_name(told):
    files = FsspecFileSystem(parse(told), FileSystemConfig())
    with files.open(told) as reader, contextlib.suppress(OSError):
        reader.read_range(3, 4)
    assert Told.asked == [(None, 3, 7)]


def test_where_a_store_tells_sizes_alone_other_sizes_are_refused(told, monkeypatch):
    monkeypatch.setattr(Told, "told", staticmethod(lambda _: {}))
    files = FsspecFileSystem(parse(told), FileSystemConfig())
    assert files.status(told).version == ""
    with files.open(told) as reader:
        Told.stored["bucket/a"] = NEW
        assert reader.read_range(5, 5) == NEW[5:]
        Told.stored["bucket/a"] = NEW[:7]
        with pytest.raises(FileChanged, match="2 bytes came at 5 instead of 5"):
            reader.read_range(5, 5)


LINES = b"a,b\n" + b"1,23\n" * 2000
"""100 ranges of 100 bytes, and a header."""
RECORDS = 200


@pytest.fixture
def small_ranges(monkeypatch, told) -> None:
    """Three files of 100 ranges, which are read three at a time."""
    config = FileSystemConfig(range_bytes=100, ranges_in_flight=3)
    for module in (source, records):
        monkeypatch.setattr(module, "DEFAULTS", config)
    file = io.BytesIO()
    writer = RecordWriter(file)
    for number in range(RECORDS):
        writer.write(encode_example({"n": number}))
    stored = {"bucket/a": LINES, "bucket/r": file.getvalue()}
    monkeypatch.setattr(Told, "stored", stored)


def fetched_bytes() -> int:
    """Return how many bytes were fetched since the last call."""
    num_bytes = sum(stop - start for _, start, stop in Told.asked)
    Told.asked.clear()
    return num_bytes


def test_a_range_of_a_file_is_fetched_with_little_of_what_lies_behind_it(small_ranges):
    limits = LineLimits(block_bytes=50)
    path = "told://bucket/a"
    texts = TextSource(path, limits=limits)
    numbers = CsvSource(path, limits=limits)
    assert fetched_bytes() < 1000  # of names and types: two ranges, of 10,000 bytes
    for lines in (texts, numbers):
        for start, stop in ((1000, 2000), (4000, 5000)):
            assert sum(num_rows(rows) for rows in lines.read(Split(path, start, stop))) == 200
            assert fetched_bytes() <= 1000 + 200
    path, size = "told://bucket/r", len(Told.stored["bucket/r"])
    small = RecordLimits(block_bytes=50)
    examples = TFRecordSource(path, {"n": Feature("int64")}, limits=small)
    half = size // 2
    found = [
        sum(num_rows(rows) for rows in examples.read(Split(path, start, stop)))
        for start, stop in ((0, half), (half, size))
    ]
    assert sum(found) == RECORDS
    assert fetched_bytes() <= size + 300


def test_records_that_do_not_fit_because_their_file_was_replaced_are_not_called_damaged(
    small_ranges, monkeypatch
):
    monkeypatch.setattr(Told, "told", staticmethod(lambda data: {"ETag": str(hash(data))}))
    path, before = "told://bucket/r", Told.stored["bucket/r"]
    source = TFRecordSource(path, {"n": Feature("int64", ())}, limits=RecordLimits(block_bytes=50))
    rows = source.read(Split(path, 0, len(before)))
    next(rows)
    file = io.BytesIO()
    writer = RecordWriter(file)
    for number in range(RECORDS):
        writer.write(encode_example({"m": number}))
    assert len(file.getvalue()) == len(before)
    Told.stored["bucket/r"] = file.getvalue()
    with pytest.raises(FileChanged, match="was replaced while it was read"):
        list(rows)


@pytest.fixture
def asked(monkeypatch) -> Iterator[Counter[str]]:
    """How often a package was asked by each call; its tree has 20 directories."""
    memory, counts = fsspec.filesystem("memory"), Counter[str]()
    for number in range(20):
        memory.pipe_file(f"/tree/data/day={number}/a", b"x")

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **named: Any) -> Any:
            counts[name] += 1
            return call(*args, **named)

        return ask

    for name in ("ls", "info", "find"):
        monkeypatch.setattr(memory, name, noted(name, getattr(memory, name)))
    yield counts
    memory.store.clear()


def test_a_tree_is_listed_with_one_request_for_each_directory(asked):
    assert len(data_files("memory://tree/data", is_splittable=is_plain)) == 20
    assert asked == {"info": 1, "ls": 21}


@pytest.fixture
def frozen(monkeypatch) -> Iterator[threading.Event]:
    """A store that answers reads once this is set; as many as may wait for it do."""
    fsspec.register_implementation(Listing.protocol, Listing, clobber=True)
    monkeypatch.setattr(Listing, "stored", {"bucket/a": b"one\n"})
    gate, before = threading.Event(), threading.active_count()
    answer = Listing.cat_file

    def late(*args: Any, **named: Any) -> bytes:
        assert gate.wait(WAIT_S)
        return answer(*args, **named)

    monkeypatch.setattr(Listing, "cat_file", late)
    readers = [opened() for _ in range(MAX_THREADS)]  # each has a file system of its own
    for reader in readers:
        reader._start(0, 4)
    yield gate
    gate.set()
    wait_until(lambda: threading.active_count() <= before, "the end of the calls")


def opened(patience_s: float = 60.0) -> FsspecReader:
    files = FsspecFileSystem(parse("listing://bucket"), FileSystemConfig(patience_s=patience_s))
    return files.open("listing://bucket/a")


def test_the_calls_of_all_file_systems_of_a_process_have_one_bound(frozen):
    with pytest.raises(StorageUnavailable, match=f"{MAX_THREADS} earlier calls are still not"):
        opened(patience_s=0.05)
    frozen.set()
    assert opened().read_range(0, 4) == b"one\n"


def test_a_forked_process_has_calls_of_its_own(frozen):
    before = FsspecFileSystem(parse("listing://bucket"), FileSystemConfig(patience_s=5.0))
    child = os.fork()
    if not child:  # whose threads are gone, with what they held
        is_read = False
        try:
            frozen.set()
            with before.open("listing://bucket/a") as reader:
                is_read = reader.read_range(0, 4) == b"one\n"
        finally:
            os._exit(0 if is_read else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_lies_below_a_hidden_directory_is_not_listed(asked):
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/tree/data/_archive/old/day=1/a", b"x")
    memory.pipe_file("/tree/data/_temporary/b\x01c", b"x")  # nobody could name it
    assert len(data_files("memory://tree/data", is_splittable=is_plain)) == 20
    assert asked == {"info": 1, "ls": 21}


class Page(Listing):
    """A directory of an HTTP server: a page with links, of which it tells no sizes."""

    protocol = "page"
    unsized: ClassVar[set[str]] = set()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path  # as that of HTTP: names are whole URLs

    def _listed(self) -> list[dict[str, Any]]:
        names = [*self.stored, "page://host/d/dead.txt"]
        return [{"name": each, "size": None, "type": "file"} for each in names]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if path == "page://host/d":
            return {"name": path, "size": None, "type": "file"}
        if path not in self.stored:
            raise FileNotFoundError(path)
        size = None if path in self.unsized else len(self.stored[path])
        return {"name": path, "size": size, "type": "file"}


@pytest.fixture
def page(monkeypatch) -> str:
    fsspec.register_implementation(Page.protocol, Page, clobber=True)
    stored = {"page://host/d/a.txt": b"one\n", "page://host/d/b.txt": b"two\n"}
    monkeypatch.setattr(Page, "stored", stored)
    monkeypatch.setattr(Page, "unsized", set())
    return "page://host/d"


def test_files_of_a_listing_without_sizes_are_read(page):
    source = TextSource(f"{page}/*.txt")
    assert [each.size_bytes for each in source.files()] == [4, 4]
    rows: list[Any] = [c[0] for split in shares(source.files(), 1)[0] for c in source.read(split)]
    assert sum(map(len, rows)) == 2


def test_a_file_whose_size_nobody_tells_is_refused(page, monkeypatch):
    monkeypatch.setattr(Page, "unsized", {f"{page}/b.txt"})
    for path in (f"{page}/*.txt", f"{page}/b.txt"):
        with pytest.raises(PathError, match=f"{page}/b.txt: its server reports no size"):
            data_files(path, is_splittable=is_plain)
    with pytest.raises(PathError, match=f"{page}: its server reports no size"):
        data_files(page, is_splittable=is_plain)


class Bucketless(Listing):
    """Of one file, it tells a name without the bucket, as obstore."""

    protocol = "bucketless"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path in self.stored:
            size = len(self.stored[path])
            return {"name": path.partition("/")[2], "size": size, "type": "file"}
        return {"name": path, "size": 0, "type": "directory"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        return [each for each in self._listed() if each["name"].startswith(f"{path}/")]


def test_a_file_is_named_as_it_was_asked_for(monkeypatch):
    fsspec.register_implementation(Bucketless.protocol, Bucketless, clobber=True)
    monkeypatch.setattr(Bucketless, "stored", {"b1/d/a": b"one", "b2/d/a": b"other"})
    directories = ["bucketless://b1/d", "bucketless://b2/d"]
    paths = [f"{each}/a" for each in directories]
    found = data_files(directories, is_splittable=is_plain)
    assert [(each.path, each.size_bytes) for each in found] == [(paths[0], 3), (paths[1], 5)]
    for path in paths:
        files = FsspecFileSystem(parse(path), FileSystemConfig())
        assert files.status(path).path == files.open(path).path == path


class Hosted(Listing):
    """Its names have no host, as those of SFTP, SMB, FTP and WebHDFS."""

    protocol = "hosted"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return infer_storage_options(path)["path"]

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return {}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if path in self.stored:
            return {"name": path, "size": len(self.stored[path]), "type": "file"}
        return {"name": path, "size": 0, "type": "directory"}


@pytest.mark.parametrize("asked_path", ["data", "data/*", "data/a"])
def test_files_stay_on_their_host_where_names_have_none(asked_path, monkeypatch):
    fsspec.register_implementation(Hosted.protocol, Hosted, clobber=True)
    monkeypatch.setattr(Hosted, "stored", {"/data/a": b"one"})
    found = data_files(f"hosted://server/{asked_path}", is_splittable=is_plain)
    assert [each.path for each in found] == ["hosted://server/data/a"]


def test_a_time_without_a_zone_is_the_same_on_hosts_of_other_zones(told, monkeypatch):
    naive = datetime(2026, 11, 27)
    monkeypatch.setattr(Told, "told", staticmethod(lambda _: {"mtime": naive}))
    versions = set()
    try:
        for zone in ("UTC", "Asia/Tokyo"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            versions.add(FsspecFileSystem(parse(told), FileSystemConfig()).status(told).version)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert versions == {f"changed {_DAY.timestamp()}"}


class Renaming(Listing):
    """Names the arguments of `mv` as SFTP does."""

    protocol = "renaming"

    def mv(self, old: str, new: str) -> None:
        stored = type(self).stored
        stored[self._strip_protocol(new)] = stored.pop(self._strip_protocol(old))


@pytest.mark.parametrize("name", ["a", "a[0]"])
def test_a_file_is_renamed_however_a_package_names_the_arguments(monkeypatch, name):
    fsspec.register_implementation(Renaming.protocol, Renaming, clobber=True)
    monkeypatch.setattr(Renaming, "stored", {f"bucket/{name}": b"x", "bucket/b": b"y"})
    FsspecFileSystem(parse("renaming://bucket"), FileSystemConfig()).rename(
        f"renaming://bucket/{name}", "renaming://bucket/b", overwrite=True
    )
    assert Renaming.stored == {"bucket/b": b"x"}


class Bulk(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Has a `mv` of its own that takes patterns, as gcsfs; removes directories as WebHDFS does."""

    protocol = "bulk"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    async_impl = True

    def mv(self, path1: str, path2: str, recursive: bool = False, **_: Any) -> None:
        super().mv(path1, path2, recursive=recursive)

    def rm_file(self, path: str) -> None:
        (super().rmdir if self.isdir(path) else super().rm_file)(path)

    def rmdir(self, path: str) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("package", [MemoryFileSystem, Bulk])
def test_letters_of_patterns_mean_themselves_in_packages_that_take_them_for_patterns(package):
    fsspec.register_implementation(Bulk.protocol, Bulk, clobber=True)
    root = f"{package.protocol}://patterns"
    files = FsspecFileSystem(parse(root), FileSystemConfig())
    files.mkdirs(f"{root}/run[1]/empty")
    package().pipe({f"{root}/{name}": b"" for name in ("run1/a0", "run[1]/a[0]", "run[1]/a0")})
    files.rename(f"{root}/run[1]/a[0]", f"{root}/run[1]/b[0]")
    assert [each.name for each in files.entries(f"{root}/run[1]")] == ["a0", "b[0]", "empty"]
    assert files.delete(f"{root}/run[1]", recursive=True)
    assert [each.name for each in files.entries(root)] == ["run1"]


class Keys(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Has only files, as S3: a directory's own name cannot be copied."""

    protocol = "keys"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        if not self.isfile(path1):
            raise FileNotFoundError("The specified key does not exist.")
        super().cp_file(path1, path2)


def test_a_directory_is_renamed_where_the_store_has_only_files():
    fsspec.register_implementation(Keys.protocol, Keys, clobber=True)
    root = "keys://bucket"
    files = FsspecFileSystem(parse(root), FileSystemConfig())
    for name in ("manifest.json", "tables/user"):
        files.write(f"{root}/.tmp-1/{name}", name.encode())
    files.rename(f"{root}/.tmp-1", f"{root}/step-1")
    assert [each.name for each in files.entries(root)] == ["step-1"]
    for name in ("manifest.json", "tables/user"):
        with files.open(f"{root}/step-1/{name}") as reader:
            assert reader.read_range(0, reader.size_bytes) == name.encode()


class OneConnection(Listing):
    """As fsspec's FTP and SFTP: notes whether two ranges were under way at once."""

    meeting: ClassVar[threading.Barrier]

    def cat_file(self, path: str, start: int = 0, end: int | None = None, **_: Any) -> bytes:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.meeting.wait(0.1)
            return NEW[:2]  # another one came
        return super().cat_file(path, start, end)


@pytest.mark.parametrize(
    ("scheme", "is_shared", "names"),
    [("ftp", False, "aaa"), ("sftp", True, "aaa"), ("sftp", True, "ab"), ("ssh", True, "ab")],
)
def test_ranges_on_one_connection_take_turns(monkeypatch, scheme, is_shared, names):
    """Also those of two files, where fsspec gives out one object for both."""
    kind = type("Kind", (OneConnection,), {"protocol": scheme, "cachable": is_shared})
    monkeypatch.setitem(_registry, scheme, kind)
    monkeypatch.setattr(OneConnection, "stored", {"bucket/a": OLD, "bucket/b": OLD})
    monkeypatch.setattr(OneConnection, "meeting", threading.Barrier(2), raising=False)
    urls = [f"{scheme}://bucket/{name}" for name in names]
    files = {url: FsspecFileSystem(parse(url), FileSystemConfig()).open(url) for url in urls}
    begun = [files[url].start_range(2 * number, 2) for number, url in enumerate(urls)]
    assert b"".join(take() for take in begun) == OLD[: 2 * len(names)]


class Crowded(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """One connection on which each call takes a moment; counts those that meet another."""

    protocol = "sftp"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    inside: ClassVar[threading.Lock] = threading.Lock()
    num_met: ClassVar[int] = 0

    @classmethod
    def call(cls) -> None:
        if not cls.inside.acquire(blocking=False):
            cls.num_met += 1
            return
        threading.Event().wait(0.002)
        cls.inside.release()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.call()
        super().makedirs(path, exist_ok=exist_ok)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.call()
        return super().info(path)

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        self.call()
        file = super().open(path, mode)
        write, close = file.write, file.close
        file.write = lambda piece: (self.call(), write(piece))
        file.close = lambda: (self.call(), close())
        return file


def test_writes_on_one_connection_take_turns_with_all_else(monkeypatch):
    monkeypatch.setitem(_registry, "sftp", Crowded)
    files = FsspecFileSystem(parse("sftp://host/x"), FileSystemConfig())
    files.write("sftp://host/x/there", b"there")

    def content() -> Iterator[bytes]:
        for number in range(8):  # made of what is there, by another call
            assert files.status("sftp://host/x/there").size_bytes == 5
            yield bytes([number])

    writers = [
        threading.Thread(target=files.write, args=(f"sftp://host/x/{name}", content))
        for name in "abc"
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(WAIT_S)
    assert [each.size_bytes for each in files.entries("sftp://host/x")] == [8, 8, 8, 5]
    assert Crowded.num_met == 0


def test_who_takes_another_turn_comes_behind_those_that_wait():
    turns, order = Turns(), list[int]()

    def wait(number: int) -> None:
        with turns:
            order.append(number)

    waiting = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    with turns:
        for number, each in enumerate(waiting):
            each.start()
            wait_until(lambda before=number: turns._num_asked == before + 2)  # type: ignore[misc]
    wait(3)
    for each in waiting:
        each.join(WAIT_S)
    assert order == [0, 1, 2, 3]


class Frozen(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """One connection, whose first write is never answered; each object is a connection."""

    protocol = "sftp"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    is_first: ClassVar[bool] = True
    thaws: ClassVar[threading.Event]
    connecting: ClassVar[Callable[[], object]] = bool

    def __init__(self, **options: Any) -> None:
        Frozen.connecting()
        super().__init__(**options)

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if Frozen.is_first:
            Frozen.is_first = False
            assert self.thaws.wait(WAIT_S)
        return super().open(path, mode)


def test_behind_a_call_that_is_never_answered_others_have_another_connection(monkeypatch):
    monkeypatch.setitem(_registry, "sftp", Frozen)
    monkeypatch.setattr(Frozen, "is_first", True)
    monkeypatch.setattr(Frozen, "thaws", threading.Event(), raising=False)
    config = FileSystemConfig(patience_s=0.2)
    files, beside = (FsspecFileSystem(parse("sftp://host/x"), config) for _ in range(2))
    try:
        with pytest.raises(StorageUnavailable, match="cannot write"):
            files.write("sftp://host/x/a", b"one")
        for each in files, beside, FsspecFileSystem(parse("sftp://host/x"), config):
            each.write("sftp://host/x/a", b"two")
            assert each.status("sftp://host/x/a").size_bytes == 3
    finally:
        Frozen.thaws.set()


@pytest.mark.parametrize("how", ["frozen", "refused"])
def test_a_host_that_is_away_after_a_lost_call_is_unavailable(monkeypatch, how):
    """The new connection has a deadline too, and what a package raises of it is no PathError."""

    def connecting() -> None:
        if how == "refused":
            raise RuntimeError("no banner")
        assert Frozen.thaws.wait(WAIT_S)

    monkeypatch.setitem(_registry, "sftp", Frozen)
    monkeypatch.setattr(Frozen, "is_first", True)
    monkeypatch.setattr(Frozen, "thaws", threading.Event(), raising=False)
    files = FsspecFileSystem(parse("sftp://host/x"), FileSystemConfig(patience_s=0.2))
    monkeypatch.setattr(Frozen, "connecting", connecting)
    try:
        with pytest.raises(StorageUnavailable, match="cannot write"):
            files.write("sftp://host/x/a", b"one")
        with pytest.raises(StorageUnavailable, match=r"cannot connect to .*no (banner|answer)"):
            files.status("sftp://host/x/a")
    finally:
        Frozen.thaws.set()
    monkeypatch.setattr(Frozen, "connecting", bool)
    files.write("sftp://host/x/a", b"two")
