"""Event files on their way to a log directory elsewhere: what is sent, when, and what never is."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from feeding.errors import StorageUnavailable
from feeding.filesystem.interface import Pieces
from feeding.filesystem.local import LocalFileSystem
from tests.support.hostile_names import NAMES_THAT_LEAD_ASTRAY
from tests.support.waiting import wait_until
from tfos.worker.reports.log_mirror import LogMirror


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "here").mkdir()
    return tmp_path / "here", tmp_path / "there"


def test_files_are_sent_as_they_grow_and_once_more_at_the_end(places):
    here, there = places
    mirror = LogMirror(str(here), str(there), period_s=0.01)
    mirror.start()
    (here / "worker-0" / "train").mkdir(parents=True)
    events = here / "worker-0" / "train" / "events.1"
    events.write_bytes(b"one")
    wait_until(lambda: contents(there) == contents(here), "the first round")
    with events.open("ab") as file:
        file.write(b" two")
    wait_until(lambda: contents(there) == {"worker-0/train/events.1": b"one two"}, "the growth")
    mirror.close(10.0)
    mirror.close(10.0)
    assert [path.name for path in there.rglob("*") if path.name.startswith(".")] == []


def test_the_last_round_does_not_wait_for_the_period(places):
    here, there = places
    mirror = LogMirror(str(here), str(there), period_s=3600)
    mirror.start()
    (here / "events").write_bytes(b"x")
    mirror.close(10.0)
    assert contents(there) == {"events": b"x"}


def test_a_file_that_cannot_be_looked_at_delays_no_other(places, monkeypatch):
    """As one whose directory became a file since it was listed."""
    here, there = places
    (here / "a").write_bytes(b"was a directory")
    (here / "events").write_bytes(b"x")
    monkeypatch.setattr(
        os, "walk", lambda _: iter([(str(here / "a"), [], ["gone"]), (str(here), [], ["events"])])
    )
    LogMirror(str(here), str(there))._round()
    assert contents(there) == {"events": b"x"}


def test_what_did_not_change_is_not_sent_again(places, monkeypatch):
    here, there = places
    sent: list[str] = []
    write = LocalFileSystem.write

    def noted(fs: LocalFileSystem, path: str, content: Pieces) -> None:
        sent.append(path)
        write(fs, path, content)

    monkeypatch.setattr(LocalFileSystem, "write", noted)
    mirror = LogMirror(str(here), str(there))
    (here / "a").write_bytes(b"a")
    mirror._send_changed()
    (here / "b").write_bytes(b"b")
    mirror._send_changed()
    assert sent == [str(there / "a"), str(there / "b")]


@pytest.mark.fault("F40")
def test_a_log_directory_that_is_away_is_told_once_and_tried_again(places, monkeypatch, caplog):
    here, there = places
    (here / "events").write_bytes(b"x")

    def away(*_: object) -> None:
        raise StorageUnavailable("cannot write hdfs://nn/logs: no answer")

    mirror = LogMirror(str(here), str(there))
    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "write", away)
        mirror._send_changed()
        mirror._send_changed()
    assert [record.getMessage() for record in caplog.records] == [
        f"log files cannot be sent to {there}: cannot write hdfs://nn/logs: no answer; sending is "
        "retried, training goes on"
    ]
    mirror._send_changed()
    assert "are sent to" in caplog.text
    assert contents(there) == {"events": b"x"}


@pytest.mark.fault("F40")
@pytest.mark.parametrize("kind", [IsADirectoryError, RuntimeError])
def test_a_file_that_cannot_be_sent_keeps_no_other_one_back(places, monkeypatch, caplog, kind):
    here, there = places
    write = LocalFileSystem.write

    def refuse_one(fs: LocalFileSystem, path: str, content: Pieces) -> None:
        if path.endswith("/a"):
            raise kind("it is a directory there")
        write(fs, path, content)

    monkeypatch.setattr(LocalFileSystem, "write", refuse_one)
    for name in "abc":
        (here / name).write_text(name)
    mirror = LogMirror(str(here), str(there))
    mirror._send_changed()
    (here / "c").write_text("more")
    mirror._send_changed()
    assert contents(there) == {"b": b"b", "c": b"more"}
    assert len(caplog.records) == 1


def test_a_file_that_is_removed_while_others_are_sent_is_passed_over(places, monkeypatch, caplog):
    here, there = places
    write = LocalFileSystem.write

    def remove_next(fs: LocalFileSystem, path: str, content: Pieces) -> None:
        (here / "b").unlink(missing_ok=True)
        write(fs, path, content)

    monkeypatch.setattr(LocalFileSystem, "write", remove_next)
    for name in "abc":
        (here / name).write_text(name)
    LogMirror(str(here), str(there))._send_changed()
    assert contents(there) == {"a": b"a", "c": b"c"}
    assert caplog.records == []


@pytest.mark.fault("F40")
def test_the_end_does_not_wait_for_a_file_system_that_hangs(places, monkeypatch, caplog):
    here, there = places
    (here / "events").write_bytes(b"x")
    hangs = threading.Event()
    monkeypatch.setattr(LocalFileSystem, "write", lambda *_: hangs.wait(20))
    mirror = LogMirror(str(here), str(there))
    mirror.start()
    mirror.close(0.05)
    assert "the last log files were not sent to" in caplog.text
    hangs.set()
    mirror.close(10.0)


@pytest.mark.attack("A18")
def test_odd_names_links_and_pipes_are_not_sent_and_nothing_outside_is_touched(places, caplog):
    here, there = places
    outside = here.parent / "outside"
    outside.write_text("secret")
    made = set()
    for name in NAMES_THAT_LEAD_ASTRAY:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            continue  # no name on this disk
        try:
            (here / name).write_text("hostile")
        except (OSError, UnicodeEncodeError):
            continue
        made.add(name)
    assert len(made) >= 20
    (here / "link").symlink_to(outside)
    (here / "directory").symlink_to(here.parent)
    os.mkfifo(here / "pipe")
    (here / "events").write_text("fine")
    mirror = LogMirror(str(here), str(there))
    mirror._send_changed()
    mirror._send_changed()
    assert sorted(path.name for path in there.iterdir()) == ["events"]
    assert sorted(path.name for path in here.parent.iterdir()) == ["here", "outside", "there"]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(made)
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_sending_takes_a_small_part_of_the_time(places, monkeypatch):
    here, there = places
    mirror = LogMirror(str(here), str(there), period_s=0.5)
    pauses: list[float] = []

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == 3

    now_s = iter([0.0, 0.01, 10.0, 13.0])
    monkeypatch.setattr("tfos.worker.reports.log_mirror.time.monotonic", lambda: next(now_s))
    monkeypatch.setattr(mirror._ended, "wait", wait)
    mirror._run()
    assert pauses == [0.5, 0.5, 60.0]
