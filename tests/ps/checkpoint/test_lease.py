"""Two jobs and one directory: who may save, and when a dead owner's lease is taken over."""

import contextlib
import errno
import os
import subprocess
import sys
import threading

import msgspec
import pytest

from ps.checkpoint import lease as leases
from ps.checkpoint.lease import (
    LEASE_NAME,
    Holder,
    Lease,
    LeaseTiming,
    Silence,
    read_holder,
    this_holder,
)
from ps.checkpoint.storage import storage_at
from ps.errors import CheckpointError
from tests.support.ps_cluster import run_all
from tests.support.waiting import wait_until


@pytest.fixture
def storage(tmp_path):
    return storage_at(tmp_path)


def write(tmp_path, holder: Holder) -> None:
    (tmp_path / LEASE_NAME).write_bytes(msgspec.json.encode(holder))


def found(tmp_path) -> Holder | None:
    path = tmp_path / LEASE_NAME
    return read_holder(path.read_bytes()) if path.exists() else None


def elsewhere(**changes) -> Holder:
    fields = {"kernel": "another boot pid:[1]", "pid": 4711, "started": "99", "host": "far"}
    return Holder(**{"owner": "other", "token": "ab", **fields, **changes})


def beat(tmp_path, number: int) -> None:
    (tmp_path / f".{LEASE_NAME}.ab.beat").write_bytes(b"%d" % number)


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
    assert found(tmp_path) == driver._me
    driver.release()
    assert found(tmp_path) is None


@pytest.mark.fault("F15")
def test_a_lease_that_no_thread_renews_is_held_and_given_back(tmp_path, storage, monkeypatch):
    """Python 3.12 starts none while the interpreter exits."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    lease = Lease(storage, "job")
    assert lease.take()
    with lease.held(), pytest.raises(CheckpointError, match="used by job 'job'"):
        Lease(storage, "other").take()
    lease.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("F43")
def test_a_process_that_ended_on_this_host_is_followed(tmp_path, storage, caplog):
    program = (
        "import sys, msgspec; from ps.checkpoint.lease import this_holder;"
        "sys.stdout.buffer.write(msgspec.json.encode(this_holder('dead')))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    (tmp_path / LEASE_NAME).write_bytes(ended.stdout)
    lease = Lease(storage, "next")
    assert lease.take()
    assert "taking over from job 'dead'" in caplog.text
    lease.release()


@pytest.mark.fault("F43")
def test_a_later_process_with_the_same_pid_is_another_one(tmp_path, storage):
    write(tmp_path, msgspec.structs.replace(this_holder("dead"), started="1"))
    lease = Lease(storage, "next")
    assert lease.take()
    lease.release()


@pytest.mark.fault("F43")
def test_a_silent_lease_of_another_host_is_taken_over_after_the_bound(tmp_path, storage):
    write(tmp_path, elsewhere())
    lease = Lease(storage, "next", timing=LeaseTiming(silent_s=0.05))
    assert lease.take()
    lease.release()


@pytest.mark.fault("F43")
def test_a_renewed_lease_of_another_host_is_refused(tmp_path, storage, monkeypatch):
    write(tmp_path, elsewhere())
    lease = Lease(storage, "next")

    def renew_meanwhile(_seconds: float) -> bool:
        beat(tmp_path, 1)
        return False

    monkeypatch.setattr(lease._ended, "wait", renew_meanwhile)
    with pytest.raises(CheckpointError, match=r"used by job 'other' \(host far, pid 4711\)"):
        lease.take()
    assert found(tmp_path) == elsewhere()


@pytest.mark.fault("F43")
def test_a_job_whose_chief_has_moved_keeps_the_lease_of_the_lost_one(tmp_path, storage):
    """Nobody renews what the lost process has created; the one in its place has its own beat."""
    write(tmp_path, elsewhere(owner="job"))
    moved, other = Lease(storage, "job"), Lease(storage, "next", timing=LeaseTiming(silent_s=0.05))
    assert not moved.take()
    with pytest.raises(CheckpointError, match=r"used by job 'job'.*'next'"):
        other.take()
    with moved.held():
        pass
    moved.release()
    assert other.take()
    other.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("F43")
@pytest.mark.parametrize("is_lost_here", [False, True])
def test_a_process_on_another_host_keeps_the_lease_of_its_job(
    tmp_path, storage, monkeypatch, is_lost_here
):
    lost = msgspec.structs.replace(this_holder("job", "ab"), started="1")
    write(tmp_path, lost if is_lost_here else elsewhere(owner="job"))
    moved = elsewhere(owner="job", host="third", token="cd")
    path = tmp_path / f".{LEASE_NAME}.cd.beat"
    lease = Lease(storage, "next", timing=LeaseTiming(silent_s=0.05))
    really_wait = lease._ended.wait

    def renew(number: int) -> None:
        fields = msgspec.structs.asdict(moved)
        path.write_bytes(msgspec.json.encode(leases.Beat(**fields, beat=number)))

    def renew_meanwhile(_seconds: float) -> bool:
        renew(2)
        return False

    renew(1)
    with monkeypatch.context() as patch:
        patch.setattr(lease._ended, "wait", renew_meanwhile)
        with pytest.raises(CheckpointError, match="used by job 'job'"):
            lease.take()
    assert really_wait(0.0) is False
    assert lease.take(), "silent from now on"
    lease.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("F43")
def test_a_chief_that_is_started_again_follows_its_own_beside_others_of_its_job(tmp_path, storage):
    lost = msgspec.structs.replace(this_holder("job", "ab"), started="1")
    write(tmp_path, lost)
    server, chief = Lease(storage, "job"), Lease(storage, "job")
    server._begin_to_beat()
    try:
        with contextlib.suppress(CheckpointError):
            assert not chief.take(), "a process of this job held it before"
        now = found(tmp_path)
    finally:
        for each in (chief, server):
            each.release()
    assert now is not None
    assert now.token == chief.token
    assert list(tmp_path.iterdir()) == []


def test_silence_counts_only_while_the_file_system_answers():
    silence = Silence(longest_look_s=0.6)
    assert [silence.look(b"a", now_s) for now_s in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]
    assert silence.look(b"a", 61.0) == 1.6  # it was away for a minute
    assert silence.look(b"b", 61.2) == 0.0


@pytest.mark.fault("F43")
def test_a_lease_that_nobody_could_renew_is_not_taken_over(tmp_path, storage, monkeypatch):
    write(tmp_path, elsewhere())
    lease = Lease(storage, "next")
    now_s = 0.0

    def storage_is_away(_seconds: float) -> bool:
        nonlocal now_s
        if now_s:  # it is back for a while, and so is the lease's owner
            beat(tmp_path, 1)
        now_s += 70.0
        return False

    monkeypatch.setattr("ps.checkpoint.lease.time.monotonic", lambda: now_s)
    monkeypatch.setattr(lease._ended, "wait", storage_is_away)
    with pytest.raises(CheckpointError, match="used by job 'other'"):
        lease.take()
    assert found(tmp_path) == elsewhere()


def test_a_held_lease_is_renewed_until_another_job_has_it(tmp_path, storage):
    lease = Lease(storage, "job", timing=LeaseTiming(renew_s=0.01))
    assert lease.take()
    own = (tmp_path / LEASE_NAME).read_bytes()
    beats = tmp_path / f".{LEASE_NAME}.{lease._me.token}.beat"
    wait_until(lambda: b'"beat":2' in beats.read_bytes(), "a second renewal")
    assert (tmp_path / LEASE_NAME).read_bytes() == own
    write(tmp_path, elsewhere())
    renewals = lease._thread
    assert renewals is not None
    with pytest.raises(CheckpointError, match="used by job 'other'"), lease.held():
        pass
    wait_until(lambda: not renewals.is_alive(), "the end of the renewals")
    lease.release()
    assert found(tmp_path) == elsewhere()
    assert [path.name for path in tmp_path.iterdir()] == [LEASE_NAME]


def test_a_lease_that_is_taken_again_is_renewed_again(tmp_path, storage):
    """Another job had it meanwhile, and has given it back."""
    lease = Lease(storage, "job", timing=LeaseTiming(renew_s=0.01))
    assert lease.take()
    write(tmp_path, elsewhere())
    with pytest.raises(CheckpointError, match="used by job 'other'"), lease.held():
        pass
    lease.release()
    (tmp_path / LEASE_NAME).unlink()
    assert lease.take()
    beats = tmp_path / f".{LEASE_NAME}.{lease.token}.beat"
    wait_until(lambda: b'"beat":2' in beats.read_bytes(), "a second renewal")
    lease.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("F43")
def test_a_holder_that_was_frozen_and_followed_does_not_commit(tmp_path, storage):
    frozen = Lease(storage, "frozen")
    other = Lease(storage, "other", timing=LeaseTiming(silent_s=0.05))
    assert frozen.take()
    mine = msgspec.structs.replace(frozen._me, kernel="another boot pid:[1]")
    write(tmp_path, mine)  # as a process of another host
    assert other.take()
    with pytest.raises(CheckpointError, match=r"used by job 'other'.*'frozen'"), frozen.held():
        pass
    frozen.release()
    with other.held():
        pass
    other.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("F43")
def test_of_many_that_follow_a_dead_holder_one_has_the_lease(tmp_path, storage):
    """Two may have taken it when one was slow; before it commits, a holder looks again."""
    for _ in range(20):
        write(tmp_path, msgspec.structs.replace(this_holder("dead"), started="1"))
        jobs = [Lease(storage, f"job {number}") for number in range(4)]
        results = run_all(*(job.take for job in jobs))
        taken = [job for job, result in zip(jobs, results, strict=True) if result is True]
        refused = [result for result in results if isinstance(result, CheckpointError)]
        assert len(taken) + len(refused) == 4, results
        committed = 0
        for job in taken:
            with contextlib.suppress(CheckpointError), job.held():
                committed += 1
        assert committed == 1, results
        for job in jobs:
            job.release()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("F43")
def test_a_taker_that_was_slow_puts_a_newer_lease_back(tmp_path, storage, monkeypatch):
    write(tmp_path, msgspec.structs.replace(this_holder("dead"), started="1"))
    fast, slow = Lease(storage, "fast"), Lease(storage, "slow")
    take_away = slow._take_away

    def overtaken(judged: bytes) -> None:
        monkeypatch.setattr(slow, "_take_away", take_away)
        assert fast.take()
        take_away(judged)

    monkeypatch.setattr(slow, "_take_away", overtaken)
    with pytest.raises(CheckpointError, match="used by job 'fast'"):
        slow.take()
    with fast.held():
        pass
    fast.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b'{"owner":', b"\xff", b'{"owner":"x","pid":-1}'])
def test_an_unreadable_lease_is_half_written_for_a_while_and_then_nobodys(
    tmp_path, storage, caplog, monkeypatch, content
):
    monkeypatch.setattr(leases, "UNREADABLE_S", 0.05)
    monkeypatch.setattr(leases, "_LOOK_S", 0.02)
    (tmp_path / LEASE_NAME).write_bytes(content)
    lease = Lease(storage, "job")
    assert lease.take()
    assert "a job whose lease cannot be read, which is gone" in caplog.text
    lease.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_that_is_half_written_at_first_is_its_writers(tmp_path, storage, monkeypatch):
    (tmp_path / LEASE_NAME).write_bytes(b'{"own')
    lease = Lease(storage, "job")

    def finish(_seconds: float) -> bool:
        write(tmp_path, elsewhere())
        return False

    monkeypatch.setattr(lease._ended, "wait", finish)
    with pytest.raises(CheckpointError, match="used by job 'other'"):
        lease.take()


def test_a_directory_that_may_not_be_written_is_named(storage, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(type(storage), "put", refuse)
    with pytest.raises(CheckpointError, match=rf"cannot take {tmp_path}/lease.json: Permission"):
        Lease(storage, "job").take()


def test_a_disk_that_neither_has_nor_takes_the_lease_is_no_endless_attempt(storage, monkeypatch):
    def exists_already(*_: object, **__: object) -> None:
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(storage, "put", exists_already)
    with pytest.raises(CheckpointError, match=r"lease.json is neither there nor can be made: .*ex"):
        Lease(storage, "a").take()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK])
def test_a_disk_without_hard_links_still_creates_exclusively(
    tmp_path, storage, monkeypatch, number
):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "no links")

    monkeypatch.setattr(os, "link", refuse)
    storage.put("a", b"first", overwrite=False)
    with pytest.raises(FileExistsError):
        storage.put("a", b"second", overwrite=False)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"first")]


@pytest.mark.fault("F43")
def test_a_take_ends_in_its_time_and_the_next_one_goes_on_waiting(tmp_path, storage, monkeypatch):
    """Saves of 5 s each follow a dead host after 60 s, too: what one has waited counts."""
    write(tmp_path, elsewhere())
    lease = Lease(storage, "next")
    now_s = 0.0
    really_wait = lease._ended.wait

    def wait(seconds: float) -> bool:
        nonlocal now_s
        if seconds == leases.DEFAULT_TIMING.renew_s:
            return really_wait(seconds)  # the thread that renews
        now_s += seconds
        return False

    monkeypatch.setattr("ps.checkpoint.lease.time.monotonic", lambda: now_s)
    monkeypatch.setattr(lease._ended, "wait", wait)
    for attempt in range(1, 12):
        waited = rf"silent for {5.0 * attempt:.1f} s, its lease is over after 60 s"
        with pytest.raises(CheckpointError, match=waited):
            lease.take(timeout_s=5.0)
        assert now_s == 5.0 * attempt
    assert lease.take(timeout_s=5.0)
    assert now_s == 60.0
    monkeypatch.undo()
    lease.release()


@pytest.mark.fault("F41", "F43")
def test_whatever_byte_of_a_lease_is_damaged_never_two_jobs_commit(tmp_path, storage, monkeypatch):
    """The one that has lost it is told so by name before it commits; no other error comes out."""
    monkeypatch.setattr(leases, "UNREADABLE_S", 0.0)
    for at in range(0, 240, 9):  # every field of about 200 bytes
        first, second = (
            Lease(storage, name, timing=LeaseTiming(60.0, 0.0)) for name in ("first", "second")
        )
        assert first.take()
        data = bytearray((tmp_path / LEASE_NAME).read_bytes())
        data[at % len(data)] ^= (1, 4, 128)[at % 7 % 3]
        (tmp_path / LEASE_NAME).write_bytes(data)
        with contextlib.suppress(CheckpointError):
            second.take(timeout_s=0.0)
        holding = 0
        for each in (first, second):
            with contextlib.suppress(CheckpointError), each.held():
                holding += 1
        assert holding <= 1, data
        first.release()
        second.release()
        (tmp_path / LEASE_NAME).unlink(missing_ok=True)


def show_life(tmp_path, process: Holder, number: int) -> None:
    """Renew the beat of a process as that does."""
    content = leases.Beat(**msgspec.structs.asdict(process), beat=number)
    (tmp_path / f".{LEASE_NAME}.{process.token}.beat").write_bytes(msgspec.json.encode(content))


@pytest.mark.fault("F43")
def test_a_refusal_names_the_process_that_lives_beside_a_dead_holder(tmp_path, storage):
    write(tmp_path, msgspec.structs.replace(this_holder("other", "ab"), pid=1, started="1"))
    show_life(tmp_path, this_holder("other", "cd"), 1)
    expected = rf"used by job 'other' \(host .*, pid {os.getpid()}\), so job 'next'"
    with pytest.raises(CheckpointError, match=expected):
        Lease(storage, "next").take()


@pytest.mark.fault("F43")
def test_a_refusal_names_the_process_that_has_renewed_beside_a_silent_holder(
    tmp_path, storage, monkeypatch
):
    write(tmp_path, elsewhere())
    sibling = elsewhere(host="third", pid=33, token="cd")
    show_life(tmp_path, sibling, 1)
    lease = Lease(storage, "next")

    def renew_meanwhile(_seconds: float) -> bool:
        show_life(tmp_path, sibling, 2)
        return False

    monkeypatch.setattr(lease._ended, "wait", renew_meanwhile)
    with pytest.raises(CheckpointError, match=r"used by job 'other' \(host third, pid 33\)"):
        lease.take()


@pytest.mark.fault("F43")
def test_a_process_that_ends_in_order_is_no_sign_of_life_of_its_job(tmp_path, storage, monkeypatch):
    write(tmp_path, msgspec.structs.replace(this_holder("other", "ab"), started="1"))
    for token in ("cd", "ef"):
        show_life(tmp_path, elsewhere(token=token), 1)
    lease = Lease(storage, "next", timing=LeaseTiming(silent_s=0.05))
    really_wait = lease._ended.wait

    def end_one_meanwhile(seconds: float) -> bool:
        (tmp_path / f".{LEASE_NAME}.cd.beat").unlink(missing_ok=True)
        return really_wait(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(lease._ended, "wait", end_one_meanwhile)
        assert lease.take()
    lease.release()


@pytest.mark.fault("F43")
def test_a_process_that_begins_during_the_wait_keeps_the_lease(tmp_path, storage, monkeypatch):
    write(tmp_path, elsewhere())
    lease = Lease(storage, "next")
    now_s, begun = 0.0, elsewhere(host="third", pid=33, token="cd")

    def wait(seconds: float) -> bool:
        nonlocal now_s
        now_s += seconds
        if now_s > 30.0:  # not before: the first look has not seen it
            show_life(tmp_path, begun, int(now_s / 15.0))
        return False

    monkeypatch.setattr("ps.checkpoint.lease.time.monotonic", lambda: now_s)
    monkeypatch.setattr(lease._ended, "wait", wait)
    with pytest.raises(CheckpointError, match=r"used by job 'other' \(host third, pid 33\)"):
        lease.take()
    assert now_s < 120.0


def test_a_wait_for_a_silent_lease_does_not_list_the_directory_at_each_look(
    tmp_path, storage, monkeypatch
):
    write(tmp_path, elsewhere())
    lease = Lease(storage, "next")
    now_s, num_listings, really_list = 0.0, 0, storage.names

    def wait(seconds: float) -> bool:
        nonlocal now_s
        now_s += seconds
        return False

    def names(directory: str = "") -> list[str]:
        nonlocal num_listings
        num_listings += 1
        return really_list(directory)

    with monkeypatch.context() as patch:
        patch.setattr("ps.checkpoint.lease.time.monotonic", lambda: now_s)
        patch.setattr(lease._ended, "wait", wait)
        patch.setattr(lease, "_begin_to_beat", lambda: None)
        patch.setattr(storage, "names", names)
        assert lease.take()
    assert now_s >= 60.0
    assert num_listings == 3  # when it began, before it took over, and what remains is removed
    lease.release()


@pytest.mark.fault("F43")
def test_the_last_process_of_a_job_gives_back_what_its_lost_chief_has_taken(tmp_path, storage):
    write(tmp_path, elsewhere(owner="job"))
    moved = Lease(storage, "job", timing=LeaseTiming(renew_s=0.01, silent_s=0.05))
    assert not moved.take()
    wait_until(lambda: moved._creator.silent_s >= 0.05, "the silence of the lost process")
    moved.release()
    assert found(tmp_path) is None


@pytest.mark.fault("F43")
def test_a_process_that_ends_gives_back_what_one_has_taken_that_ended_here(tmp_path, storage):
    moved = Lease(storage, "job")
    write(tmp_path, elsewhere(owner="job"))
    assert not moved.take()
    write(tmp_path, msgspec.structs.replace(this_holder("job", "ab"), started="1"))
    moved.release()
    assert found(tmp_path) is None


@pytest.mark.fault("F43")
@pytest.mark.parametrize("renewed", [True, False])
def test_a_lease_of_a_process_that_may_live_stays(tmp_path, storage, renewed):
    """That one renews, or was not watched for long enough."""
    write(tmp_path, elsewhere(owner="job"))
    other = Lease(storage, "job", timing=LeaseTiming(renew_s=0.01 if renewed else 15.0))
    looks = 0

    def renew() -> None:
        nonlocal looks
        looks += 1
        show_life(tmp_path, elsewhere(owner="job"), looks)

    other.at_renewal = renew
    assert not other.take()
    wait_until(lambda: not renewed or looks > 3)
    other.release()
    assert found(tmp_path) == elsewhere(owner="job")
