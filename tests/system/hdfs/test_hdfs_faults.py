"""A real HDFS whose servers die, freeze and come back, and what readers and writers make of it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from feeding.config import MIB
from feeding.errors import FileChanged, StorageUnavailable
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.interface import FileSystem
from feeding.filesystem.readahead import ReadAhead
from feeding.filesystem.registry import filesystem_for
from scripts.local_hdfs.cluster import LocalHdfs
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = os.urandom(MIB) * 20
"""Two blocks, so that blocks of both DataNodes are read."""
PATIENT = FileSystemConfig(call_timeout_s=3, patience_s=100, range_bytes=MIB)


@pytest.fixture
def directory(hdfs: LocalHdfs) -> str:
    return f"{hdfs.url}/{secrets.token_hex(4)}"


@pytest.fixture
def fs(hdfs: LocalHdfs) -> FileSystem:
    return filesystem_for(hdfs.url, PATIENT)


@pytest.mark.long
@pytest.mark.fault("F40")
def test_reading_goes_on_and_a_write_is_repeated_when_a_datanode_is_killed(hdfs, fs, directory):
    path = f"{directory}/file"
    fs.write(path, b"old")
    fs.write(f"{directory}/other", DATA)
    seen_before_each_end: list[bytes] = []

    def pieces() -> Iterator[bytes]:
        yield DATA[: 8 * MIB]
        if not seen_before_each_end:
            hdfs.kill_datanode(0)
        seen_before_each_end.append(fs.open(path).read_range(0, 3))
        yield DATA[8 * MIB :]

    with ReadAhead(fs.open(f"{directory}/other"), PATIENT) as file:
        read = file.read(2 * MIB)
        try:
            fs.write(path, pieces)
            read += file.read()
        finally:
            hdfs.start_datanode(0)
    assert read == DATA
    assert len(seen_before_each_end) > 1
    assert set(seen_before_each_end) == {b"old"}
    with fs.open(path) as reader:
        assert reader.read_range(0, reader.size_bytes) == DATA
    assert [status.name for status in fs.entries(directory)] == ["file", "other"]


@pytest.mark.fault("F40")
def test_what_is_asked_while_the_namenode_is_frozen_is_answered_afterwards(hdfs, directory, caplog):
    fs = filesystem_for(hdfs.url, FileSystemConfig(call_timeout_s=1, patience_s=100))
    outage(fs, directory, caplog, hdfs.freeze_namenode, hdfs.thaw_namenode)


@pytest.mark.long
@pytest.mark.fault("F40")
def test_a_namenode_that_is_away_for_a_minute_stops_nothing(hdfs, fs, directory, caplog):
    def start_again() -> None:
        threading.Event().wait(60)
        hdfs.start_namenode()

    outage(fs, directory, caplog, hdfs.kill_namenode, start_again)


def outage(fs, directory, caplog, begin, end):
    """Take the NameNode away under a reader, a writer and others, and bring it back."""
    fs.write(f"{directory}/file", DATA)
    fs.write(f"{directory}/moved", b"m")
    tasks = {
        "read": lambda: fs.open(f"{directory}/file").read_range(0, len(DATA)) == DATA,
        "write": lambda: fs.write(f"{directory}/new", DATA),
        "rename": lambda: fs.rename(f"{directory}/moved", f"{directory}/target"),
        "list": lambda: {"file"} <= {status.name for status in fs.entries(directory)},
    }
    with ReadAhead(fs.open(f"{directory}/file"), PATIENT) as file, ThreadPoolExecutor() as pool:
        read = file.read(MIB)
        begin()
        try:
            running = {name: pool.submit(task) for name, task in tasks.items()}
            read += file.read()  # needs no NameNode
            wait_until(
                lambda: sum("trying for" in text for text in caplog.messages) >= len(tasks),
                lambda: caplog.messages,
            )
            assert not any(task.done() for task in running.values())
        finally:
            end()
        results = {name: task.result(90) for name, task in running.items()}
    assert read == DATA
    assert results == {"read": True, "write": None, "rename": None, "list": True}
    assert fs.open(f"{directory}/new").read_range(0, len(DATA)) == DATA
    names = [status.name for status in fs.entries(directory) if not status.name.startswith(".")]
    assert names == ["file", "new", "target"]


@pytest.mark.fault("F40")
def test_a_namenode_that_stays_frozen_ends_in_an_error_with_the_path(hdfs, directory, caplog):
    caplog.set_level(logging.ERROR)
    hurried = FileSystemConfig(call_timeout_s=0.3, patience_s=0.7)
    filesystem_for(hdfs.url, PATIENT).write(f"{directory}/file", b"x")
    fs = filesystem_for(hdfs.url, hurried)
    calls = {
        "look at": lambda path: fs.status(path),
        "open": lambda path: fs.open(path),
        "list": lambda path: fs.entries(path),
        "write": lambda path: fs.write(path, b"new"),
        "delete": lambda path: fs.delete(path),
    }
    hdfs.freeze_namenode()
    try:
        for action, call in calls.items():
            begun_s = time.monotonic()
            with pytest.raises(StorageUnavailable) as failed:
                call(f"{directory}/{action.replace(' ', '')}")
            assert time.monotonic() - begun_s < 20
            assert f"cannot {action} {directory}/{action.replace(' ', '')}:" in str(failed.value)
            assert f"NameNode {hdfs.url} from the path" in str(failed.value)
    finally:
        hdfs.thaw_namenode()
    assert filesystem_for(hdfs.url, PATIENT).exists(f"{directory}/file")


@pytest.mark.fault("F40")
def test_a_refusal_names_the_user_and_the_whole_path(hdfs, fs, directory, monkeypatch):
    fs.write(f"{directory}/file", b"x")
    monkeypatch.setenv("HADOOP_USER_NAME", "alice")
    calls = [
        lambda: fs.write(f"{directory}/file", b"y"),
        lambda: fs.delete(f"{directory}/file"),
        lambda: fs.rename(f"{directory}/file", f"{directory}/other"),
        lambda: fs.mkdirs(f"{directory}/sub"),
    ]
    for call in calls:
        with pytest.raises(PermissionError) as refused:
            call()
        assert refused.value.filename.startswith(f"{directory}/")
        assert "user 'alice'" in str(refused.value)
        assert "\tat " not in str(refused.value)
    with pytest.raises(FileNotFoundError) as missing:
        fs.open(f"{directory}/none")
    assert missing.value.filename == f"{directory}/none"
    assert f"user 'alice', NameNode {hdfs.url} from the path" in str(missing.value)


@pytest.mark.fault("F40")
def test_hdfs_is_asked_as_sparks_user_where_no_other_is_named(hdfs, directory, monkeypatch):
    monkeypatch.setenv("HADOOP_USER_NAME", "")
    monkeypatch.delenv("HADOOP_USER_NAME")  # what is set meanwhile goes at the end, too
    monkeypatch.setenv("SPARK_USER", "bob")
    with pytest.raises(PermissionError, match="user=bob"):
        filesystem_for(hdfs.url).mkdirs(f"{directory}/sub")


@pytest.mark.fault("F40")
def test_the_configuration_says_which_namenode_and_errors_say_so(hdfs, monkeypatch):
    monkeypatch.setenv("HADOOP_CONF_DIR", str(hdfs.conf_dir))
    fs = filesystem_for("hdfs:///")
    fs.write("hdfs:///by-default", b"x")
    try:
        assert fs.open("hdfs:///by-default").read_range(0, 9) == b"x"
        with pytest.raises(FileNotFoundError, match=f"fs.defaultFS in {hdfs.conf_dir}"):
            fs.status("hdfs:///none")
    finally:
        fs.delete("hdfs:///by-default")


@pytest.mark.fault("F40")
def test_servers_that_do_not_exist_fail_typed(hdfs):
    quick = FileSystemConfig(call_timeout_s=1, patience_s=1)
    begun_s = time.monotonic()
    patient = FileSystemConfig(patience_s=200)
    with pytest.raises(
        StorageUnavailable, match=r"cannot look at hdfs://no\.such\.host\.invalid:1"
    ):
        filesystem_for("hdfs://no.such.host.invalid:1/x", patient).status(
            "hdfs://no.such.host.invalid:1/x"
        )
    assert time.monotonic() - begun_s < 60
    with pytest.raises(StorageUnavailable, match=r"cannot look at hdfs://127\.0\.0\.1:1/x"):
        filesystem_for("hdfs://127.0.0.1:1/x", quick).status("hdfs://127.0.0.1:1/x")


def test_a_file_that_is_replaced_while_it_is_read_is_refused_once_it_is_opened_again(
    hdfs, fs, directory
):
    fs.write(f"{directory}/file", b"first")
    with fs.open(f"{directory}/file") as reader:
        fs.write(f"{directory}/file", b"another")
        reader._drop(reader._opened())  # as a failed range does
        with pytest.raises(FileChanged, match="it had 5 bytes, now 7"):
            reader.read_range(0, 5)


def test_a_child_that_is_forked_makes_its_own_client(hdfs, fs, directory):
    fs.write(f"{directory}/file", b"x")
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if fs.open(f"{directory}/file").read_range(0, 1) == b"x" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fs.exists(f"{directory}/file")
