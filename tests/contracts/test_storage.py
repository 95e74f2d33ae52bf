"""What every checkpoint storage does alike: a local directory, a real HDFS, and one of fsspec's."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import msgspec
import pytest

from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.temp_files import staging_name
from ps.checkpoint import lease as leases
from ps.checkpoint.format import STAGING_PREFIX
from ps.checkpoint.lease import LEASE_NAME, Lease, LeaseTiming, this_holder
from ps.checkpoint.staging import Staging
from ps.checkpoint.storage import Storage, read_small, storage_at
from ps.errors import CheckpointError
from tests.support.ps_cluster import cluster, filled, make_manifest, run_all
from tfos.files.checkpoint_storage import RemoteStorage, Storages

pytestmark = pytest.mark.timeout(300)
ON_HDFS = pytest.param("hdfs", marks=pytest.mark.hdfs)

QUICK = FileSystemConfig(call_timeout_s=10, patience_s=60)


@pytest.fixture(params=["local", ON_HDFS, "memory"])
def root(request: pytest.FixtureRequest) -> str:
    name = secrets.token_hex(4)
    if request.param == "hdfs":
        return f"{request.getfixturevalue('hdfs').url}/{name}"
    if request.param == "memory":
        return f"memory://{name}/saves"
    return str(request.getfixturevalue("tmp_path") / name)


@pytest.fixture
def storage(root) -> Storage:
    return Storages(config=QUICK)(root)


def put(storage: Storage, name: str, data: bytes) -> None:
    with storage.create(name) as file:
        file.write(data)
        storage.sync(file)


def replaced_while_read(storage: RemoteStorage, monkeypatch, times: int) -> None:
    """Let the holder of a file put another content each time that somebody reads it."""
    memory, left = fsspec.filesystem("memory"), [*range(times)]
    cat = memory.cat_file

    def read(path: str, **place: Any) -> bytes:
        data = bytes(cat(path, **place))
        if left:
            storage.put("beat", b"beat %d" % left.pop(), overwrite=True)
        return data

    monkeypatch.setattr(memory, "cat_file", read)


def test_a_small_file_that_is_replaced_while_it_is_read_is_read_again(monkeypatch):
    storage = Storages(config=QUICK)(f"memory://{secrets.token_hex(4)}/saves")
    assert isinstance(storage, RemoteStorage)
    storage.put("beat", b"beat 9", overwrite=True)
    replaced_while_read(storage, monkeypatch, 2)
    assert run_all(lambda: read_small(storage, "beat")) == [b"beat 0"]


def test_a_small_file_that_is_replaced_again_and_again_is_given_up(monkeypatch):
    storage = Storages(config=QUICK)(f"memory://{secrets.token_hex(4)}/saves")
    assert isinstance(storage, RemoteStorage)
    storage.put("beat", b"beat 9", overwrite=True)
    replaced_while_read(storage, monkeypatch, 100)
    with pytest.raises(OSError, match="beat was replaced while it was read"):
        read_small(storage, "beat")


def get(storage: Storage, name: str) -> bytes:
    with storage.open(name) as file:
        return file.read()


def test_what_is_synced_is_there_and_what_is_not_need_not_be(storage, root):
    data = os.urandom(9 << 20)
    with storage.create(".tmp-a/ps-0.data") as file:
        assert file.write(memoryview(data)) == len(data)
        storage.sync(file)
    assert storage.size(".tmp-a/ps-0.data") == len(data)
    assert get(storage, ".tmp-a/ps-0.data") == data
    assert storage.names(".tmp-a") == ["ps-0.data"]
    assert storage.sizes(".tmp-a") == {"ps-0.data": len(data)}
    assert storage.sizes("") == storage.sizes("step-9") == {}
    assert storage.where(".tmp-a/ps-0.data") == f"{root}/.tmp-a/ps-0.data"
    put(storage, ".tmp-a/ps-0.data", b"again")
    assert get(storage, ".tmp-a/ps-0.data") == b"again"


def test_a_file_is_read_at_any_position(storage):
    data = os.urandom(100_000)
    put(storage, "step-1/file", data)
    with storage.open("step-1/file") as file:
        for offset, length in [(99_990, 5), (0, 7), (50_000, 70_000), (3, 0), (100_000, 4)]:
            file.seek(offset)
            assert file.tell() == offset
            assert file.read(length) == data[offset : offset + length]


def test_what_is_missing_is_nothing_or_an_error(storage):
    assert storage.names() == storage.names("step-1") == []
    for call in (storage.size, storage.open):
        with pytest.raises(FileNotFoundError):
            call("step-1/manifest.json")
    assert not storage.is_directory("step-1")
    storage.remove("step-1")


def test_a_directory_is_no_file(storage):
    put(storage, "step-1/file", b"x")
    assert storage.is_directory("step-1")
    assert not storage.is_directory("step-1/file")
    for call in (storage.size, storage.open):
        with pytest.raises(CheckpointError, match="step-1 is not a regular file"):
            call("step-1")


def test_a_directory_is_published_once(storage):
    put(storage, ".tmp-a/file", b"a")
    put(storage, ".tmp-b/file", b"b")
    storage.publish(".tmp-a", "step-1")
    assert set(storage.names()) == {"step-1", ".tmp-b"}
    with pytest.raises(OSError, match=r"exists|not empty"):
        storage.publish(".tmp-b", "step-1")
    assert get(storage, "step-1/file") == b"a"
    storage.remove("step-1")
    storage.remove(".tmp-b")
    assert storage.names() == []


def test_a_small_file_is_put_whole_and_moved_once(storage):
    storage.put("note", b"one", overwrite=False)
    with pytest.raises(FileExistsError):
        storage.put("note", b"two", overwrite=False)
    assert read_small(storage, "note") == b"one"
    storage.put("note", b"three", overwrite=True)
    storage.move("note", ".aside")
    with pytest.raises(FileNotFoundError):
        storage.move("note", ".again")
    assert read_small(storage, "note") is None
    assert read_small(storage, ".aside") == b"three"
    storage.remove(".aside")
    assert storage.names() == []


def test_of_many_that_put_one_file_one_succeeds_where_this_is_promised(storage):
    def put_new(number: int) -> bool:
        try:
            storage.put("one", b"%d" % number, overwrite=False)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(put_new, range(8)))
    assert sum(won) == 1 or not storage.is_exclusive
    assert read_small(storage, "one") in {b"%d" % each for each, has in enumerate(won) if has}
    storage.remove("one")
    assert storage.names() == []


@pytest.mark.fault("F43")
def test_two_jobs_do_not_save_in_one_directory(storage, root):
    first, second = Lease(storage, "first"), Lease(Storages()(root), "second")
    assert first.take()
    with pytest.raises(CheckpointError, match=rf"used by job 'first' .*pid {os.getpid()}"):
        second.take()
    first.release()
    assert second.take()
    second.release()
    assert storage.names() == []


@pytest.mark.fault("F43")
def test_the_lease_of_a_process_that_ended_here_is_taken_over_with_its_remains(storage, caplog):
    program = (
        "import sys, msgspec; from ps.checkpoint.lease import this_holder;"
        "sys.stdout.buffer.write(msgspec.json.encode(this_holder('dead', 'ab')))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    beat, old_lock = f".{LEASE_NAME}.ab.beat", f".{LEASE_NAME}.lock"
    for name in (LEASE_NAME, beat, old_lock):
        put(storage, name, ended.stdout)
        put(storage, staging_name(name), b"killed while it wrote")
    lease = Lease(storage, "next")
    assert lease.take()
    assert "taking over from job 'dead'" in caplog.text
    lease.release()
    assert storage.names() == []


def elsewhere(owner: str) -> bytes:
    holder = this_holder(owner, "ab")
    return msgspec.json.encode(msgspec.structs.replace(holder, kernel="another boot pid:[1]"))


@pytest.mark.fault("F43")
def test_a_lease_of_another_host_is_taken_over_only_when_it_is_silent(storage, monkeypatch):
    monkeypatch.setattr(leases, "_LOOK_S", 0.05)
    put(storage, LEASE_NAME, elsewhere("far"))
    beats = 0

    def beat(_seconds: float) -> bool:
        nonlocal beats
        beats += 1
        storage.put(f".{LEASE_NAME}.ab.beat", b"%d" % beats, overwrite=True)
        return False

    lease = Lease(storage, "next", timing=LeaseTiming(silent_s=0.3))
    with monkeypatch.context() as patch:
        patch.setattr(lease._ended, "wait", beat)
        with pytest.raises(CheckpointError, match=r"used by job 'far' \(host .*, pid \d+\)"):
            lease.take()
    assert lease.take()
    lease.release()
    assert storage.names() == []


@pytest.mark.fault("F43")
def test_of_two_that_follow_at_once_one_commits(storage, root):
    put(storage, LEASE_NAME, elsewhere("far"))
    timing = LeaseTiming(silent_s=0.3)
    jobs = [Lease(Storages(config=QUICK)(root), name, timing=timing) for name in "ab"]

    def commit(job: Lease) -> str:
        try:
            job.take()
            with job.held():
                return "committed"
        except CheckpointError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(commit, jobs))
    for job in jobs:
        job.release()
    if storage.is_exclusive:
        assert [" is used by job " in each for each in said].count(True) == 1, said
        assert said.count("committed") == 1
    assert storage.names() == []


@pytest.mark.fault("F10")
def test_what_a_killed_saver_of_the_same_job_has_staged_is_removed(storage):
    job, killed, live = (Lease(storage, "job") for _ in range(3))
    for lease in (job, killed, live):
        lease.take()
    staged = {
        lease: f"{STAGING_PREFIX}{Staging(storage, lease).new_save_id()}"
        for lease in (killed, live)
    }
    for name in staged.values():
        put(storage, f"{name}/ps-0.data", b"x" * 1000)
    ended = msgspec.structs.replace(this_holder("job", killed.token), started="1")
    storage.put(f".{LEASE_NAME}.{killed.token}.beat", msgspec.json.encode(ended), overwrite=True)
    Staging(storage, job).sweep_before_save()
    assert [name for name in storage.names() if name.startswith(STAGING_PREFIX)] == [staged[live]]
    assert get(storage, f"{staged[live]}/ps-0.data") == b"x" * 1000
    for lease in (job, killed, live):
        lease.release()
    storage.remove(staged[live])
    assert storage.names() == []


@pytest.mark.fault("F43")
def test_where_nothing_is_exclusive_it_is_said_once(root, caplog):
    manifest = make_manifest(30)
    with cluster(open_storage=Storages(config=QUICK)) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        for step in (1, 2):
            client.save(root, step)
    told = [line for line in caplog.messages if "one job per directory is not enforced" in line]
    assert len(told) == (0 if Storages()(root).is_exclusive else 1)


FILL = """
import pathlib, sys
from ps.errors import CheckpointError
from ps.checkpoint.storage import typed_errors
from tfos.files.checkpoint_storage import Storages

staging, target = pathlib.Path(sys.argv[1]), "memory://disk/saves"
storage = Storages(str(staging))(target)
try:
    with typed_errors(storage, "a/b", "write"), storage.create("a/b") as file:
        file.write(b"x" * (6 << 20))
        storage.sync(file)
except CheckpointError as error:
    print(error)
print(list(staging.iterdir()), storage.names())
"""


@pytest.mark.fault("F39")
def test_a_full_staging_directory_is_named_with_its_free_space(tmp_path):
    script = 'mount -t tmpfs -o size=5m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, FILL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    told, left = done.stdout.splitlines()
    assert "cannot write memory://disk/saves/a/b: No space left on device" in told
    assert f"files are collected in {tmp_path} first, where " in told
    assert told.endswith(" MB are free")
    assert left == "[] []"


@pytest.mark.fault("F40")
@pytest.mark.parametrize(
    ("root", "error"), [("ftp://127.0.0.1:1/x", OSError), ("github://a/b", CheckpointError)]
)
def test_what_fsspec_cannot_open_is_a_typed_error_with_the_url(root, error):
    with pytest.raises(error, match=root):
        Storages()(root)


@pytest.mark.attack("A18")
@pytest.mark.parametrize(
    "root", ["", "a\0b", "hdfs://nn/../x", "hdfs://nn/a\u202eb", "hdfs://u:p@nn/x", "nothing://x/y"]
)
def test_a_root_that_leads_astray_is_refused(root: str):
    with pytest.raises(CheckpointError):
        Storages()(root)


def test_a_local_url_is_the_local_directory(tmp_path):
    assert Storages()(f"file://{tmp_path}").where("x") == storage_at(tmp_path).where("x")
