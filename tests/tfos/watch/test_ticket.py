"""Tickets of drivers: private files, those of dead drivers forgotten; records of ended runs."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from tests.support.cluster_states import node_id, report_to
from tests.support.watched_job import WatchedJob
from tfos.control import messages
from tfos.errors import SettingsError
from tfos.failure import EXECUTOR_LOST
from tfos.watch import run_history, ticket
from tfos.watch.operator import choose


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return directory


def made(cluster_id: str = "c0ffee", **fields: object) -> ticket.DriverTicket:
    return ticket.DriverTicket.of_this(
        **{
            "cluster_id": cluster_id,
            "name": "digits",
            "application_id": "app-7",
            "started_at": 1e9,
            "address": "127.0.0.1:1",
            "cert_pem": b"c",
            "key_pem": b"k",
            "ca_pem": b"a",
            **fields,
        }
    )


@pytest.mark.attack("A16")
def test_a_ticket_is_its_users_alone_and_shows_no_key():
    path = ticket.write(made())
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert ticket.read_all() == [made()]
    assert "k'" not in repr(made())


@pytest.mark.attack("A16")
def test_a_ticket_that_another_user_could_have_written_is_not_read(tmp_path):
    path = ticket.write(made())
    path.chmod(0o644)
    assert ticket.read_all() == []
    path.chmod(0o600)
    link = path.with_name("link.ticket")
    link.symlink_to(path)
    assert len(ticket.read_all()) == 1
    os.mkfifo(path.with_name("pipe.ticket"), 0o600)
    assert len(ticket.read_all()) == 1
    path.write_bytes(b"\xff" * 100)
    assert ticket.read_all() == []


@pytest.mark.attack("A16")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to another user")
def test_a_ticket_of_another_user_is_not_read():
    path = ticket.write(made())
    os.chown(path, 1001, -1)
    assert ticket.read_all() == []


@pytest.mark.attack("A16")
def test_a_directory_that_others_can_write_is_refused(runtime):
    ticket.write(made()).parent.chmod(0o777)
    with pytest.raises(SettingsError, match="others can write it"):
        ticket.read_all()


def test_a_runtime_directory_of_another_login_is_not_used(tmp_path, monkeypatch):
    """As after su, which leaves root's in the variable."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert ticket.directory_of_tickets() == tmp_path / "cache" / "tfos" / "drivers"


@pytest.mark.attack("A16")
def test_a_runtime_directory_that_others_can_write_is_not_used(runtime, tmp_path, monkeypatch):
    runtime.chmod(0o777)
    assert ticket.directory_of_tickets() == tmp_path / "cache" / "tfos" / "drivers"


@pytest.mark.attack("A16")
@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "XDG_CACHE_HOME"])
def test_a_ticket_stays_where_the_checked_directory_is(tmp_path, monkeypatch, variable):
    """A link above it that others turn takes the key nowhere, nor its removal."""
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    mine.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "link").symlink_to(mine)
    (mine / "run").mkdir(mode=0o700)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv(variable, str(shared / "link" / "run"))
    path = ticket.write(made())
    assert path.is_relative_to(mine / "run")
    assert ticket.read_all() == [made()]


def test_a_ticket_of_a_driver_that_has_ended_is_removed():
    path = ticket.write(msgspec.structs.replace(made(), started="1"))  # of this pid, long ago
    assert ticket.read_all() == []
    assert not path.exists()


def test_a_driver_without_a_runtime_directory_is_found_from_a_login(monkeypatch, runtime):
    """As one under cron or nohup."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    path = ticket.write(made())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert ticket.read_all() == [made()]
    path.parent.chmod(0o777)  # no reason to refuse what the login's own directory holds
    assert ticket.read_all() == []
    ticket.write(made("aa11"))
    assert ticket.read_all() == [made("aa11")]


def test_a_driver_of_a_login_is_found_without_a_runtime_directory(monkeypatch, tmp_path):
    login = tmp_path / "logins" / str(os.geteuid())
    login.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(ticket, "LOGINS", str(login.parent))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(login))
    ticket.write(made())
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert ticket.directory_of_tickets() == tmp_path / "cache" / "tfos" / "drivers"
    assert ticket.read_all() == [made()]


def test_a_ticket_of_another_host_stays_and_is_left_out():
    path = ticket.write(msgspec.structs.replace(made(), kernel="another"))
    assert ticket.read_all() == []
    assert path.exists()


def test_a_job_is_chosen_by_its_ids_or_name(tmp_path):
    one, other = made("aa11"), made("bb22", name="words", application_id="app-8")
    both = [one, other]
    assert choose([one], "") is one
    for wanted in ("bb", "words", "app-8"):
        assert choose(both, wanted) is other
    with pytest.raises(SettingsError, match=r"^2 jobs run: choose one with --job ID: aa11 .*bb22"):
        choose(both, "")
    with pytest.raises(
        SettingsError, match=r"^2 running jobs match 'words': [^;]*cc33[^;]*; bb22[^;]*$"
    ):
        choose([made("cc33", name="words"), one, other], "words")
    with pytest.raises(SettingsError, match="no running job matches 'cc'; there are aa11"):
        choose(both, "cc")
    with pytest.raises(SettingsError, match="no job of this user runs on this host") as refused:
        choose([], "")
    assert f" in {tmp_path}/run/tfos or " in str(refused.value)
    assert f" or {tmp_path}/cache/tfos/drivers. Ask" in str(refused.value)


def test_a_finished_run_leaves_a_small_record():
    bed = WatchedJob()
    bed.beat("worker:0", 1, progress={"at_s": 1.0, "steps": 8.0, "loss": 0.25})
    bed.fail("worker:1", error_type="ValueError", message="broken row\nmore")
    bed.coordinator.close()
    run_history.add(run_history.record_of(bed.job.snapshot()))
    [record] = run_history.read_all()
    assert (record.state, record.steps, record.loss) == ("FAILED", 8, 0.25)
    assert record.failure == "worker:1: ValueError: broken row"


@pytest.mark.parametrize(
    ("workers", "state"),
    [("train", "INTERRUPTED"), ("start again", "INTERRUPTED"), ("have returned", "CLOSED")],
)
def test_a_record_tells_a_run_that_was_cut_off_from_one_that_has_ended(workers: str, state: str):
    bed = WatchedJob(restarts=1)
    for name in ("worker:0", "worker:1"):
        if workers == "start again":
            bed.fail(name, signal=9)
        elif workers == "have returned":
            report_to(bed.coordinator, node_id(name), messages.Done())
    for _ in range(2):  # the workers, then all that live
        bed.coordinator.act(lambda cluster: cluster.end(cluster.live(), "abort()", grace_s=1.0))
    bed.coordinator.close()
    assert run_history.record_of(bed.job.snapshot()).state == state


def test_steps_and_loss_of_a_record_are_those_of_the_workers_without_the_evaluator():
    bed = WatchedJob(evaluates=True)
    bed.beat("worker:0", 1, progress={"at_s": 1.0, "steps": 8.0, "loss": 0.25})
    bed.beat("evaluator:0", 1, progress={"at_s": 1.0, "steps": 1200.0, "loss": 0.75})
    record = run_history.record_of(bed.job.snapshot())
    assert (record.steps, record.loss) == (8, 0.25)


def test_steps_of_a_record_are_also_those_of_attempts_that_were_lost():
    bed = WatchedJob(restarts=1)
    bed.beat("worker:0", 1, progress={"at_s": 5000.0, "steps": 90_000.0})
    bed.fail("worker:0", error_type=EXECUTOR_LOST)
    assert run_history.record_of(bed.job.snapshot()).steps == 90_000
    again = node_id("worker:0", 100)
    bed.coordinator.on_register(messages.Register(again, "1", "host-a", 8))
    progress = {"at_s": 50.0, "steps": 10_000.0}
    bed.coordinator.on_heartbeat(messages.Heartbeat(again, 1, "main_fun", progress=progress))
    assert run_history.record_of(bed.job.snapshot()).steps == 100_000


@pytest.mark.parametrize(("field", "value"), [("started_at", 1e20), ("ended_at", -1.0)])
def test_a_record_whose_time_is_no_date_is_left_out(field, value):
    """As a damaged file has it: no table can show it."""
    record = run_history.record_of(WatchedJob().job.snapshot())
    run_history.add(record)
    damaged = {"started_at": record.started_at + 1, field: value}
    run_history.add(msgspec.structs.replace(record, **damaged))
    assert run_history.read_all() == [record]


def test_the_history_may_lie_below_a_link(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home" / "state"))
    run_history.add(run_history.record_of(WatchedJob().job.snapshot()))
    assert len(run_history.read_all()) == 1


def test_the_history_keeps_the_newest_runs(monkeypatch):
    monkeypatch.setattr(run_history, "MOST_RUNS", 3)
    last = WatchedJob().job.snapshot()
    for number in range(6):
        last |= {"started_at": 1e9 + number, "cluster_id": f"c{number}"}
        run_history.add(run_history.record_of(last))
    assert [each.cluster_id for each in run_history.read_all()] == ["c5", "c4", "c3"]
