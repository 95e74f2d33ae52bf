"""Staging directories: those of ended savers go, those of savers that live or may live stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ps.checkpoint import lease as leases
from ps.checkpoint.format import STAGING_PREFIX
from ps.checkpoint.lease import LEASE_NAME, Beat, Lease, LeaseTiming, this_holder
from ps.checkpoint.staging import Staging
from ps.checkpoint.storage import LocalStorage, storage_at
from ps.errors import CheckpointError
from tests.support.waiting import wait_until

ELSEWHERE = "another boot pid:[1]"
NEVER = LeaseTiming(renew_s=3600.0)


class Process:
    """One process of a job that saves in a directory, as the others see it."""

    def __init__(self, root: Path, job: str = "job", timing: LeaseTiming = NEVER) -> None:
        self.root = root
        self.lease = Lease(storage_at(root), job, timing=timing)
        self.lease.take()
        self.staging = Staging(storage_at(root), self.lease)
        self.beat = root / f".{LEASE_NAME}.{self.lease.token}.beat"

    def stage(self) -> Path:
        staged = self.root / f"{STAGING_PREFIX}{self.staging.new_save_id()}"
        staged.mkdir()
        (staged / "ps-0.data").write_bytes(b"x" * 1000)
        return staged

    def be(self, beat: int = 1, **changes: str) -> None:
        """Let its files be those of another process."""
        holder = msgspec.structs.replace(this_holder("job", self.lease.token), **changes)
        fields = msgspec.structs.asdict(holder)
        self.beat.write_bytes(msgspec.json.encode(Beat(**fields, beat=beat)))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Process]]:
    """Two of one job; the first has created the lease."""
    both = [Process(tmp_path), Process(tmp_path)]
    yield both
    for each in both:
        each.lease.release()


@pytest.mark.fault("F10")
def test_what_a_killed_saver_of_the_same_job_has_staged_goes(processes: list[Process]):
    chief, killed = processes
    staged, own = [killed.stage(), killed.stage()], chief.stage()
    killed.be(started="1")
    chief.staging.sweep_beside_save()
    assert not any(each.exists() for each in staged)
    assert own.exists(), "its save may be under way"
    chief.staging.sweep_before_save()
    assert not own.exists(), "no save is under way: a late server has written it"


@pytest.mark.fault("F10")
def test_what_the_killed_creator_of_the_lease_has_staged_goes_with_the_next_ones_first_save(
    tmp_path: Path,
):
    killed = Process(tmp_path)
    staged = killed.stage()
    killed.be(started="1")
    (tmp_path / LEASE_NAME).write_bytes(killed.beat.read_bytes())
    chief = Process(tmp_path)
    chief.staging.sweep_before_save()
    assert not staged.exists()
    for each in (chief, killed):
        each.lease.release()


@pytest.mark.fault("F10")
def test_what_a_live_saver_of_the_same_job_has_staged_stays(processes: list[Process]):
    for one, other in (processes, processes[::-1]):
        staged = other.stage()
        one.staging.sweep_before_save()
        one.staging.sweep_beside_save()
        assert staged.exists()


@pytest.mark.fault("F10")
@pytest.mark.parametrize("has_beat", [True, False])
def test_a_saver_of_another_host_has_to_be_silent_first(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch, has_beat: bool
):
    chief, far = processes
    chief.lease.timing = leases.DEFAULT_TIMING
    now_s = 0.0
    monkeypatch.setattr("ps.checkpoint.staging.time.monotonic", lambda: now_s)
    staged = far.stage()
    for look in range(40):  # of 15 s each
        if has_beat:
            far.be(beat=look // 3, kernel=ELSEWHERE)
        elif look % 3 == 0:
            far.be(beat=look, kernel=ELSEWHERE)
        else:
            far.beat.unlink(missing_ok=True)  # removed with the remains of a killed holder
        chief.staging.sweep_beside_save()
        assert staged.exists()
        now_s += 15.0
    if not has_beat:
        far.beat.unlink(missing_ok=True)
    for _ in range(6):
        chief.staging.sweep_beside_save()
        now_s += 15.0
    assert not staged.exists()


@pytest.mark.fault("F43")
def test_what_another_job_has_staged_goes_once_this_one_has_the_lease(tmp_path: Path):
    other = Process(tmp_path, "other")
    staged = [other.stage(), tmp_path / ".tmp-0123456789abcdef", tmp_path / ".tmp-removed-ab"]
    for each in staged[1:]:
        each.mkdir()
    with pytest.raises(CheckpointError, match="used by job 'other'"):
        Process(tmp_path)
    assert all(each.exists() for each in staged)
    other.lease.release()
    job = Process(tmp_path)
    job.staging.sweep_before_save()
    assert not any(each.exists() for each in staged)
    job.lease.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("F43")
def test_a_saver_that_was_followed_while_it_was_frozen_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Between its listing and its look at the lease, or before both."""
    frozen = Process(tmp_path)
    followers: list[Process] = []
    staged: list[Path] = []
    names = LocalStorage.names

    def followed(self: LocalStorage, directory: str = "") -> list[str]:
        found = names(self, directory)
        monkeypatch.undo()
        (tmp_path / LEASE_NAME).unlink()
        followers.append(Process(tmp_path, "other"))
        staged.append(followers[0].stage())
        return [*found, staged[0].name]

    monkeypatch.setattr(LocalStorage, "names", followed)
    frozen.staging.sweep_beside_save()
    frozen.staging.sweep_beside_save()
    assert staged[0].exists()
    assert "were not removed" in caplog.text
    for each in (frozen, *followers):
        each.lease.release()


@pytest.mark.fault("F10")
def test_a_commit_finds_all_of_what_is_swept_or_nothing(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
):
    chief, killed = processes
    staged = killed.stage()
    killed.be(started="1")
    found: list[bool] = []
    remove = LocalStorage.remove

    def removing(self: LocalStorage, name: str) -> None:
        found.append(staged.exists())
        remove(self, name)

    monkeypatch.setattr(LocalStorage, "remove", removing)
    chief.staging.sweep_before_save()
    assert found == [False]


def test_a_lease_sweeps_each_time_it_is_renewed(tmp_path: Path):
    killed = Process(tmp_path)
    staged = killed.stage()
    killed.be(started="1")
    job = Process(tmp_path, timing=LeaseTiming(renew_s=0.01))
    wait_until(lambda: not staged.exists(), "a sweep")
    for each in (job, killed):
        each.lease.release()
