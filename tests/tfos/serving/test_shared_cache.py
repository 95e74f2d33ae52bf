"""Serving: processes that share a cache, killed builders, what is removed and when."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.exports import values, write_export
from tests.tfos.serving.test_export import flip
from tfos.errors import ExportError, SettingsError
from tfos.serving import cache_directory, cache_use, check_record, index_files
from tfos.serving.served_model import ServedModel, load

ROWS = {one: float(one) for one in range(1, 101)}


def serve(path: Path, cache: Path) -> ServedModel:
    return load(path, cache, progress=False)


def locked(path: Path) -> int | None:
    """Lock a file as another process would; None: it is in use."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def refuse_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(index_files.IndexCache, "_build", build)


def hidden(cache: Path) -> list[str]:
    return [each.name for each in cache.iterdir() if each.name.startswith(".")]


def test_what_a_killed_builder_of_another_index_left_is_removed(tmp_path, cache):
    (cache / ".index-k.abc.building").mkdir()
    (cache / ".index-k.abc.building" / "0.rows").touch()
    (cache / ".index-k.lock").touch()
    (cache / ".index-lockless.abc.building").mkdir()
    write_export(tmp_path / "e", ROWS)
    serve(tmp_path / "e", cache)
    assert hidden(cache) == []  # no lock gathers either


def test_what_a_killed_builder_left_makes_room_for_the_next_index(tmp_path, cache, monkeypatch):
    stale = cache / ".index-k.abc.building"
    stale.mkdir()
    real = cache_directory.has_room

    def has_room(directory: Path, nbytes: int) -> bool:
        assert not stale.exists()
        return real(directory, nbytes)

    monkeypatch.setattr(cache_directory, "has_room", has_room)
    write_export(tmp_path / "e", ROWS)
    serve(tmp_path / "e", cache)


def test_what_another_process_builds_is_left_alone(tmp_path, cache):
    staged = cache / ".index-k.abc.building"
    staged.mkdir()
    builder = locked(cache / ".index-k.lock")
    assert builder is not None
    write_export(tmp_path / "e", ROWS)
    serve(tmp_path / "e", cache)
    assert sorted(hidden(cache)) == [staged.name, ".index-k.lock"]
    os.close(builder)


def test_a_lock_that_was_removed_before_it_was_taken_is_no_lock(cache, monkeypatch):
    """Else two would build at once: one with the file that is gone, one with the new one."""
    lock = cache / ".index-k.lock"
    real = fcntl.flock
    removed: list[object] = []

    def flock(descriptor: int, operation: int) -> None:
        if not removed and operation & fcntl.LOCK_EX:
            removed.append(lock.unlink())  # by another process, between open and lock
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with cache_directory.only_builder(cache, "index-k", lambda: None):
        assert removed
        assert lock.exists()
        assert locked(lock) is None


def test_a_child_that_is_forked_while_an_index_is_built_does_not_keep_its_lock(cache):
    hold_child, go = os.pipe()
    with cache_directory.only_builder(cache, "index-k", lambda: None):
        child = os.fork()
        if not child:
            os.close(go)
            os.read(hold_child, 1)
            os._exit(0)
    try:
        builder = locked(cache / ".index-k.lock")
        assert builder is not None
        os.close(builder)
    finally:
        os.close(go)
        os.waitpid(child, 0)
        os.close(hold_child)


def after_closing(path: Path, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Act once, as another process would, when a file is closed here."""
    real = os.close
    acted: list[bool] = []

    def close(descriptor: int) -> None:
        is_it = not acted and os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
        real(descriptor)
        if is_it:
            acted.append(True)
            act()

    monkeypatch.setattr(os, "close", close)


def test_an_index_that_another_process_removes_meanwhile_is_no_error(tmp_path, cache, monkeypatch):
    for number in range(2):
        write_export(tmp_path / f"{number}", {1: float(number)})
    index = serve(tmp_path / "0", cache).index_dirs[0]
    gc.collect()
    after_closing(index / "index.json", lambda: shutil.rmtree(index), monkeypatch)
    assert values(serve(tmp_path / "1", cache).lookup("user", [1])) == [1.0]
    assert not index.exists()


def test_an_index_is_in_use_before_it_has_its_name(tmp_path, cache, monkeypatch):
    """Another process may ask whether it is in use before its builder has opened it."""
    write_export(tmp_path / "e", ROWS)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        renamed = real(path, target)
        assert locked(target / "index.json") is None
        return renamed

    monkeypatch.setattr(Path, "rename", rename)
    assert values(serve(tmp_path / "e", cache).lookup("user", [9])) == [9.0]


def test_an_index_that_is_only_asked_for_is_not_built_again(tmp_path, cache, monkeypatch):
    write_export(tmp_path / "e", ROWS)
    manifest = serve(tmp_path / "e", cache).index_dirs[0] / "index.json"
    gc.collect()
    asking = locked(manifest)
    assert asking is not None
    monkeypatch.setattr("time.sleep", lambda _: os.close(asking))  # it has its answer
    refuse_to_build(monkeypatch)
    assert values(serve(tmp_path / "e", cache).lookup("user", [9])) == [9.0]


def test_an_index_that_is_replaced_while_it_is_marked_is_not_opened(tmp_path, cache, monkeypatch):
    """Else the mark is on files that are gone, and those that are read have none."""
    write_export(tmp_path / "e", ROWS)
    index = serve(tmp_path / "e", cache).index_dirs[0]
    gc.collect()
    real, aside = fcntl.flock, tmp_path / "aside"

    def flock(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH and not aside.exists():
            index.rename(aside)
            shutil.copytree(aside, index)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(FileNotFoundError, match="was removed"):
        index_files.MappedIndex(index, index.name.removeprefix("index-"))


def test_an_overlay_that_another_process_serves_stays(tmp_path, cache, monkeypatch):
    write_export(tmp_path / "e", ROWS)
    write_export(tmp_path / "d1", {1: 11.0}, state="second", base="first")
    write_export(tmp_path / "d2", {2: 22.0}, state="third", base="second")
    mine, others = serve(tmp_path / "e", cache), serve(tmp_path / "e", cache)
    for served in (mine, others):
        served.refresh(tmp_path / "d1")
    overlay = mine.index_dirs[1]
    mine.refresh(tmp_path / "d2")
    assert overlay.exists()
    third = serve(tmp_path / "e", cache)
    with monkeypatch.context() as patched:
        refuse_to_build(patched)
        third.refresh(tmp_path / "d1")
        others.refresh(tmp_path / "d2")
    third.refresh(tmp_path / "d2")
    assert not overlay.exists()  # the last one has gone on
    assert values(third.lookup("user", [1, 2, 3])) == [11.0, 22.0, 3.0]


def test_an_index_has_another_name_before_its_files_go(tmp_path, cache, monkeypatch):
    write_export(tmp_path / "e", ROWS)
    write_export(tmp_path / "d1", {1: 11.0}, state="second", base="first")
    write_export(tmp_path / "d2", {2: 22.0}, state="third", base="second")
    served = serve(tmp_path / "e", cache)
    served.refresh(tmp_path / "d1")
    overlay = served.index_dirs[1]
    (served.index_dirs[0] / "0.ids").write_bytes(b"damaged")
    real, names = shutil.rmtree, []

    def rmtree(path: Path, **options: Any) -> None:
        if Path(path).exists():
            names.append(Path(path).name)
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    served.refresh(tmp_path / "d2")
    assert not overlay.exists()
    serve(tmp_path / "e", cache)
    assert len(names) == 2
    assert all(name.endswith(".gone") for name in names)


def test_a_full_disk_leaves_no_file_open(tmp_path, cache, monkeypatch):
    """Else the space of files that are removed is taken as long as the error lives."""
    write_export(tmp_path / "e", ROWS)
    real, builders = index_files._TableBuilder.__init__, []

    def begin(builder: Any, directory: Path, number: int, source: Any) -> None:
        target = directory / f"{number}.ids"
        opened = Path.open

        def open_full(path: Path, *arguments: Any) -> Any:
            return opened(Path("/dev/full"), "wb") if path == target else opened(path, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", open_full)
            real(builder, directory, number, source)
        builders.append(builder)

    monkeypatch.setattr(index_files._TableBuilder, "__init__", begin)
    with pytest.raises(ExportError, match="Remove old indexes there"):
        serve(tmp_path / "e", cache)
    assert [file.closed for file in builders[0]._files] == [True] * 4


@pytest.mark.parametrize("made", ["tempfile.mkdtemp", "tfos.serving.cache_directory.try_lock"])
def test_a_disk_without_room_for_a_directory_or_a_lock_is_a_sentence(
    tmp_path, cache, monkeypatch, made
):
    write_export(tmp_path / "e", ROWS)

    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(made, full)
    with pytest.raises(ExportError, match="Remove old indexes there"):
        serve(tmp_path / "e", cache)


class Disk:
    """Has room for `count` indexes of the size of the largest one that is there."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 99
        self._cache = cache
        monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=self.free))

    @property
    def free(self) -> int:
        indexes = list(self._cache.glob("index-*"))
        sizes = [sum(file.stat().st_size for file in each.iterdir()) for each in indexes]
        one = max(sizes, default=1 << 20)
        return one * (self.count - len(indexes))


def served_at_once(path: Path, cache: Path) -> ServedModel:
    try:
        return serve(path, cache)
    except ExportError as error:
        raise AssertionError("refused, and not loaded") from error


def test_unused_indexes_make_room_for_the_next_one_oldest_first(tmp_path, cache, monkeypatch):
    """Two were kept whatever the disk had, and the load of a later export failed for ever."""
    disk = Disk(cache, monkeypatch)
    kept = []
    for number in range(3):
        write_export(tmp_path / f"{number}", ROWS, state=f"s{number}")
        kept.append(serve(tmp_path / f"{number}", cache).index_dirs[0].name)
    write_export(tmp_path / "next", ROWS, state="next")
    gc.collect()  # nobody has these open any more
    disk.count = 3
    served = served_at_once(tmp_path / "next", cache)
    assert {each.name for each in cache.iterdir()} == {*kept[1:], served.index_dirs[0].name}
    disk.count = 2
    write_export(tmp_path / "last", ROWS, state="last")
    last = serve(tmp_path / "last", cache)
    assert {each.name for each in cache.iterdir()} == {
        served.index_dirs[0].name,
        last.index_dirs[0].name,
    }
    write_export(tmp_path / "more", ROWS, state="more")
    with pytest.raises(ExportError, match=r"MB are free. Remove old indexes there"):
        serve(tmp_path / "more", cache)
    assert values(served.lookup("user", [1])) == values(last.lookup("user", [1])) == [1.0]


def test_a_full_quota_takes_unused_indexes_too(tmp_path, cache, monkeypatch):
    """No look at the disk tells of it."""
    for number in range(2):
        write_export(tmp_path / f"{number}", ROWS, state=f"s{number}")
        serve(tmp_path / f"{number}", cache)
    gc.collect()
    real = index_files._TableBuilder.write

    def write(builder):
        if len(list(cache.glob("index-*"))) > 0:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return real(builder)

    monkeypatch.setattr(index_files._TableBuilder, "write", write)
    write_export(tmp_path / "next", ROWS, state="next")
    served = serve(tmp_path / "next", cache)
    assert values(served.lookup("user", [1])) == [1.0]
    write_export(tmp_path / "more", ROWS, state="more")
    with pytest.raises(ExportError, match=r"MB are free. Remove old indexes there"):
        serve(tmp_path / "more", cache)


def test_merges_of_a_serving_process_do_not_pile_up(tmp_path, cache):
    write_export(tmp_path / "e", ROWS)
    served = serve(tmp_path / "e", cache)
    loaded = served.index_dirs[0].name
    for number in range(1, 4):  # each of so many rows that it is merged with the whole
        base = "first" if number == 1 else f"s{number - 1}"
        rows = dict.fromkeys(range(1, 51), 10.0 * number)
        write_export(tmp_path / f"d{number}", rows, state=f"s{number}", base=base)
        served.refresh(tmp_path / f"d{number}")
        assert {each.name for each in cache.iterdir()} == {loaded, served.index_dirs[0].name}
        assert values(served.lookup("user", [1, 100])) == [10.0 * number, 100.0]
    write_export(tmp_path / "back", {1: 7.0}, state="back", base="first")
    served.refresh(tmp_path / "back")
    assert values(served.lookup("user", [1, 2])) == [7.0, 2.0]


def test_a_whole_export_leaves_the_one_before_for_who_starts_again(tmp_path, cache, monkeypatch):
    write_export(tmp_path / "e", ROWS)
    served = serve(tmp_path / "e", cache)
    write_export(tmp_path / "f", {**ROWS, 1: 5.0}, state="second")
    served.refresh(tmp_path / "f")
    gc.collect()
    refuse_to_build(monkeypatch)
    assert values(serve(tmp_path / "e", cache).lookup("user", [1])) == [1.0]


class Checks:
    """Counts how often the files of an index are read to compare their digests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = index_files._verify

        def verify(*arguments: Any) -> None:
            self.count += 1
            real(*arguments)

        monkeypatch.setattr(index_files, "_verify", verify)
        # What was written a moment ago would be read once more.
        monkeypatch.setattr(check_record, "TICK_NS", 0)


def test_processes_of_a_host_read_an_index_once_to_check_it(tmp_path, cache, monkeypatch):
    """Each Python worker read and hashed all of it at its start."""
    write_export(tmp_path / "e", ROWS)
    serve(tmp_path / "e", cache)
    checks = Checks(monkeypatch)
    for _ in range(3):
        assert values(serve(tmp_path / "e", cache).lookup("user", [7])) == [7.0]
    assert checks.count == 1
    assert hidden(cache) == []
    monkeypatch.setattr(check_record, "boot_id", lambda: "another boot")
    for _ in range(2):
        serve(tmp_path / "e", cache)
    assert checks.count == 2


@pytest.mark.parametrize("column", ["ids", "rows", "removed", "starts"])
def test_an_index_that_is_written_to_is_checked_again(tmp_path, cache, monkeypatch, capsys, column):
    write_export(tmp_path / "e", ROWS)
    index = serve(tmp_path / "e", cache).index_dirs[0]
    checks = Checks(monkeypatch)
    serve(tmp_path / "e", cache)
    file = index / f"0.{column}"
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[8] ^= 1
    await_tick(file)
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps times
    assert values(serve(tmp_path / "e", cache).lookup("user", [*ROWS])) == list(ROWS.values())
    assert f"0.{column} is damaged" in capsys.readouterr().err
    assert checks.count > 1


def await_tick(file: Path) -> None:
    """Wait until what is written to a file gets another time."""
    deadline_s = time.monotonic() + 10
    before, probe = file.stat().st_ctime_ns, file.with_name("probe")
    while True:
        probe.touch()
        if probe.stat().st_ctime_ns > before:
            break
        assert time.monotonic() < deadline_s
    probe.unlink()


def test_files_that_are_too_young_to_tell_are_not_recorded(tmp_path, cache, monkeypatch):
    """Within one tick of the clock of files a second write does not show."""
    write_export(tmp_path / "e", ROWS)
    serve(tmp_path / "e", cache)
    checks = Checks(monkeypatch)
    monkeypatch.setattr(check_record, "TICK_NS", 3600 * 10**9)
    for _ in range(2):
        serve(tmp_path / "e", cache)
    assert checks.count == 2


def test_a_cache_that_is_only_read_is_checked_at_each_load(tmp_path, cache, monkeypatch):
    write_export(tmp_path / "e", ROWS)
    serve(tmp_path / "e", cache)
    checks = Checks(monkeypatch)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    monkeypatch.setattr(cache_directory, "try_lock", refuse)
    refuse_to_build(monkeypatch)
    for _ in range(2):
        assert values(serve(tmp_path / "e", cache).lookup("user", [7])) == [7.0]
    assert checks.count == 2


@pytest.mark.parametrize(("name", "verify"), [("index.json", False), ("0.rows", True)])
def test_damage_in_a_cache_that_is_only_read_is_told(
    tmp_path, cache, monkeypatch, capsys, name, verify
):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    write_export(tmp_path / "e", ROWS)
    flip(serve(tmp_path / "e", cache).index_dirs[0] / name, 150 if name == "index.json" else 8)
    monkeypatch.setattr(cache_use, "move_aside", refuse)
    monkeypatch.setattr(cache_directory, "try_lock", refuse)
    with pytest.raises(SettingsError, match="cannot be built there"):
        load(tmp_path / "e", cache, progress=False, verify=verify)
    assert f"{name} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff"])
def test_a_record_that_cannot_be_read_is_none(tmp_path, cache, monkeypatch, content):
    write_export(tmp_path / "e", ROWS)
    index = serve(tmp_path / "e", cache).index_dirs[0]
    checks = Checks(monkeypatch)
    (index / check_record.RECORD).write_bytes(content)
    for _ in range(2):
        serve(tmp_path / "e", cache)
    assert checks.count == 1


def test_a_cache_is_made_where_new_files_are_a_groups(tmp_path):
    before = os.umask(0o002)
    try:
        made = cache_directory.cache_directory(tmp_path / "home" / "cache")
    finally:
        os.umask(before)
    assert made.stat().st_mode & 0o777 == 0o700
