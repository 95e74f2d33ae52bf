"""What the servers' scalars say: rates and means since the last point, not since the start."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ps.stats.server_stats import ServerStats, TableStats
from rpc.histogram import Latency
from tests.support.waiting import wait_until
from tfos.keras.fit import tensorboard_scalars
from tfos.keras.fit.tensorboard_scalars import (
    ClusterScalars,
    _record,
    _Recorder,
    server_scalars,
)

pytestmark = pytest.mark.tf


def stats(uptime_s: float, pushes: int, push_s: float, **fields: object) -> ServerStats:
    given = {
        "requests": {
            "push": Latency(pushes, push_s, p50_s=0.002, p99_s=0.004),
            "lookup_batch": Latency(pushes, 2 * push_s),
        },
        "apply": Latency(pushes, push_s / 2),
        **fields,
    }
    return ServerStats(0, "SERVING", clock=pushes, uptime_s=uptime_s, **given)  # type: ignore[arg-type]


def test_a_feed_without_rows_has_no_charts():
    """As the one for validation, which is always there and seldom fed."""
    rows = {"dropped_rows": 0, "unread_bytes": 0, "starved_s": 1.0}
    feeds = [
        SimpleNamespace(feed="input", fed_rows=9, trained_rows=4, **rows),
        SimpleNamespace(feed="validation", fed_rows=0, trained_rows=0, **rows),
    ]
    trainer = SimpleNamespace(
        skipped_steps=0,
        id_counts={},
        times=SimpleNamespace(spent=lambda: {"compute_s": 1.0, "lookup_s": 0.1, "push_s": 3.0}),
    )
    channel = SimpleNamespace(feeds=lambda: feeds)
    recorder = _Recorder(SimpleNamespace(feed_channel=channel), trainer)
    found = dict(recorder._cluster_scalars([]))
    assert {name.split("/")[1] for name in found if name.startswith("feed/")} == {"input"}
    shares = {name: value for name, value in found.items() if "share_of" in name}
    assert shares == {"chief/share_of_compute": 0.25, "chief/share_of_push": 0.75}
    assert "chief/skipped_steps" not in found, "a chart of zeros"
    trainer.skipped_steps = 2
    assert dict(recorder._cluster_scalars([]))["chief/skipped_steps"] == 2.0


def test_points_tell_what_happened_since_the_last_one():
    before = stats(
        100.0, 1000, 10.0, bytes_in=5 * 10**8, staleness=(900, 0, 0, 100),
        tables=(
            TableStats("t", rows=5, given=500, looked_up=100, missed=100, staleness=(3, 0, 0, 0)),
        ),
    )  # fmt: skip
    now = stats(
        104.0, 1100, 14.0, bytes_in=9 * 10**8, staleness=(950, 50, 0, 100),
        tables=(TableStats("t", rows=9, given=900, looked_up=200, missed=110,
                           pushed=100, evicted=3, staleness=(3, 0, 0, 1)),),
    )  # fmt: skip
    found = dict(server_scalars(now, before))
    assert found["push/mean_ms"] == pytest.approx(40.0)
    assert found["lookup_batch/mean_ms"] == pytest.approx(80.0)
    assert found["push/p99_ms_since_start"] == 4.0
    assert found["apply/cores"] == pytest.approx(0.5)
    assert found["updates/per_s"] == 25.0
    assert found["traffic/in_mb_per_s"] == 100.0
    assert found["staleness/mean"] == 0.5
    assert found["table/rows/t"] == 9.0
    assert found["table/evicted_rows/t"] == 3.0
    assert "table/dropped_ids/t" not in found, "no rule of admission: a chart of zeros"
    assert found["table/miss_ratio/t"] == pytest.approx(0.1)
    assert found["table/unique_id_ratio/t"] == pytest.approx(0.5)
    assert found["table/staleness_mean/t"] == 5.5, "of the one push since then"
    assert found["table/staleness_p99/t"] == 5.5


@pytest.mark.parametrize("before", [None, stats(500.0, 9000, 90.0)], ids=["first", "restarted"])
def test_the_first_point_of_a_server_is_since_its_start(before: ServerStats | None):
    found = dict(server_scalars(stats(2.0, 100, 1.0), before))
    assert found["push/mean_ms"] == pytest.approx(10.0)
    assert found["updates/per_s"] == 50.0


@pytest.mark.parametrize("filled", [{"restored_step": 9000}, {"resumed_step": 9000}])
def test_the_first_point_of_a_resumed_run_has_no_updates_of_the_run_before(filled):
    first = stats(60.0, 9100, 1.0, **filled)
    assert "updates/per_s" not in dict(server_scalars(first))
    later = stats(65.0, 9200, 2.0, **filled)
    assert dict(server_scalars(later, first))["updates/per_s"] == 20.0


def test_no_request_has_no_mean():
    """As of pushes during a validation: 0 ms would look fast."""
    first, later = stats(60.0, 100, 1.0), stats(65.0, 100, 1.0)
    found = dict(server_scalars(later, first))
    assert not any(name.endswith("mean_ms") for name in found)
    assert found["push/p99_ms_since_start"] == 4.0


def test_a_server_that_nobody_used_has_no_latencies():
    found = dict(server_scalars(ServerStats(0, "EMPTY", clock=0, uptime_s=0.0)))
    assert not any(name.split("/")[0] in ("push", "pull", "apply", "staleness") for name in found)
    assert found["updates/per_s"] == 0.0


def test_a_fit_that_raised_leaves_no_thread_to_the_next_one():
    """Keras calls no on_train_end then, and the same callbacks may serve another `fit`."""

    def writing() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "tfos-scalars"]

    callback = ClusterScalars(SimpleNamespace())  # it is asked nothing
    callback.set_model(
        SimpleNamespace(_tfos_trainer=SimpleNamespace(attached=False, is_local=False))
    )
    callback.on_train_begin()
    (first,) = writing()
    callback.on_train_begin()
    wait_until(lambda: not first.is_alive(), "the first fit's thread to end")
    assert len(writing()) == 1
    callback.on_train_end()
    assert not writing()


@pytest.mark.parametrize(
    ("write_s", "wait_s", "fit_s", "points", "longest_s"),
    [
        pytest.param(0.01, 0.0, 1000.0, 200, 5.0, id="a short one"),
        pytest.param(0.01, 60.0, 1000.0, 17, 5.0, id="a server that restarts"),
        pytest.param(2.0, 0.0, 1000.0, 25, 40.0, id="many tables"),
        pytest.param(0.01, 0.0, 30 * 86_400.0, 7240, 2592.0, id="thirty days"),
    ],
)
def test_points_cost_little_time_and_space_whatever_their_number(
    monkeypatch, write_s, wait_s, fit_s, points, longest_s
):
    now, busy, pauses = [0.0], [0.0], []

    def wait(pause_s):
        pauses.append(pause_s)
        now[0] += pause_s
        return now[0] > fit_s

    def write():
        now[0] += write_s + wait_s
        busy[0] += write_s

    clocks = SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: busy[0])
    monkeypatch.setattr(tensorboard_scalars, "time", clocks)
    recorder: Any = SimpleNamespace(write=write, is_broken=False, close=lambda: None)
    ending: Any = SimpleNamespace(wait=wait)
    _record(recorder, ending)
    assert min(pauses) == 5.0
    assert max(pauses) == pytest.approx(longest_s, rel=0.01)
    assert len(pauses) == pytest.approx(points, rel=0.05)
    assert busy[0] <= 0.06 * now[0]
