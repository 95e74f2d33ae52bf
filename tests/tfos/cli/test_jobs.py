"""Commands about jobs, against a real driver's control server with played nodes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.cluster_states import node_id
from tests.support.fake_spark import FakeSpark
from tests.support.waiting import WAIT_S, wait_until
from tests.support.watched_job import WatchedJob
from tfos import ClusterConfig, InputMode, TFCluster
from tfos.cli import jobs, main
from tfos.console.log_tail import MOST_CHARS
from tfos.control import messages
from tfos.control.client import ControlClient
from tfos.control.coordinator import LAST_LOOK_S
from tfos.errors import ControlRefused, NotEnoughSlots, SettingsError
from tfos.phases import ClusterPhase
from tfos.watch import ticket

pytestmark = pytest.mark.socket
RUNNER = CliRunner()


def called(*arguments: str):
    return RUNNER.invoke(main.app, list(arguments), env={"COLUMNS": "160"})


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tfos.control.coordinator.LAST_LOOK_S", 0.0)  # nobody looks again


@pytest.fixture
def cluster() -> Iterator[TFCluster]:
    spark = FakeSpark()
    config = ClusterConfig(verbose=False)
    made = TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK, config=config, page_port=0)
    with made:
        made.start(lambda args, ctx: None)
        yield made
    spark.close()


def test_a_job_is_shown_its_log_read_and_its_end_recorded(cluster):
    shown = called("status")
    assert shown.exit_code == 0
    for text in ("fake (fake-1)", cluster.cluster_id, "RUNNING", "worker:1"):
        assert text in shown.output
    assert json.loads(called("status", "--json").output)["phase"] == "RUNNING"
    batch = messages.LogBatch(node_id("worker:1"), ("[bold]one", "\x1b[2Jtwo"))
    cluster._coordinator.on_log(batch)
    assert called("logs", "worker:1").output == "[bold]one\n\\x1b[2Jtwo\n"
    wrong = called("logs", "worker:9")
    assert (wrong.exit_code, "it has ps:0, worker:0, worker:1" in wrong.output) == (2, True)
    assert called("page").output == f"{cluster.page_url()}\n"
    assert called("save").exit_code == 2
    assert "Checkpoints(directory)" in called("save", "--job", cluster.cluster_id[:4]).output
    assert "the training stops" in called("stop").output
    assert "asked to stop" in called("status").output
    cluster.shutdown()
    ended = called("status")
    assert (ended.exit_code, "no job of this user runs" in ended.output) == (2, True)
    [record] = json.loads(called("history", "--json").output)
    assert (record["cluster_id"], record["state"]) == (cluster.cluster_id, "CLOSED")
    assert cluster.cluster_id in called("history").output


def test_the_last_save_and_the_best_checkpoint_are_shown(capsys):
    bed = WatchedJob()
    jobs._show(bed.job.snapshot())
    assert "checkpoint" not in capsys.readouterr().out
    saved = messages.SavedNow(0, path="/runs/7/step-8", step=8)
    bed.note(saved)
    best = messages.BestSaved("/runs/7/step-4", 4, "val_loss", 0.25)
    bed.note(best)
    jobs._show(bed.job.snapshot())
    shown = capsys.readouterr().out
    assert "the last requested save: /runs/7/step-8\n" in shown
    assert "the best checkpoint, val_loss 0.25: /runs/7/step-4\n" in shown
    failed = messages.SavedNow(1, error="the disk is\nfull")
    bed.note(failed)
    jobs._show(bed.job.snapshot())
    assert "last requested save: nothing was saved: the disk is\\nfull\n" in capsys.readouterr().out


def test_a_user_without_a_home_is_told_so(monkeypatch):
    monkeypatch.setattr("tfos.watch.run_history.directory_of_runs", lambda: None)
    told = called("history")
    assert (told.exit_code, "set XDG_STATE_HOME" in told.stdout) == (0, True)


def test_a_log_without_lines_says_so_and_one_with_lines_does_not(cluster):
    """The sentence is no line of the log: it goes to stderr, and a script reads nothing."""
    silent = called("logs", "worker:1")
    assert (silent.exit_code, silent.stdout) == (0, "")
    assert silent.stderr == "tfos: no output of worker:1 is here yet\n"
    assert called("logs", "worker:1", "--json").stdout == ""
    cluster._coordinator.on_log(messages.LogBatch(node_id("worker:1"), ("one", "two")))
    told = called("logs", "worker:1")
    assert (told.exit_code, told.stdout, told.stderr) == (0, "one\ntwo\n", "")
    as_json = called("logs", "worker:1", "--json").stdout.splitlines()
    assert [json.loads(line) for line in as_json] == ["one", "two"]


def test_a_node_that_does_not_exist_is_answered_with_those_that_do(cluster):
    wrong = called("logs", "worker:9")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert wrong.stderr == (
        "tfos: the cluster has no node 'worker:9'; it has ps:0, worker:0, worker:1\n"
    )
    hostile = called("logs", "\x1b[2J")
    assert (hostile.exit_code, "\x1b" in hostile.stderr) == (2, False)


def test_a_follower_gets_what_comes_and_what_it_missed_is_counted(
    cluster, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C ends it in order."""
    coordinator = cluster._coordinator
    coordinator.on_log(messages.LogBatch(node_id("worker:1"), ("first",)))
    looks: list[float] = []

    def between(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            num_lines = 2 * MOST_CHARS // 400
            lines = tuple(f"{number:04d}{'x' * 396}" for number in range(num_lines))
            coordinator.on_log(messages.LogBatch(node_id("worker:1"), lines))
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=between))
    told = called("logs", "-f", "worker:1")
    assert (told.exit_code, told.stderr) == (0, "")
    first, skipped, second, *_ = told.stdout.splitlines()
    missed = int(second[:4])
    assert missed > 0, "more came than are kept"
    assert (first, skipped) == ("first", f"({missed} lines skipped)")
    assert looks == [jobs.FOLLOW_S] * 2


def test_a_follower_gets_the_lines_of_the_end_and_ends_with_the_job(
    cluster: TFCluster, monkeypatch: pytest.MonkeyPatch
):
    coordinator = cluster._coordinator
    coordinator.on_log(messages.LogBatch(node_id("worker:1"), ("first",)))
    ends = threading.Thread(target=cluster.shutdown)
    looks: list[float] = []
    monkeypatch.setattr("tfos.control.coordinator.LAST_LOOK_S", LAST_LOOK_S)

    def awaits_look() -> bool:
        changed: Any = coordinator._changed
        return coordinator.phase is ClusterPhase.CLOSED and bool(changed._waiters)

    def between(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            coordinator.on_log(messages.LogBatch(node_id("worker:1"), ("ValueError: broken",)))
            ends.start()
            wait_until(lambda: awaits_look() or not ends.is_alive(), "the end")
        elif len(looks) == 3:
            ends.join(WAIT_S)

    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=between))
    told = called("logs", "-f", "worker:1")
    assert (told.exit_code, told.stderr) == (0, "tfos: the job has ended\n")
    assert told.stdout == "first\nValueError: broken\n"
    assert len(looks) == 3


def test_a_job_that_waits_for_executors_says_so_with_both_numbers():
    spark = FakeSpark()
    spark.busy = 6
    seen: list[str] = []

    def look() -> None:
        """Between two looks of the driver at Spark's slots."""
        seen.append(called("status").output)
        if len(seen) == 3:
            spark.busy = 0

    spark.on_look = look
    with TFCluster.reserve(spark, 3, 1, config=ClusterConfig(verbose=False)) as cluster:
        spark.on_look = lambda: None
        assert cluster.cluster_id in seen[0]
        for shown in seen[1:3]:
            assert "waiting for slots: need 3 task slots at once (1 ps + 2 workers)" in shown
            assert "Spark offers 2 (executor driver: " in shown
            assert "6 of them held by running tasks" in shown
        assert "waiting for slots" not in called("status").output
    spark.close()


def test_a_reservation_that_fails_leaves_no_job():
    spark = FakeSpark(slots=2)
    with pytest.raises(NotEnoughSlots):
        TFCluster.reserve(spark, 3, 1, config=ClusterConfig(verbose=False))
    assert ticket.read_all() == []
    assert "no run has ended yet" in called("history").output
    spark.close()


def test_two_jobs_are_told_apart(cluster):
    spark = FakeSpark()
    with TFCluster.reserve(spark, 2, 1, config=ClusterConfig(verbose=False)) as other:
        assert "choose one with --job" in called("status").output
        assert other.cluster_id in called("status", "--job", other.cluster_id).output
        assert "has no page" in called("page", "--job", other.cluster_id).output
    spark.close()


@pytest.mark.attack("A15")
def test_no_node_and_no_driver_is_an_operator(cluster):
    [found] = ticket.read_all()
    for name in ("worker:0", "driver"):
        keys = cluster._reserved.keys.authority.node(name)
        with (
            ControlClient(found.address, found.cluster_id, node_id("worker:0"), keys) as client,
            pytest.raises(ControlRefused, match="may not ask for stop"),
        ):
            client.ask(messages.Ask("stop"))


@pytest.mark.attack("A17")
def test_the_pages_token_is_told_by_its_method_and_the_ticket_alone(cluster, capsys, caplog):
    url = cluster.page_url()
    assert url is not None
    token = url.partition("=")[2]
    shown = capsys.readouterr()
    assert token not in "".join([shown.out, shown.err, caplog.text, repr(cluster)])
    assert token not in str(cluster.status())
    assert token not in json.dumps(called("status", "--json").output)


def test_a_page_that_cannot_be_served_leaves_nothing():
    spark = FakeSpark()
    with pytest.raises(SettingsError, match="page_port must be"):
        TFCluster.reserve(spark, 2, 1, page_port=-1)
    assert ticket.read_all() == []
    spark.close()
