"""What becomes visible of a write: all of it or nothing, also when a move fails half way."""

from __future__ import annotations

from pathlib import Path

import pytest

from feeding.filesystem.local import LocalFileSystem
from tfos.datasource.staged_job import StagedFile, StagedJob


def staged(job: StagedJob, *names: str) -> list[StagedFile]:
    files = []
    for name in names:
        place = Path(job.attempt(), name)
        place.parent.mkdir(parents=True)
        place.write_text("new")
        files.append(StagedFile(str(place), name))
    return files


def seen(root: Path) -> dict[str, str]:
    files = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_text() for path in files}


@pytest.fixture
def old(tmp_path) -> Path:
    for name in ("part-0", "day=1/part-0", "_SUCCESS"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("old")
    return tmp_path / "data"


def test_an_appended_job_adds_its_files(old):
    job = StagedJob(str(old), "j", replaces=False, makes_root=False)
    files = staged(job, "part-j", "day=2/part-j")
    assert all("_temporary" in name for name, text in seen(old).items() if text == "new")
    job.commit(files)
    added = {"part-j": "new", "day=2/part-j": "new", "_SUCCESS": ""}
    assert seen(old) == {"part-0": "old", "day=1/part-0": "old", **added}


def test_a_job_that_replaces_leaves_nothing_old(old):
    job = StagedJob(str(old), "j", replaces=True, makes_root=False)
    job.commit(staged(job, "day=2/part-j"))
    assert seen(old) == {"day=2/part-j": "new", "_SUCCESS": ""}
    assert sorted(path.name for path in old.iterdir()) == ["_SUCCESS", "day=2"]


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 2, 3, 4, 5])
def test_a_commit_that_fails_half_way_leaves_what_was_there(old, monkeypatch, replaces, failing):
    job = StagedJob(str(old), "j", replaces=replaces, makes_root=False)
    files = staged(job, "part-j", "day=1/part-j", "day=2/hour=3/part-j")
    before = {name: text for name, text in seen(old).items() if text == "old"}
    there = set(old.glob("day*"))
    rename, calls = LocalFileSystem.rename, []

    def fail_once(self, source, target, *, overwrite=False):
        calls.append(target)
        if len(calls) == failing + 1:
            raise PermissionError(13, "denied", str(target))
        rename(self, source, target, overwrite=overwrite)

    monkeypatch.setattr(LocalFileSystem, "rename", fail_once)
    if not replaces and failing >= 3:
        job.commit(files)
        return
    with pytest.raises(PermissionError):
        job.commit(files)
    job.abort()
    assert seen(old) == before
    assert set(old.glob("day*")) == there


def test_what_cannot_be_moved_back_is_kept(old, monkeypatch, caplog):
    job = StagedJob(str(old), "j", replaces=True, makes_root=False)
    files = staged(job, "part-j")
    rename, calls = LocalFileSystem.rename, []

    def fail_from_the_third_on(self, source, target, *, overwrite=False):
        calls.append(target)
        if len(calls) > 2:
            raise PermissionError(13, "denied", str(target))
        rename(self, source, target, overwrite=overwrite)

    monkeypatch.setattr(LocalFileSystem, "rename", fail_from_the_third_on)
    with pytest.raises(PermissionError):
        job.commit(files)
    job.abort()
    assert sorted(text for text in seen(old).values()) == ["new", "old", "old", "old"]
    assert "_temporary/j/replaced; move it back by hand" in caplog.text


def test_an_aborted_job_takes_its_directory_with_it_unless_another_uses_it(tmp_path):
    root = tmp_path / "data"
    first, second = (StagedJob(str(root), name, False, True) for name in "ab")
    files = staged(second, "part-b")
    staged(first, "part-a")
    first.abort()
    second.commit(files)
    assert seen(root) == {"part-b": "new", "_SUCCESS": ""}
    third = StagedJob(str(tmp_path / "other"), "c", False, True)
    staged(third, "part-c")
    third.abort()
    assert not (tmp_path / "other").exists()
