"""The private files of a node: where they lie, who may read them, that they go."""

import shutil
import stat
import subprocess
import sys
import tempfile

import msgspec
import pytest

from rpc import process_id
from rpc.endpoint import boot_id
from rpc.process_id import ProcessId
from rpc.transport.listen import short_private_directory
from tests.support.full_disk import file_limit
from tfos.node import workspace as node_workspace
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


def test_sockets_lie_in_tmp_where_the_temporary_directory_is_deep_itself(
    make, tmp_path, monkeypatch
):
    """As TMPDIR of a batch system's job."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("d" * 120)))
    workspace = make()
    try:
        assert str(workspace.socket_dir.parent) == "/tmp"
        private = short_private_directory(str(workspace.socket_dir))
        assert len(bytes(private / "s")) <= 107
    finally:
        workspace.remove()
    assert not workspace.socket_dir.exists()


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


def owner_of(path, **changes):
    """Rewrite the mark of a directory."""
    mark = path / ".owner.json"
    owner = msgspec.json.decode(mark.read_bytes(), type=ProcessId)
    mark.write_bytes(msgspec.json.encode(msgspec.structs.replace(owner, **changes)))


def test_a_full_disk_leaves_no_directory_that_nobody_would_remove(tmp_path):
    with file_limit(1), pytest.raises(OSError, match="too large"):
        node_workspace.make_directory(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_swept(tmp_path):
    program = "import os, sys; from tfos.node import workspace\n"
    program += "print(workspace.make_directory(sys.argv[1]), flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=20,
    )
    (left,) = tmp_path.iterdir()
    assert str(left) == killed.stdout.strip()
    assert node_workspace.sweep(str(tmp_path), str(tmp_path)) == [left]
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_certainly_nobodys_is_swept(tmp_path):
    made = {
        name: node_workspace.make_directory(str(tmp_path))
        for name in ("alive", "reused pid", "other boot", "other namespace", "no mark", "bad mark")
    }
    owner_of(made["reused pid"], started="1")
    owner_of(made["other boot"], pid=2**22, kernel="another pid:[4026531836]")
    owner_of(made["other namespace"], pid=2**22, kernel=f"{boot_id()} pid:[1]")
    (made["no mark"] / ".owner.json").unlink()
    (made["bad mark"] / ".owner.json").write_text("{}")
    (tmp_path / "tfos-link").symlink_to(made["reused pid"])
    (tmp_path / "tfos-file").write_text("x")
    assert node_workspace.sweep(str(tmp_path)) == [made["reused pid"]]
    assert node_workspace.sweep(str(tmp_path), str(tmp_path / "nowhere")) == []
    assert len(list(tmp_path.iterdir())) == 7


def test_what_an_owner_that_cannot_be_looked_up_holds_is_not_touched(tmp_path, monkeypatch):
    made = node_workspace.make_directory(str(tmp_path))
    monkeypatch.setattr(
        process_id, "_state_and_start", lambda pid: ("", "")
    )  # as without a free descriptor
    assert node_workspace.sweep(str(tmp_path)) == []
    assert made.is_dir()


def test_a_directory_of_another_user_is_not_touched(tmp_path, monkeypatch):
    left = node_workspace.make_directory(str(tmp_path))
    owner_of(left, started="1")
    monkeypatch.setattr("os.geteuid", lambda: left.stat().st_uid + 1)
    assert node_workspace.sweep(str(tmp_path)) == []
    assert left.is_dir()


def test_a_node_removes_what_a_killed_one_left_at_its_start_and_at_its_end(make):
    def leave():
        dead = make()
        for path in (dead.directory, dead.socket_dir):
            owner_of(path, started="1")
        return dead

    first = leave()
    living = make()
    assert not first.directory.exists()
    assert not first.socket_dir.exists()
    second = leave()
    living.remove()
    assert not second.directory.exists()
