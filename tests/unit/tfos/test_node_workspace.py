"""The private files of a node: where they lie, who may read them, that they go."""

import shutil
import stat
import tempfile

import pytest

from tfos.node.spec import Executor
from tfos.node.workspace import Workspace


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = tmp_path / ("d" * 120)
    deep.mkdir()

    def make_workspace(log_dir=""):
        executor = Executor("1", "h", 0, 1, "/", "", str(deep), log_dir)
        return Workspace(executor, "worker:1", 2, "c1")

    return make_workspace


def test_directories_are_private_and_sockets_lie_where_their_paths_stay_short(make, tmp_path):
    workspace = make()
    for path in (workspace.directory, workspace.socket_dir, workspace.subdirectory("tmp")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert workspace.socket_dir.parent == tmp_path
    assert workspace.directory.parent != tmp_path


def test_a_log_beside_the_executors_stays_and_the_rest_goes(make, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    workspace = make(str(logs))
    workspace.log_path.write_text("last words")
    workspace.subdirectory("tensorboard").joinpath("events").write_text("x")
    workspace.remove()
    assert not workspace.directory.exists()
    assert not workspace.socket_dir.exists()
    assert [path.name for path in logs.iterdir()] == ["tfos-c1-worker-1-2.log"]
    assert workspace.log_is_kept


def test_without_such_a_place_the_log_goes_with_the_node(make):
    workspace = make()
    workspace.log_path.write_text("x")
    assert not workspace.log_is_kept
    workspace.remove()
    workspace.remove()
    assert not workspace.log_path.exists()


def test_a_directory_that_vanishes_under_the_removal_is_no_error(make, monkeypatch, caplog):
    workspace = make()
    (workspace.directory / "a").write_text("x")
    remove = shutil.rmtree

    def race(path):
        monkeypatch.setattr(shutil, "rmtree", remove)
        raise FileNotFoundError(f"{path}/a was removed by the executor")

    monkeypatch.setattr(shutil, "rmtree", race)
    workspace.remove()
    assert not workspace.directory.exists()
    assert caplog.text == ""


def test_a_directory_that_cannot_be_removed_is_told_once(make, monkeypatch, caplog):
    workspace = make()

    def refuse(path):
        raise PermissionError(f"{path} is busy")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    workspace.remove()
    assert caplog.text.count("cannot remove") == 2
