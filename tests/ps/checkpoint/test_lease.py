"""Two jobs and one directory: who may save, and when a dead owner's lease is taken over."""

import os
import subprocess
import sys

import msgspec
import pytest

from ps.checkpoint.lease import (
    LEASE_NAME,
    Holder,
    Lease,
    Silence,
    read_holder,
    this_process,
)
from ps.checkpoint.storage import storage_at
from ps.errors import CheckpointError
from tests.support.ps_cluster import wait_until


@pytest.fixture
def storage(tmp_path):
    return storage_at(tmp_path)


def write(tmp_path, holder: Holder) -> None:
    (tmp_path / LEASE_NAME).write_bytes(msgspec.json.encode(holder))


def found(tmp_path) -> Holder | None:
    path = tmp_path / LEASE_NAME
    return read_holder(path.read_bytes()) if path.exists() else None


def elsewhere(**changes) -> Holder:
    holder = Holder("other", "far", "another boot pid:[1]", 4711, "99")
    return msgspec.structs.replace(holder, **changes)


@pytest.mark.fault("F43")
def test_another_live_job_is_refused_with_both_names(tmp_path, storage):
    first, second = Lease(storage, "first"), Lease(storage, "second")
    assert first.take()
    expected = rf"used by job 'first' \(host .*, pid {os.getpid()}\), so job 'second' .*does not"
    with pytest.raises(CheckpointError, match=expected):
        second.take()
    first.release()
    assert found(tmp_path) is None
    assert second.take()
    with pytest.raises(CheckpointError, match="used by job 'second'"), first.held():
        pass
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_processes_of_one_job_share_it(tmp_path, storage):
    chief, driver = Lease(storage, "job"), Lease(storage, "job")
    assert chief.take()
    assert not driver.take()
    with driver.held():
        pass
    chief.release()
    with driver.held():  # given back by the other, so nobody has it
        pass
    assert found(tmp_path) == this_process("job")
    driver.release()
    assert found(tmp_path) is None


@pytest.mark.fault("F43")
def test_a_process_that_ended_on_this_host_is_followed(tmp_path, storage, caplog):
    program = (
        "import sys, msgspec; from ps.checkpoint.lease import this_process;"
        "sys.stdout.buffer.write(msgspec.json.encode(this_process('dead')))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    (tmp_path / LEASE_NAME).write_bytes(ended.stdout)
    lease = Lease(storage, "next")
    assert lease.take()
    assert "taking over from job 'dead'" in caplog.text
    lease.release()


@pytest.mark.fault("F43")
def test_a_later_process_with_the_same_pid_is_another_one(tmp_path, storage):
    write(tmp_path, msgspec.structs.replace(this_process("dead"), started="1"))
    lease = Lease(storage, "next")
    assert lease.take()
    lease.release()


@pytest.mark.fault("F43")
def test_a_silent_lease_of_another_host_is_taken_over_after_the_bound(tmp_path, storage):
    write(tmp_path, elsewhere())
    lease = Lease(storage, "next", silent_s=0.05)
    assert lease.take()
    lease.release()


@pytest.mark.fault("F43")
def test_a_renewed_lease_of_another_host_is_refused(tmp_path, storage, monkeypatch):
    write(tmp_path, elsewhere())
    lease = Lease(storage, "next", silent_s=60.0)

    def renew_meanwhile(_seconds: float) -> bool:
        write(tmp_path, elsewhere(beat=1))
        return False

    monkeypatch.setattr(lease._ended, "wait", renew_meanwhile)
    with pytest.raises(CheckpointError, match=r"used by job 'other' \(host far, pid 4711\)"):
        lease.take()
    assert found(tmp_path) == elsewhere(beat=1)


def test_silence_counts_only_while_the_file_system_answers():
    silence = Silence(longest_look_s=0.6)
    assert [silence.look(b"a", now_s) for now_s in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]
    assert silence.look(b"a", 61.0) == 1.6  # it was away for a minute
    assert silence.look(b"b", 61.2) == 0.0


@pytest.mark.fault("F43")
def test_a_lease_that_nobody_could_renew_is_not_taken_over(tmp_path, storage, monkeypatch):
    write(tmp_path, elsewhere())
    lease = Lease(storage, "next", silent_s=60.0)
    now_s = 0.0

    def storage_is_away(_seconds: float) -> bool:
        nonlocal now_s
        if now_s:  # it is back for a while, and so is the lease's owner
            write(tmp_path, elsewhere(beat=1))
        now_s += 70.0
        return False

    monkeypatch.setattr("ps.checkpoint.lease.time.monotonic", lambda: now_s)
    monkeypatch.setattr("ps.checkpoint.storage._lock", lambda *_: None)
    monkeypatch.setattr(lease._ended, "wait", storage_is_away)
    with pytest.raises(CheckpointError, match="used by job 'other'"):
        lease.take()
    assert found(tmp_path) == elsewhere(beat=1)


def test_a_held_lease_is_renewed_until_another_job_has_it(tmp_path, storage):
    lease = Lease(storage, "job", renew_s=0.01)
    assert lease.take()
    wait_until(lambda: (found(tmp_path) or elsewhere()).beat > 1, "a second renewal")
    with storage.locked(LEASE_NAME) as file:
        file.write(msgspec.json.encode(elsewhere()))
    renewals = lease._thread
    assert renewals is not None
    wait_until(lambda: not renewals.is_alive(), "the end of the renewals")
    assert found(tmp_path) == elsewhere()
    lease.release()
    assert found(tmp_path) == elsewhere()


def test_an_unreadable_lease_is_nobodys(tmp_path, storage, caplog):
    (tmp_path / LEASE_NAME).write_bytes(b'{"owner":')
    lease = Lease(storage, "job")
    assert lease.take()
    assert "not readable" in caplog.text
    lease.release()


def test_a_lock_that_is_held_for_ever_is_an_error_with_its_path(storage, monkeypatch):
    monkeypatch.setattr("ps.checkpoint.storage.LOCK_TIMEOUT_S", 0.05)
    with (
        storage.locked(LEASE_NAME),
        pytest.raises(CheckpointError, match=r"lease.json is locked by another process"),
    ):
        Lease(storage, "job").take()
