"""Event files of other workers come to the host whose TensorBoard shows them, and stay theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from feeding.errors import FileChanged, StorageUnavailable
from feeding.filesystem.interface import FileStatus
from feeding.filesystem.local import LocalFileSystem
from tests.support.full_disk import file_limit
from tests.support.hostile_names import NAMES_THAT_LEAD_ASTRAY
from tests.support.waiting import wait_until
from tfos.files import log_fetch
from tfos.files.log_fetch import LogFetch
from tfos.worker.reports.log_mirror import LogMirror

EVENTS = "events.out.tfevents.17.host.9"


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    return tmp_path / "here", tmp_path / "there"


def put(root: Path, name: str, content: bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_files_of_others_come_and_grow_in_place_and_are_not_sent_back(places):
    here, there = places
    own = put(here, f"worker-0/train/{EVENTS}", b"mine")
    theirs = put(there, f"worker-1/train/{EVENTS}", b"one")
    put(there, "worker-1/model.keras", b"no event file")
    mirror = LogMirror(str(here), str(there), period_s=0.01, fetches=True)
    mirror.start()
    came = here / "worker-1/train" / EVENTS
    wait_until(lambda: came.exists() and came.read_bytes() == b"one", "the other worker's file")
    with came.open("rb") as reader:  # as TensorBoard, which keeps it open
        assert reader.read() == b"one"
        theirs.with_suffix(".new").write_bytes(b"one two")
        os.replace(theirs.with_suffix(".new"), theirs)  # as a mirror there does
        sent = theirs.stat().st_ino
        wait_until(lambda: came.read_bytes() == b"one two", "its growth")
        assert reader.read() == b" two"
    put(there, "later/" + EVENTS, b"a run before this one")
    mirror.close(10.0)
    assert (here / "later" / EVENTS).read_bytes() == b"a run before this one"
    assert (theirs.read_bytes(), theirs.stat().st_ino) == (b"one two", sent)
    assert (there / "worker-0/train" / EVENTS).read_bytes() == own.read_bytes() == b"mine"
    assert not (here / "worker-1/model.keras").exists()
    assert came.stat().st_mode & 0o077 == 0


def fetch(here: Path, there: Path, **limits: int) -> LogFetch:
    return LogFetch(LocalFileSystem(), str(there), here, **limits)


def test_a_file_that_is_here_already_is_left_alone(places):
    here, there = places
    put(here, f"worker-0/{EVENTS}", b"longer than there")
    put(there, f"worker-0/{EVENTS}", b"short")
    round_ = fetch(here, there)
    round_.round()
    put(there, f"worker-0/{EVENTS}", b"much longer than what is here")
    round_.round()
    assert (here / "worker-0" / EVENTS).read_bytes() == b"longer than there"
    assert round_.names == set()


def test_what_is_fetched_has_a_limit_that_is_told_once(places, caplog):
    here, there = places
    for number in range(3):
        put(there, f"run/{EVENTS}.{number}", bytes(100))
    round_ = fetch(here, there, most_bytes=250)
    round_.round()
    round_.round()
    assert sorted(path.name for path in (here / "run").iterdir()) == [f"{EVENTS}.0", f"{EVENTS}.1"]
    assert [record.getMessage() for record in caplog.records] == [
        f"TensorBoard shows a part of {there}: its event files have more than 250 bytes; view the "
        "rest elsewhere, or use a log_dir for each run"
    ]


def test_a_disk_that_was_full_for_a_while_leaves_no_part_twice(places):
    """TensorBoard reads a file up to its first damaged record, and no further."""
    here, there = places
    sent = put(there, f"run/{EVENTS}", bytes(range(250)) * 40)
    fetches = fetch(here, there)
    with file_limit(4096), pytest.raises(OSError, match="too large"):
        fetches.round()
    fetches.round()
    assert (here / "run" / EVENTS).read_bytes() == sent.read_bytes()


def test_a_file_that_is_sent_again_while_it_is_fetched_comes_in_the_next_round(places):
    here, there = places
    for name in ("a", "b"):
        put(there, f"{name}.{EVENTS}", b"x")
    replaced = ["once"]

    class Fs(LocalFileSystem):
        def open(self, path):
            if f"a.{EVENTS}" in str(path) and replaced:
                raise FileChanged(f"{path} was {replaced.pop()} another")
            return super().open(path)

    fetches = LogFetch(Fs(), str(there), here)
    fetches.round()
    assert fetches.names == {f"b.{EVENTS}"}
    fetches.round()
    assert fetches.names == {f"a.{EVENTS}", f"b.{EVENTS}"}


def test_directories_that_nest_for_ever_end(places):
    here, there = places
    put(there, "/".join("x" * 30) + f"/{EVENTS}", b"deep")
    fetch(here, there).round()
    assert not any(path.is_file() for path in here.rglob("*"))


def test_a_round_lists_a_bounded_number_of_directories(places, monkeypatch):
    here, there = places
    for number in range(5):
        put(there, f"run-{number}/{EVENTS}", b"x")
    monkeypatch.setattr(log_fetch, "MOST_DIRECTORIES", 3)
    fetch(here, there).round()
    assert len(list(here.rglob(EVENTS))) == 2, "the first listed is the directory above"


@pytest.mark.attack("A18")
def test_odd_names_and_links_lead_nowhere(places, monkeypatch):
    here, there = places
    outside = put(here.parent, "outside", b"safe")
    (here / "link").symlink_to(here.parent)
    (here / f"file.{EVENTS}").symlink_to(outside)
    names = [*NAMES_THAT_LEAD_ASTRAY, "../outside", f"../{EVENTS}"]
    listed = [FileStatus(f"{there}/{name}{EVENTS}", 7, False) for name in names]
    listed += [FileStatus(f"{there}/link", 0, True), FileStatus(f"{there}/..", 0, True)]
    listed += [FileStatus(f"{there}/file.{EVENTS}", 7, False)]

    class Fs(LocalFileSystem):
        def entries(self, directory) -> list[FileStatus]:
            return (
                listed
                if str(directory) == str(there)
                else [FileStatus(f"{directory}/{EVENTS}", 7, False)]
            )

    put(there, EVENTS, b"hostile")
    LogFetch(Fs(), str(there), here).round()
    assert outside.read_bytes() == b"safe"
    assert sorted(path.name for path in here.parent.iterdir()) == ["here", "outside", "there"]


@pytest.mark.fault("F40")
def test_a_file_system_that_is_away_is_told_once_and_asked_again(places, monkeypatch, caplog):
    here, there = places
    put(there, EVENTS, b"x")
    mirror = LogMirror(str(here), str(there), fetches=True)

    def away(*_: object) -> None:
        raise StorageUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "entries", away)
        mirror._round()
        mirror._round()
    assert len(caplog.records) == 1
    assert "cannot be fetched from" in caplog.text
    mirror._round()
    assert (here / EVENTS).read_bytes() == b"x"
    assert len(caplog.records) == 2
