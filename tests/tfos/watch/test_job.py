"""What both doors stand on: the snapshot, lines of logs, the save and the stop."""

from __future__ import annotations

import json
import math
import queue
import signal
import threading
import time
from typing import Any

import pytest

from ps.stats.server_stats import ServerStats
from tests.support.cluster_states import node_id, report_to
from tests.support.waiting import wait_until
from tests.support.watched_job import WatchedJob, server_stats
from tfos.console.log_tail import MOST_CHARS, PIECE_BYTES, LogTail
from tfos.control import messages
from tfos.control.coordinator import READ_S
from tfos.control.curve import MOST_POINTS, Curve, CurvePoint
from tfos.control.state.cluster_state import ClusterState
from tfos.failure import NodeFailure
from tfos.monitor import stragglers
from tfos.monitor.prometheus import ClusterPage
from tfos.watch import snapshot as watch_snapshot
from tfos.watch.job import STOP_REASON, STREAMS_REASON
from tfos.watch.run_history import record_of
from tfos.watch.snapshot import Seen

BEAT_S = 5.0
"""A node's call waits no longer for its answer."""


def orders(bed: WatchedJob, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, messages.Order]]:
    sent: list[tuple[str, messages.Order]] = []
    monkeypatch.setattr(
        bed.coordinator,
        "_execute",
        lambda actions: sent.extend((each.node.name, each.order) for each in actions),
    )
    return sent


def node_of(bed: WatchedJob, name: str) -> dict[str, Any]:
    """What the snapshot says of a node."""
    found: dict[str, Any] = {each["name"]: each for each in bed.job.snapshot()["nodes"]}[name]
    return found


def test_the_snapshot_has_nodes_rates_servers_feeds_and_links(bed):
    for seq, at_s in ((1, 0.0), (2, 2.0)):
        progress = {"at_s": at_s, "steps": 10 * at_s, "rows": 640 * at_s, "loss": 0.5 - at_s / 10}
        progress[f"{messages.METRIC}auc"] = 0.75
        feed = messages.FeedSnapshot("input", fed_rows=900, trained_rows=640, unread_bytes=77)
        bed.beat("worker:1", seq, progress=progress, feeds=(feed,), rss_bytes=5 << 20)
    bed.beat("ps:0", 1, stats=server_stats())
    bed.beat("worker:0", 1)  # importing: no numbers yet
    for seq, at_s in ((2, 5000.0), (3, 5002.0)):
        bed.beat("worker:0", seq, progress={"at_s": at_s, "steps": at_s - 4990, "rows": 0.0})
    bed.tick()
    found = bed.job.snapshot()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    nodes = {each["name"]: each for each in found["nodes"]}
    worker, server = nodes["worker:1"], nodes["ps:0"]["server"]
    assert (worker["steps_per_s"], worker["rows_per_s"], worker["loss"]) == (10, 640, 0.3)
    assert (worker["metrics"], nodes["worker:0"]["metrics"]) == ({"auc": 0.75}, {})
    assert nodes["worker:0"]["steps_per_s"] == 1
    assert (worker["host"], worker["status"], worker["rss_mib"]) == ("host-a", "running", 5)
    assert worker["feeds"][0]["unread_bytes"] == 77
    assert (server["bytes_in"], server["updates"]) == (5000, 8)
    assert "p99" in server["latencies"]["push"]
    assert (found["phase"], found["links"]) == ("RUNNING", {"spark": "http://127.0.0.1:4040"})
    assert found["curve"] == [[0.0, 32.0, 1280.0, 0.3]]
    assert found["checkpoints"] == {"directory": "/runs/7", "saved": None, "best": None}


def test_counts_of_rows_are_the_newest_that_are_known_also_after_the_end(bed):
    """A heartbeat is up to two seconds old, and none follows the last epoch of a short training."""
    old = messages.FeedSnapshot("input", fed_rows=500, taken_rows=400, trained_rows=300)
    bed.beat("worker:1", 1, progress={"at_s": 1.0}, feeds=(old,))
    ended = messages.FeedSnapshot("input", fed_rows=900, taken_rows=900, trained_rows=900)
    report_to(bed.coordinator, node_id("worker:1"), messages.FlushReached("input", 0, ended))
    worker = node_of(bed, "worker:1")
    feed = worker["feeds"][0]
    assert [worker["rows"], feed["trained"], feed["fed"]] == [900] * 3
    last = messages.FeedSnapshot("input", fed_rows=950, taken_rows=950, trained_rows=950)
    report_to(bed.coordinator, node_id("worker:1"), messages.Done(feeds=(last,)))
    worker = node_of(bed, "worker:1")
    assert (worker["rows"], worker["feeds"][0]["trained"]) == (950, 950)


def test_a_loop_that_reports_no_rows_has_the_rate_of_its_feeds(bed):
    for seq, at_s in ((1, 0.0), (2, 2.0)):
        feeds = (messages.FeedSnapshot("input", fed_rows=900, trained_rows=int(100 * at_s)),)
        bed.beat("worker:1", seq, progress={"at_s": at_s}, feeds=feeds)
    worker = node_of(bed, "worker:1")
    assert (worker["rows"], worker["rows_per_s"], worker["steps_per_s"]) == (200, 100, 0)


def test_a_node_that_is_silent_or_lost_has_no_rate(bed):
    for name in ("worker:0", "worker:1"):
        for seq, at_s in ((1, 0.0), (2, 2.0)):
            bed.beat(name, seq, progress={"at_s": at_s, "steps": 10 * at_s, "rows": 640 * at_s})
    assert node_of(bed, "worker:1")["rows_per_s"] == 640
    bed.fail("worker:1", signal=9, message="was killed")
    assert node_of(bed, "worker:1")["rows_per_s"] is None
    assert node_of(bed, "worker:0")["rows_per_s"] == 640
    bed.now_s += watch_snapshot.RATE_S + 1
    assert node_of(bed, "worker:0")["steps_per_s"] is None


def test_a_worker_whose_main_fun_has_returned_has_no_rate(bed):
    """Its supervisor goes on with heartbeats, of the last numbers."""
    for seq, at_s in ((1, 0.0), (2, 2.0)):
        bed.beat("worker:1", seq, progress={"at_s": at_s, "steps": 10 * at_s})
    report_to(bed.coordinator, node_id("worker:1"), messages.Done())
    bed.beat("worker:1", 3, progress={"at_s": 2.0, "steps": 20.0})
    assert node_of(bed, "worker:1")["steps_per_s"] is None


def test_the_loss_of_a_lost_worker_does_not_stay_in_the_mean(bed):
    for name, loss in (("worker:0", 0.1), ("worker:1", 2.3)):
        bed.beat(name, 1, progress={"at_s": 1.0, "steps": 1.0, "loss": loss})
    bed.fail("worker:1", signal=9, message="was killed")
    bed.tick()
    found = bed.job.snapshot()
    assert found["curve"][-1][3] == 0.1
    assert record_of(found).loss == 0.1


def test_the_loss_of_a_worker_that_is_started_again_is_not_in_the_mean_meanwhile():
    bed = WatchedJob(restarts=1)
    for name, loss in (("worker:0", 0.1), ("worker:1", 2.3)):
        bed.beat(name, 1, progress={"at_s": 1.0, "steps": 1.0, "loss": loss})
    bed.fail("worker:1", signal=9, message="was killed")
    bed.tick()
    found = bed.job.snapshot()
    assert {each["status"] for each in found["nodes"]} == {"running", "lost, is started again"}
    assert (found["curve"][-1][3], record_of(found).loss) == (0.1, 0.1)


def test_rows_of_an_epoch_that_nobody_has_counted_are_null(bed):
    bed.note(messages.EpochTrained(1, 0, {}))
    bed.note(messages.EpochTrained(2, 0, {}, rows=0, is_distributed=True))
    assert [each["rows"] for each in bed.job.snapshot()["epochs"]] == [None, 0]


def test_a_later_question_gets_the_newer_points_of_the_curve_alone(bed):
    for seq in (1, 2):
        bed.beat("worker:0", seq, progress={"at_s": seq, "steps": seq, "loss": 1.0})
        bed.tick()
    first = bed.job.snapshot()
    assert len(first["curve"]) == 2
    seen = Seen(first["curve_at_s"])
    assert bed.job.snapshot(seen)["curve"] == []
    bed.beat("worker:0", 3, progress={"at_s": 3.0, "steps": 3.0, "loss": 0.5})
    bed.tick()
    assert [each[1] for each in bed.job.snapshot(seen)["curve"]] == [3]


def test_what_is_not_finite_is_null_and_what_is_long_is_cut(bed):
    bed.beat(
        "worker:0", 1, progress={"at_s": 1.0, "steps": 1.0, "loss": math.nan, "rows": math.inf}
    )
    bed.tick()
    bed.fail("worker:0", error_type="ValueError", message="m" * 9000, traceback="t" * 90_000)
    found = bed.job.snapshot()
    assert found["curve"] == []
    json.dumps(found, allow_nan=False)
    assert next(each for each in found["nodes"] if each["name"] == "worker:0")["loss"] is None
    [failure] = found["failures"]
    assert len(failure["message"]) == watch_snapshot.MESSAGE_CHARS
    assert len(failure["traceback"]) == watch_snapshot.TRACEBACK_CHARS
    assert (found["phase"], failure["node"], failure["error"]) == (
        "FAILED",
        "worker:0",
        "ValueError",
    )


def test_the_failure_that_ended_the_cluster_comes_first(bed):
    lost = NodeFailure(node_id("worker:1"), "host-a", 7, signal=9, message="was killed")
    report_to(bed.coordinator, lost.node, messages.Failed(lost))
    bed.fail("worker:0", error_type="ValueError", message="broken row")
    assert [each["node"] for each in bed.job.snapshot()["failures"]] == ["worker:0", "worker:1"]


@pytest.mark.attack("A24")
def test_lines_of_a_log_come_once_in_order_without_escapes(bed):
    bed.log("worker:1", "one", "\x1b[2Jtwo")
    first = bed.job.log("worker:1", 0)
    assert first["lines"] == ["one", "\\x1b[2Jtwo"]
    assert bed.job.log("worker:1", first["last"])["lines"] == []
    bed.log("worker:1", "three", dropped=4)
    assert bed.job.log("worker:1", first["last"])["lines"][1] == "three"
    assert "has no node 'worker:9'" in bed.job.log("worker:9", 0)["error"]


@pytest.mark.attack("A24")
def test_a_tail_is_bounded_and_tells_what_was_forgotten(bed):
    tail = LogTail()
    for _ in range(100):
        tail.add(("x" * 2000,), 0)
    assert sum(len(line) for _, line in tail._lines) <= MOST_CHARS
    bed.log("worker:0", "first")
    last = bed.job.log("worker:0", 0)["last"]
    bed.log("worker:0", *("y" * 2000 for _ in range(100)))
    assert bed.job.log("worker:0", last)["skipped"] > 0
    assert bed.job.log("worker:0", 0)["skipped"] == 0, "a new reader waits for no line"


@pytest.mark.parametrize("after", [math.nan, math.inf, -1.0])
def test_an_operator_without_a_lines_number_is_answered_from_the_beginning(bed, after):
    bed.log("worker:1", "one")
    answer = bed.job.answer(messages.Ask("log", "worker:1", after))
    assert json.loads(answer) == {"node": "worker:1", "lines": ["one"], "last": 1, "skipped": 0}


@pytest.mark.attack("A24")
@pytest.mark.parametrize(
    "line", ["x" * 1500, "\N{SNOWMAN}" * 1500, "\N{GRINNING FACE}" * 4000, '"' * 4000]
)
def test_a_piece_is_bounded_in_bytes_whatever_its_characters(line):
    tail = LogTail()
    tail.add((line,) * 40, 0)
    last = 1
    while piece := tail.after(last):
        lines = json.dumps([text for _, text in piece], ensure_ascii=False, separators=(",", ":"))
        assert len(lines.encode()) <= PIECE_BYTES + 2
        last = piece[-1][0]
    assert last == 40


def test_only_a_driver_that_shows_output_or_a_reader_of_that_log_is_sent_lines(bed):
    assert bed.beat("worker:1", 1).output == "all"
    quiet = WatchedJob(shows=False)
    assert quiet.beat("worker:1", 1).output == "none"
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    reader = threading.Thread(target=lambda: answers.put(quiet.job.log("worker:1", 0)))
    reader.start()
    wait_until(lambda: quiet.beat("worker:1", 2).output == "piece", "a reader")
    quiet.log("worker:1", "one")
    assert answers.get(timeout=10.0)["lines"] == ["one"]
    reader.join()
    assert quiet.beat("worker:0", 2).output == "none"
    assert quiet.job.log("worker:1", 1)["lines"] == []  # at once: it is read already
    quiet.tick(READ_S + 1)
    assert quiet.beat("worker:1", 3).output == "none"


def test_who_begins_to_read_gets_the_end_of_the_log():
    tail = LogTail()
    tail.add(tuple(f"{number:04d}" + "z" * 96 for number in range(200)), 0)
    assert tail.after(0)[-1][1].startswith("0199")


def test_who_has_looked_gets_newer_epochs_and_evaluations_alone_and_failures_with_a_new_one(bed):
    def train(*epochs: int) -> None:
        for epoch in epochs:
            bed.note(messages.EpochTrained(1, epoch, {"loss": 0.5}))
            bed.note(messages.Evaluated(epoch, {"val_loss": 0.5}))

    def look(found: dict[str, Any]) -> dict[str, Any]:
        names = ("num_epochs", "num_evaluations", "num_failures")
        return bed.job.snapshot(Seen(found["curve_at_s"], *(found[name] for name in names)))

    train(0, 1)
    bed.fail("worker:1", signal=9)
    first = bed.job.snapshot()
    assert [each["epoch"] for each in first["epochs"]] == [0, 1]
    again = look(first)
    assert [again[name] for name in ("epochs", "evaluations", "failures")] == [[], [], []]
    train(2)
    bed.fail("worker:0", signal=9)
    newer = look(again)
    assert [each["epoch"] for each in newer["epochs"]] == [2]
    assert [each["step"] for each in newer["evaluations"]] == [2]
    assert {each["node"] for each in newer["failures"]} == {"worker:0", "worker:1"}


@pytest.mark.parametrize(
    "report_of",
    [lambda bed: bed.job.snapshot(), lambda bed: ClusterPage(bed.coordinator, "test").render()],
    ids=["page", "metrics"],
)
def test_heartbeats_are_answered_while_a_report_is_made(bed, report_of, monkeypatch):
    """That of a large cluster decodes so many counters that it takes most of a second."""
    decode, waited = stragglers.server_counters, []

    def decode_slowly(beat: messages.Heartbeat | None) -> ServerStats | None:
        node = threading.Thread(target=bed.beat, args=("worker:0", 1), daemon=True)
        node.start()
        node.join(BEAT_S)
        waited.append(node.is_alive())
        return decode(beat)

    bed.beat("ps:0", 1, stats=server_stats())
    monkeypatch.setattr(stragglers, "server_counters", decode_slowly)
    report_of(bed)
    assert waited
    assert not any(waited)


def test_a_copy_of_the_state_stays_as_it_is_when_the_cluster_goes_on(bed):
    bed.beat("worker:0", 1, progress={"steps": 1.0})
    copy = bed.coordinator.copied()
    before = json.dumps(watch_snapshot.snapshot(bed.job.info, copy, bed.now_s), sort_keys=True)
    bed.beat("worker:0", 2, progress={"steps": 2.0})
    bed.note(messages.EpochTrained(1, 0, {"loss": 0.5}))
    bed.note(messages.Evaluated(1, {"val_loss": 0.5}))
    bed.coordinator.act(lambda state: state.on_tick(bed.now_s))
    bed.fail("worker:1", signal=9)
    after = json.dumps(watch_snapshot.snapshot(bed.job.info, copy, bed.now_s), sort_keys=True)
    assert after == before


def test_a_failure_after_many_others_is_shown_to_who_has_seen_those(bed):
    def restart(count: int) -> None:
        failure = NodeFailure(node_id("ps:0"), "h", 7, signal=9)
        event = messages.Restarted(failure, count, 200)
        report_to(bed.coordinator, node_id("ps:0"), event)

    for count in range(150):
        restart(count)
    found = bed.job.snapshot()
    assert found["num_failures"] == 150
    restart(150)
    newer = bed.job.snapshot(Seen(num_failures=150))
    assert newer["num_failures"] == 151
    assert newer["failures"]


def test_a_curve_keeps_a_whole_run_in_bounded_memory():
    curve = Curve()
    for number in range(1, 5000):
        curve.add(CurvePoint(2.0 * number, number, number, 1.0 / number))
    points = curve.after(-math.inf)
    assert len(points) <= MOST_POINTS
    assert points[0].at_s == 2.0
    assert points[-1].steps == 4999
    assert points == sorted(points)


def test_a_save_is_the_chiefs_and_tells_where(bed):
    chief = threading.Thread(target=bed.answer_save, kwargs={"path": "/runs/7/step-8", "step": 8})
    chief.start()
    outcome = bed.job.save(timeout_s=20.0)
    chief.join()
    assert outcome == (True, "the parameters are saved in /runs/7/step-8")
    assert bed.job.snapshot()["checkpoints"]["saved"]["step"] == 8


def test_a_later_save_is_answered_by_its_own_end(bed):
    save = messages.SavedNow(1, path="/runs/7/step-8", step=8)
    bed.coordinator.act(ClusterState.save_now)
    report_to(bed.coordinator, node_id("worker:0"), save)
    late = bed.job.save(timeout_s=0.01)
    assert (late.is_done, "has not reported a save" in late.text) == (False, True)

    def is_asked() -> bool:
        return bed.coordinator.read(lambda state: state.saves_asked) == 3

    def answer() -> None:
        wait_until(is_asked, "the third order", 10.0)
        saved = messages.SavedNow(3, path="/runs/7/step-9", step=9)
        report_to(bed.coordinator, node_id("worker:0"), saved)

    chief = threading.Thread(target=answer)
    chief.start()
    outcome = bed.job.save(timeout_s=20.0)
    chief.join()
    assert outcome == (True, "the parameters are saved in /runs/7/step-9")


def test_a_save_that_failed_says_why(bed):
    chief = threading.Thread(target=bed.answer_save, kwargs={"error": "the disk is full"})
    chief.start()
    outcome = bed.job.save(timeout_s=20.0)
    chief.join()
    assert outcome == (False, "nothing was saved: the disk is full")


def test_a_chief_that_does_not_answer_is_waited_for_no_longer_than_promised(bed):
    assert "has not reported a save within 0 s" in bed.job.save(timeout_s=0.01).text


@pytest.mark.parametrize(
    ("restarts", "ends", "text"),
    [
        (1, "lost", "the chief was lost before it reported a save; ask again once it"),
        (0, "lost", "the cluster is FAILED, and the chief has not reported a save"),
        (0, "returned", "nothing was saved: main_fun has returned on the chief"),
    ],
)
def test_an_answer_that_will_not_come_is_not_waited_for(restarts: int, ends: str, text: str):
    bed = WatchedJob(restarts=restarts)

    def end() -> None:
        bed.wait_for_order()
        if ends == "lost":
            bed.fail("worker:0", signal=signal.SIGKILL)
        else:
            report_to(bed.coordinator, node_id("worker:0"), messages.Done())

    chief = threading.Thread(target=end)
    chief.start()
    begun_s = time.monotonic()
    outcome = bed.job.save(timeout_s=60.0)
    chief.join()
    assert time.monotonic() - begun_s < 30.0
    assert outcome.is_done is False
    assert outcome.text.startswith(text)


def test_without_checkpoints_a_save_is_refused_with_the_next_step():
    assert "Checkpoints(directory)" in WatchedJob(saves=False).job.save().text


def test_a_stop_asks_every_worker_once(bed, monkeypatch):
    sent = orders(bed, monkeypatch)
    assert bed.job.stop().is_done
    assert bed.job.stop().is_done
    stop = messages.StopTraining(STOP_REASON)
    assert sent == [("worker:0", stop), ("worker:1", stop)]
    assert bed.job.snapshot()["stop"] == STOP_REASON


def test_streams_end_and_the_training_goes_on(bed):
    assert json.loads(bed.job.answer(messages.Ask("end_streams")))["is_done"]
    assert bed.coordinator.read(lambda state: state.streams_stop) == STREAMS_REASON
    assert not bed.job.snapshot()["stop"]


def test_a_training_that_is_over_is_not_stopped(bed):
    for name in ("worker:0", "worker:1"):
        report_to(bed.coordinator, node_id(name), messages.Done())
    assert bed.job.stop() == (
        False,
        "main_fun has returned on every worker: no training is running",
    )


def test_servers_of_tensorflow_are_neither_saved_nor_stopped_here(bed, monkeypatch):
    monkeypatch.setattr(ClusterState, "tensorflow_servers", ["ps:0"])
    assert "tf.train.CheckpointManager" in bed.job.save().text
    assert "its workers end together or not at all" in bed.job.stop().text


def test_workers_that_tensorflow_ties_together_are_not_stopped(bed):
    report_to(bed.coordinator, node_id("worker:1"), messages.InCollective(2))
    outcome = bed.job.stop()
    assert not outcome.is_done
    assert "its workers end together or not at all" in outcome.text


def test_an_ended_cluster_is_neither_saved_nor_stopped(bed):
    bed.fail("worker:0", error_type="ValueError", message="broken row")
    for outcome in (bed.job.save(), bed.job.stop()):
        assert not outcome.is_done
        assert "the cluster is FAILED" in outcome.text


def test_rates_are_of_the_last_10_s(bed):
    """Else the time before the first step would count for minutes."""
    for seq, (at_s, steps) in enumerate([(0.0, 0), (50.0, 0), (58.0, 80), (60.0, 100)], 1):
        progress = {"at_s": at_s, "steps": float(steps), "rows": 0.0}
        bed.beat("worker:1", seq, progress=progress)
    nodes = {each["name"]: each for each in bed.job.snapshot()["nodes"]}
    assert nodes["worker:1"]["steps_per_s"] == 10


def test_evaluations_of_checkpoints_are_shown_the_newest_last(bed):
    for step in range(60):
        bed.note(messages.Evaluated(step, {"val_loss": 1 / 3, "val_auc": math.nan}, 0.25))
    found = bed.job.snapshot()["evaluations"]
    assert [each["step"] for each in found] == list(range(10, 60))
    assert found[-1]["metrics"] == {"val_loss": 0.33333, "val_auc": None}
