"""Serving: lookups by an index, refreshing it while others read, what goes wrong with it."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import stat
import sys
import threading
import types
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.errors import IdError, ShapeError
from ps.manifest.rule_spec import Add
from ps.manifest.table_spec import TableSpec
from ps.string_ids.ids import hashed
from tests.support.exports import values, write_export
from tests.support.ps_cluster import run_all
from tests.tfos.serving.test_export import flip
from tfos.console.console import Console
from tfos.errors import ExportError, SettingsError
from tfos.serving import cache_directory, cache_use, index_files, load, served_model
from tfos.serving.served_model import ServedModel

ROWS = {one: float(one) for one in range(1, 101)}


def serve(path: Path, cache: Path, **options: Any) -> ServedModel:
    return load(path, cache, progress=False, **options)


@pytest.fixture
def served(tmp_path: Path, cache: Path) -> ServedModel:
    write_export(tmp_path / "e", ROWS)
    return serve(tmp_path / "e", cache)


def test_lookups_have_the_shape_of_the_ids(served):
    ids = np.array([[1, 100], [7, 101]])
    rows = served.lookup("user", ids)
    assert rows.shape == (2, 2, 4)
    assert rows.dtype == np.float32
    assert values(rows.reshape(4, 4)) == [1.0, 100.0, 7.0, 0.0]  # 101 is unseen
    assert served.lookup("user", 5).tolist() == [5.0] * 4
    assert served.lookup("user", []).shape == (0, 4)
    assert values(served.rows("user", np.array([3]))) == [3.0]
    assert served.num_rows("user") == 100


def test_a_given_array_is_filled(served):
    out = np.empty((2, 4), np.float32)
    assert served.lookup("user", [1, 2], out) is out
    assert values(out) == [1.0, 2.0]
    for wrong in (np.empty((2, 4)), np.empty((3, 4), np.float32), np.empty((4, 2), np.float32).T):
        with pytest.raises(ShapeError, match=r"fills float32\[2, 4\] in C order, got"):
            served.lookup("user", [1, 2], wrong)


@pytest.mark.parametrize("ids", [[-1], [0.5], [True], [None], [[1], [2, 3]]])
def test_what_is_no_id_is_refused(served, ids):
    with pytest.raises(IdError, match="table 'user'"):
        served.lookup("user", ids)


def test_text_is_refused_where_the_training_had_integers(tmp_path, cache, served):
    assert values(served.lookup("user", ["17"])) == [0.0]  # nobody says what its ids are
    sources: tuple[Literal["integers", "strings"], ...] = ("integers", "strings")
    for source in sources:
        spec = TableSpec(name="user", dim=4, rule=Add(), id_source=source)
        write_export(tmp_path / source, {hashed(["17"])[0]: 2.0, 17: 3.0}, spec=spec)
        found = serve(tmp_path / source, cache)
        assert values(found.lookup("user", [17])) == [3.0]  # of strings: a hash
        if source == "strings":
            assert values(found.lookup("user", ["17", b"17"])) == [2.0, 2.0]
            continue
        for ids in (["17"], np.array([["17"]]), np.array([b"17"], object)):
            with pytest.raises(IdError, match=r"with integers as ids, got the text .*17'.*astype"):
                found.lookup("user", ids)


def test_an_unknown_table_is_refused(served):
    for call in (served.lookup, served.rows):
        with pytest.raises(ExportError, match="no table 'item'; the export has 'user'"):
            call("item", np.array([1]))
    with pytest.raises(ExportError, match="no table 'item'"):
        served.num_rows("item")


def test_an_empty_table_and_one_of_large_ids(tmp_path, cache):
    write_export(tmp_path / "empty", {})
    assert values(serve(tmp_path / "empty", cache).lookup("user", [1, 2])) == [0.0, 0.0]
    spec = TableSpec(name="user", dim=4, rule=Add(), id_kind="uint64", dtype="float64")
    write_export(tmp_path / "large", {2**64 - 1: 1.5}, spec=spec)
    served = serve(tmp_path / "large", cache)
    assert values(served.rows("user", np.array([-1, 3]))) == [1.5, 0.0]
    found = served.lookup("user", [2**64 - 1, 3])
    assert found.dtype == np.float64
    assert values(found) == [1.5, 0.0]


def test_an_index_is_built_once(tmp_path, cache, served, monkeypatch):
    def build(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(index_files.IndexCache, "_build", build)
    assert values(serve(tmp_path / "e", cache).lookup("user", [9])) == [9.0]
    (index,) = served.index_dirs
    assert index.parent == cache
    assert index.stat().st_mode & 0o777 == 0o700


def test_indexes_that_nobody_has_open_make_room_for_new_ones(tmp_path, cache):
    def directories() -> set[str]:
        return {each.name for each in cache.glob("index-*")}

    def served_at(number: int) -> ServedModel:
        write_export(tmp_path / f"{number}", {1: float(number)})
        return serve(tmp_path / f"{number}", cache)

    used = served_at(0)
    earlier = [served_at(number).index_dirs[0].name for number in (1, 2, 3)]
    assert directories() == {used.index_dirs[0].name, *earlier}  # the last one was built just now
    (cache / ".index-x.y.gone").mkdir()  # of a process that was killed
    serve(tmp_path / "1", cache)  # opened last
    newest = served_at(4)
    stay = {used.index_dirs[0].name, earlier[0], earlier[2], newest.index_dirs[0].name}
    assert directories() == stay
    assert not list(cache.glob(".index-*.gone"))
    assert values(used.lookup("user", [1])) == [0.0]
    assert values(serve(tmp_path / "2", cache).lookup("user", [1])) == [2.0]  # built again


def test_an_index_that_is_being_removed_is_built_again(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(cache_use, "HOLD_TIMEOUT_S", 0.0)
    write_export(tmp_path / "e", ROWS)
    manifest = serve(tmp_path / "e", cache).index_dirs[0] / cache_use.INDEX_MANIFEST
    key = manifest.parent.name.removeprefix("index-")
    gc.collect()
    with manifest.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(FileNotFoundError, match="is being removed"):
            index_files.MappedIndex(manifest.parent, key)
        assert values(serve(tmp_path / "e", cache).lookup("user", [9])) == [9.0]


@pytest.mark.parametrize("column", ["ids", "rows", "removed", "starts"])
def test_a_damaged_index_is_built_again(tmp_path, cache, served, capsys, column):
    file = served.index_dirs[0] / f"0.{column}"
    inode = file.stat().st_ino
    flip(file, 8)
    again = serve(tmp_path / "e", cache, verify=False)
    assert (again.index_dirs[0] / f"0.{column}").stat().st_ino == inode  # not looked at
    again = serve(tmp_path / "e", cache)
    assert values(again.lookup("user", [*ROWS])) == list(ROWS.values())
    assert f"0.{column} is damaged" in capsys.readouterr().err
    flip(again.index_dirs[0] / "index.json", 150)
    assert values(serve(tmp_path / "e", cache).lookup("user", [7])) == [7.0]
    os.truncate(again.index_dirs[0] / f"0.{column}", 3)
    again = serve(tmp_path / "e", cache, verify=False)
    assert values(again.lookup("user", [7])) == [7.0]


@pytest.mark.parametrize("name", ["0.rows", "index.json"])
def test_a_damaged_index_is_read_once_and_told_once(
    tmp_path, cache, served, capsys, monkeypatch, name
):
    real, read = index_files._verify, []

    def verify(table: index_files.MappedTable, record: index_files.IndexedTable) -> None:
        read.append(table.table.name)
        real(table, record)

    monkeypatch.setattr(index_files, "_verify", verify)
    flip(served.index_dirs[0] / name, 150 if name == "index.json" else 8)
    again = serve(tmp_path / "e", cache)
    assert values(again.lookup("user", [*ROWS])) == list(ROWS.values())
    assert capsys.readouterr().err.count("is built again") == 1
    assert len(read) <= 1


def test_an_index_of_another_export_is_built_again(tmp_path, cache, served, capsys):
    write_export(tmp_path / "other", {1: 5.0}, state="other")
    other = serve(tmp_path / "other", cache).index_dirs[0]
    mine = served.index_dirs[0]
    mine.rename(cache / "aside")
    other.rename(mine)
    assert values(serve(tmp_path / "e", cache).lookup("user", [1, 2])) == [1.0, 2.0]
    assert "is another index" in capsys.readouterr().err


def test_a_full_disk_is_a_sentence(tmp_path, cache, monkeypatch):
    write_export(tmp_path / "e", ROWS)
    real = index_files._TableBuilder.write

    def full(builder: Any) -> Any:
        yield from real(builder)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(index_files._TableBuilder, "write", full)
    with pytest.raises(ExportError, match=r"quota or .*df -i.*MB are free. Remove old indexes"):
        serve(tmp_path / "e", cache)
    assert not [each for each in cache.iterdir() if each.is_dir()]
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=10))
    with pytest.raises(ExportError, match=r"takes [\d.]+ MB in .*, but only 0\.0 MB are free"):
        serve(tmp_path / "e", cache)


def test_a_cache_that_was_removed_is_made_again(tmp_path, cache, served):
    shutil.rmtree(cache)
    write_export(tmp_path / "d", {7: 70.0}, state="second", base="first")
    served.refresh(tmp_path / "d")
    assert values(served.lookup("user", [7, 8])) == [70.0, 8.0]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_what_a_killed_builder_left_is_removed(tmp_path, cache, served):
    name = served.index_dirs[0].name
    stale = cache / f".{name}.abc.building"
    served.index_dirs[0].rename(stale)
    assert values(serve(tmp_path / "e", cache).lookup("user", [4])) == [4.0]
    assert not stale.exists()


def test_two_that_build_at_once_build_once(tmp_path, cache, monkeypatch):
    write_export(tmp_path / "e", ROWS)
    real, has_begun, go_on = index_files.IndexCache._build, threading.Event(), threading.Event()
    builds: list[object] = []

    def slow(*arguments: Any) -> index_files.MappedIndex:
        builds.append(arguments)
        has_begun.set()
        assert go_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(index_files.IndexCache, "_build", slow)
    waiting = threading.Event()

    def line(_: Console, text: str) -> None:
        if "waiting for it" in text:
            waiting.set()

    monkeypatch.setattr(Console, "line", line)
    found: list[ServedModel] = []
    both = [
        threading.Thread(target=lambda: found.append(serve(tmp_path / "e", cache)))
        for _ in range(2)
    ]
    both[0].start()
    assert has_begun.wait(30)
    both[1].start()
    assert waiting.wait(30)
    go_on.set()
    for thread in both:
        thread.join(30)
    assert len(builds) == 1
    assert [values(each.lookup("user", [8])) for each in found] == [[8.0], [8.0]]


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path, cache):
    write_export(tmp_path / "e", {1: 1.0})
    for index in load(tmp_path / "e", cache, progress=False).index_dirs:
        shutil.rmtree(index)
        (cache / f".{index.name}.lock").mkdir()  # for root, whom no mode keeps out
    with pytest.raises(SettingsError, match=r"index-.* cannot be built there: .*cache_dir"):
        load(tmp_path / "e", cache, progress=False)


def test_a_builder_that_hangs_is_named(cache, monkeypatch):
    monkeypatch.setattr(cache_directory, "BUILD_TIMEOUT_S", 0.0)
    with (
        cache_directory.only_builder(cache, "index-x", lambda: None),
        pytest.raises(ExportError, match=r"more than 0 s; end it, or remove .*index-x\.lock"),
        cache_directory.only_builder(cache, "index-x", lambda: None),
    ):
        pass


def test_a_cache_that_others_can_change_is_refused(tmp_path):
    write_export(tmp_path / "e", ROWS)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(SettingsError, match="others can write it"):
        serve(tmp_path / "e", open_to_all)
    with pytest.raises(SettingsError, match="on a local disk, got hdfs://"):
        load(tmp_path / "e", "hdfs://nn/cache")


def test_a_cache_below_a_link_stays_where_the_link_led(tmp_path, cache):
    write_export(tmp_path / "e", ROWS)
    (tmp_path / "link").symlink_to(cache)
    served = serve(tmp_path / "e", tmp_path / "link" / "indexes")
    assert served.index_dirs[0].parent == cache / "indexes"


def test_the_default_cache_is_the_users(tmp_path, cache, monkeypatch):
    write_export(tmp_path / "e", ROWS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    served = load(tmp_path / "e", progress=False)
    assert served.index_dirs[0].parent == cache / "tfos" / "serving"
    assert served.index_dirs[0].parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TFOS_SERVING_CACHE", str(cache))
    assert load(tmp_path / "e", progress=False).index_dirs[0].parent == cache


def test_a_place_that_is_refused_names_the_variable_for_sparks_tasks(tmp_path, monkeypatch):
    """On YARN a task's home is no directory of its user, and a column has no `cache_dir`."""
    write_export(tmp_path / "e", ROWS)
    monkeypatch.delenv("TFOS_SERVING_CACHE", raising=False)
    (tmp_path / "file").touch()
    (tmp_path / "open" / "tfos" / "serving").mkdir(parents=True)
    (tmp_path / "open" / "tfos" / "serving").chmod(0o777)
    for home in ("file", "open"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        with pytest.raises(SettingsError, match=r"spark\.executorEnv\.TFOS_SERVING_CACHE"):
            load(tmp_path / "e", progress=False)
    monkeypatch.setattr(cache_directory, "user_cache", lambda: None)
    with pytest.raises(SettingsError, match=r"spark\.executorEnv\.TFOS_SERVING_CACHE"):
        load(tmp_path / "e", progress=False)


@pytest.mark.parametrize("home", ["file", "open", None])
@pytest.mark.parametrize(
    "variable", ["LOCAL_DIRS", "SPARK_LOCAL_DIRS", "SPARK_EXECUTOR_DIRS", "TMPDIR"]
)
def test_a_task_without_a_home_keeps_its_indexes_with_sparks_scratch_files(
    tmp_path, monkeypatch, home, variable
):
    write_export(tmp_path / "e", ROWS)
    for name in ("TFOS_SERVING_CACHE", "XDG_CACHE_HOME", "LOCAL_DIRS", "SPARK_LOCAL_DIRS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").touch()
    (tmp_path / "open" / ".cache").mkdir(parents=True)
    (tmp_path / "open" / ".cache").chmod(0o777)
    if home is None:
        monkeypatch.setattr(cache_directory, "user_cache", lambda: None)
    else:
        monkeypatch.setenv("HOME", str(tmp_path / home))
    (tmp_path / "scratch").mkdir()
    separator = ":" if variable == "SPARK_EXECUTOR_DIRS" else ","
    given = separator.join(("", str(tmp_path / "none"), str(tmp_path / "scratch")))
    monkeypatch.setenv(variable, given)
    temporary = tmp_path / ("scratch" if variable == "TMPDIR" else "none")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    found = tmp_path / "scratch" / f"tfos-serving-{os.geteuid()}"
    assert run_all(lambda: cache_directory.cache_directory(None)) == [found]
    assert found.stat().st_mode & 0o777 == 0o700
    found.chmod(0o777)
    with pytest.raises(SettingsError, match=r"spark\.executorEnv\.TFOS_SERVING_CACHE"):
        cache_directory.cache_directory(None)


def test_deltas_change_and_remove_rows(tmp_path, served):
    write_export(tmp_path / "d1", {1: 11.0, 2: None, 500: 5.0}, state="second", base="first")
    write_export(tmp_path / "d2", {2: 22.0, 500: None}, state="third", base="second")
    served.refresh(tmp_path / "d1")
    assert values(served.lookup("user", [1, 2, 3, 500])) == [11.0, 0.0, 3.0, 5.0]
    overlay = served.index_dirs[1]
    served.refresh(tmp_path / "d2")
    served.refresh(tmp_path / "d2")  # it is there already
    assert values(served.lookup("user", [1, 2, 3, 500])) == [11.0, 22.0, 3.0, 0.0]
    assert served.state == "third"
    assert not overlay.exists()
    found = [zip(each.ids, each.rows[:, 0], strict=True) for each in served._index.batches("user")]
    assert dict(chain.from_iterable(found)) == {**ROWS, 1: 11.0, 2: 22.0}


def test_a_delta_of_what_was_loaded_replaces_earlier_ones(tmp_path, served):
    write_export(tmp_path / "d1", {1: 11.0, 2: None}, state="second", base="first")
    write_export(tmp_path / "both", {1: 11.0, 3: 33.0}, state="third", base="first")
    served.refresh(tmp_path / "d1")
    served.refresh(tmp_path / "both")
    assert values(served.lookup("user", [1, 2, 3])) == [11.0, 2.0, 33.0]


def test_many_changes_become_one_index(tmp_path, cache, served):
    changed = {one: -1.0 if one % 2 else None for one in range(1, 61)}
    write_export(tmp_path / "d", changed, state="second", base="first")
    served.refresh(tmp_path / "d")
    assert len(served.index_dirs) == 1
    assert served.num_rows("user") == 70
    assert values(served.lookup("user", [1, 2, 61])) == [-1.0, 0.0, 61.0]
    write_export(tmp_path / "d2", {1: 7.0}, state="third", base="second")
    served.refresh(tmp_path / "d2")
    assert values(served.lookup("user", [1, 2, 61])) == [7.0, 0.0, 61.0]


def test_a_whole_export_replaces_everything(tmp_path, served):
    write_export(tmp_path / "new", {1: 5.0}, state="new")
    served.refresh(tmp_path / "new")
    assert values(served.lookup("user", [1, 2])) == [5.0, 0.0]


def test_a_whole_export_of_the_state_that_is_served_begins_its_deltas(tmp_path, served):
    """A step's whole export and a delta up to that step have the same state."""
    write_export(tmp_path / "d1", {1: 11.0}, state="second", base="first")
    write_export(tmp_path / "whole", {**ROWS, 1: 11.0}, state="second")
    served.refresh(tmp_path / "d1")
    served.refresh(tmp_path / "whole")
    assert len(served.index_dirs) == 1
    for number in (3, 4):  # each of the whole export
        delta = tmp_path / f"d{number}"
        write_export(delta, {number: 0.5}, state=f"s{number}", base="second")
        served.refresh(delta)
    assert values(served.lookup("user", [1, 2, 3, 4])) == [11.0, 2.0, 3.0, 0.5]


def test_a_model_beside_the_state_that_is_served_is_taken(tmp_path, cache, monkeypatch):
    (tmp_path / "file").write_bytes(b"weights")
    write_export(tmp_path / "d1", {1: 11.0}, state="second", base="first")
    whole = {**ROWS, 1: 11.0}
    write_export(tmp_path / "whole", whole, state="second", model=tmp_path / "file")
    write_export(tmp_path / "e", ROWS)
    served, model = serve(tmp_path / "e", cache), FakeModel()
    keras_export = types.SimpleNamespace(load_model=lambda path, **_: model)
    monkeypatch.setitem(sys.modules, "tfos.keras.export", keras_export)
    served.refresh(tmp_path / "d1")
    served.refresh(tmp_path / "whole")
    assert served.model is model


def test_a_delta_of_another_state_is_refused_with_both(tmp_path, cache, served):
    write_export(tmp_path / "d", {1: 5.0}, state="z", base="elsewhere")
    with pytest.raises(ExportError, match="delta of the state elsewhere, but first is served"):
        served.refresh(tmp_path / "d")
    with pytest.raises(ExportError, match=r"of the state elsewhere. load\(\) the whole .*in order"):
        serve(tmp_path / "d", cache)
    other = TableSpec(name="user", dim=5, rule=Add())
    write_export(tmp_path / "wide", {1: 5.0}, state="z", base="first", spec=other)
    with pytest.raises(
        ExportError, match=r"'user' \(float32\[5\], .*but 'user' \(float32\[4\], int64"
    ):
        served.refresh(tmp_path / "wide")
    assert values(served.lookup("user", [1])) == [1.0]


def test_a_damaged_delta_changes_nothing(tmp_path, served):
    write_export(tmp_path / "d", {1: 5.0}, state="second", base="first")
    flip(tmp_path / "d" / "tables" / "user" / "part-00000.parquet", 50)
    with pytest.raises(ExportError, match="is damaged"):
        served.refresh(tmp_path / "d")
    assert served.state == "first"
    assert values(served.lookup("user", [1])) == [1.0]


def test_deltas_of_the_loaded_export_go_on_after_a_large_one(tmp_path, cache, served):
    """As a running job writes them: each replaces those before it, also rows that changed back."""
    large = {one: -float(one) for one in range(1, 60)}
    write_export(tmp_path / "d1", large, state="second", base="first")
    write_export(tmp_path / "d2", {1: 5.0, 101: 7.0}, state="third", base="first")
    served.refresh(tmp_path / "d1")
    assert len(served.index_dirs) == 1  # merged with the base
    served.refresh(tmp_path / "d2")
    assert served.state == "third"
    assert values(served.lookup("user", [1, 2, 59, 60, 101])) == [5.0, 2.0, 59.0, 60.0, 7.0]


def test_ids_that_deltas_have_removed_read_as_the_newest_vector_of_unseen_ids(tmp_path, cache):
    """All exports of the tests had zeros for them, which are also what a removed row is read as."""

    def table(unseen: float) -> TableSpec:
        return TableSpec(name="user", dim=4, rule=Add(), unseen=(unseen,) * 4)

    write_export(tmp_path / "e", ROWS, spec=table(7.0))
    served = serve(tmp_path / "e", cache)

    def refresh(number: int, rows: dict[int, float | None], unseen: float) -> None:
        path, spec = tmp_path / f"{number}", table(unseen)
        write_export(path, rows, state=f"s{number}", base=served.state, spec=spec)
        served.refresh(path)

    refresh(1, {1: None, 2: 22.0}, 7.0)
    assert values(served.lookup("user", [1, 2, 3, 999])) == [7.0, 22.0, 3.0, 7.0]
    refresh(2, {3: None}, 8.0)  # the program that goes on has another one
    assert values(served.lookup("user", [1, 2, 3, 999])) == [8.0, 22.0, 8.0, 8.0]
    assert served.num_rows("user") == 101  # the 100 that were loaded, and one that has changed
    refresh(3, dict.fromkeys(range(4, 61)), 9.0)
    assert len(served.index_dirs) == 1  # merged with the base
    assert served.num_rows("user") == 41
    assert values(served.lookup("user", [1, 2, 3, 4, 61, 999])) == [9.0, 22.0, 9.0, 9.0, 61.0, 9.0]


class FakeLayer:
    source: Any = None

    def bind(self, source: Any) -> None:
        self.source = source


class FakeModel:
    """Looks its table up twice in one call."""

    def __init__(self) -> None:
        self.layer = FakeLayer()
        self.between: Callable[[], None] = lambda: None

    def _flatten_layers(self) -> list[object]:
        return [object(), self.layer]

    def predict_on_batch(self, batch: Any) -> Any:
        first = self.layer.source.rows("user", batch)
        self.between()
        return first + self.layer.source.rows("user", batch)


def test_a_prediction_sees_one_state(tmp_path, cache, monkeypatch):
    (tmp_path / "file").write_bytes(b"weights")
    write_export(tmp_path / "e", ROWS, model=tmp_path / "file")
    write_export(tmp_path / "d", {1: 100.0}, state="second", base="first")
    served, model = serve(tmp_path / "e", cache), FakeModel()
    keras_export = types.SimpleNamespace(load_model=lambda path, **_: model)
    monkeypatch.setitem(sys.modules, "tfos.keras.export", keras_export)  # Keras takes seconds
    refreshing = threading.Thread(target=lambda: served.refresh(tmp_path / "d"))

    def refresh() -> None:
        refreshing.start()
        with served._changed:
            assert served._changed.wait_for(lambda: served._is_swapping, 30)

    model.between = refresh
    real = served_model.ServedModel._wait

    def noted(self: ServedModel, *arguments: Any) -> None:
        self._changed.notify_all()
        real(self, *arguments)

    monkeypatch.setattr(served_model.ServedModel, "_wait", noted)
    assert values(served.predict(np.array([1]))) == [2.0]
    refreshing.join(30)
    model.between = lambda: None
    assert values(served.predict(np.array([1]))) == [200.0]
    assert served.model is model


def test_a_prediction_that_waits_for_a_refresh_is_made_by_the_newer_model(
    tmp_path, cache, monkeypatch
):
    (tmp_path / "file").write_bytes(b"weights")
    write_export(tmp_path / "e", ROWS, model=tmp_path / "file")
    whole = {1: 100.0}
    write_export(tmp_path / "newer", whole, state="second", model=tmp_path / "file")
    served, older, newer = serve(tmp_path / "e", cache), FakeModel(), FakeModel()
    models = iter([older, newer])
    keras_export = types.SimpleNamespace(load_model=lambda path, **_: next(models))
    monkeypatch.setitem(sys.modules, "tfos.keras.export", keras_export)
    newer.predict_on_batch = lambda batch: served.rows("user", batch) * 0 + 7.0  # type: ignore[method-assign]
    refreshing = threading.Thread(target=served.refresh, args=(tmp_path / "newer",))
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(served.predict(np.array([1]))))
    kinds: list[str] = []
    real = served_model.ServedModel._wait

    def noted(self: ServedModel, is_over: Callable[[], bool], what: str) -> None:
        kinds.append(what)
        self._changed.notify_all()
        real(self, is_over, what)

    monkeypatch.setattr(served_model.ServedModel, "_wait", noted)

    def has_come(what: str) -> bool:
        return what in kinds[1:]  # behind the first predict

    def come_both() -> None:
        older.between = lambda: None
        for thread, what in ((refreshing, "a predict"), (waiting, "a refresh")):
            thread.start()
            with served._changed:
                assert served._changed.wait_for(partial(has_come, what), 30)

    older.between = come_both
    assert values(served.predict(np.array([1]))) == [2.0]
    for thread in (refreshing, waiting):
        thread.join(30)
    assert [values(each) for each in answers] == [[7.0]]


class LateLock:
    """A lock that somebody else takes first."""

    def __init__(self, first: Callable[[], object]) -> None:
        self._lock, self._firsts = threading.Lock(), [first]

    def __enter__(self) -> None:
        if self._firsts:
            self._firsts.pop()()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_model_that_is_loaded_late_in_a_refresh_is_not_taken_away(tmp_path, cache, monkeypatch):
    """A predict that has loaded it, and waits for the refresh, would find none."""
    (tmp_path / "file").write_bytes(b"weights")
    write_export(tmp_path / "e", ROWS, model=tmp_path / "file")
    write_export(tmp_path / "newer", {1: 100.0}, state="second", model=tmp_path / "file")
    served, older, newer = serve(tmp_path / "e", cache), FakeModel(), FakeModel()
    models = iter([older, newer])
    keras_export = types.SimpleNamespace(load_model=lambda path, **_: next(models))
    monkeypatch.setitem(sys.modules, "tfos.keras.export", keras_export)
    answers: list[Any] = []
    served._loading = LateLock(lambda: answers.append(served.predict(np.array([1]))))  # type: ignore[assignment]
    served.refresh(tmp_path / "newer")
    assert [values(each) for each in answers] == [[2.0]]
    assert served._model is newer
    assert values(served.predict(np.array([1]))) == [200.0]


def test_tables_alone_have_no_model(served):
    with pytest.raises(ExportError, match=r"has no model\.keras, only tables"):
        served.predict(np.array([1]))


def test_a_predict_that_hangs_ends_a_refresh(tmp_path, cache, served, monkeypatch):
    write_export(tmp_path / "d", {1: 5.0}, state="second", base="first")
    monkeypatch.setattr(served_model, "PREDICT_TIMEOUT_S", 0.0)
    with served._one_state(), pytest.raises(ExportError, match="a predict of this model has not"):
        served.refresh(tmp_path / "d")
    assert values(served.lookup("user", [1])) == [1.0]
    served.refresh(tmp_path / "d")
    assert values(served.lookup("user", [1])) == [5.0]


@pytest.mark.slow
@settings(max_examples=20)
@given(
    st.dictionaries(st.integers(0, 30), st.floats(-5, 5, width=32), max_size=20),
    st.lists(
        st.dictionaries(
            st.integers(0, 30), st.none() | st.floats(-5, 5, width=32), min_size=1, max_size=9
        ),
        max_size=4,
    ),
)
def test_any_chain_of_deltas(tmp_path_factory, rows, deltas):
    root = tmp_path_factory.mktemp("chain")
    (root / "cache").mkdir(mode=0o700)
    write_export(root / "e", rows, state="s0")
    served = serve(root / "e", root / "cache")
    for number, delta in enumerate(deltas):
        write_export(root / f"d{number}", delta, state=f"s{number + 1}", base=f"s{number}")
        served.refresh(root / f"d{number}")
        rows = {**rows, **delta}
    assert values(served.lookup("user", np.arange(31))) == [
        rows.get(one) or 0.0 for one in range(31)
    ]
