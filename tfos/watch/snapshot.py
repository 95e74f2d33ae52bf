"""Snapshot: a job's state as JSON values, for the terminal, the page and the history. Pure.

Covers: what is in it, how much of it: bounded whatever nodes report.
Does not: read the state under its lock (tfos.watch.job), show anything.

    {"cluster_id", "name", "application_id", "phase",   # texts
     "started_at", "running_s",                          # Unix seconds; seconds since then
     "links": {"tensorboard": URL, "spark": URL},        # only those there are
     "nodes": [{"name", "status", "phase", "host", "executor", "pid", "attempt", "silent_s",
                "rss_mib", "steps", "rows", "loss", "metrics", "steps_per_s", "rows_per_s",
                "where": null | {"compute_s", "feed_s", "lookup_s", "pull_s", "push_s", "wait_s"},
                                                         # of one step, lately
                "feeds": [{"feed", "fed", "taken", "trained", "dropped", "unread_bytes",
                           "starved_s"}],
                "server": null | {"bytes_in", "bytes_out", "in_service", "waiting", "updates",
                                  "staleness_mean", "staleness_p99", "parameter_bytes",
                                  "latencies": {request: text}}}],
     "executors": [{"executor", "host", "nodes", "rss_mib", "room_mib"}],   # room 0: unknown
     "notes": [text],                    # stragglers, hot shards, executors without memory left
     "curve": [[age_s, steps, rows, loss | null]],       # age: seconds before the snapshot
     "curve_at_s",                                       # `after` of the next question
     "steps",                                            # so far, those of lost attempts too
     "epochs": [{"fit", "epoch", "metrics", "seconds", "rows"}],    # the newest; null rows: unknown
     "num_epochs",
     "evaluations": [{"step", "metrics", "seconds"}],    # the newest, by the evaluator
     "num_evaluations",
     "checkpoints": null | {"directory", "saved": null | {"path", "step", "error"},
                            "best": null | {"path", "step", "metric", "value"}},
     "stop": text,                                       # why the training was asked to stop
     "failures": [{"node", "host", "error", "message", "traceback", "log_path"}],
     "num_failures",
     "is_failed",                                        # whether one of them ended the cluster
     "is_interrupted"}                                   # whether the driver ended main_fun

A number that is not finite is null. Lists without a bound of their own hold the newest entries. Of
curve, epochs and evaluations, a reader who has some gets those that are newer; all failures come
again with another one, and none before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ps.stats.server_stats import SHOWN_REQUESTS, ServerStats
from rpc.printable import visible
from tfos.control.first_metrics import first_metrics
from tfos.control.members import Member, NodeStatus
from tfos.control.messages import MOST_METRICS, Heartbeat
from tfos.control.state.cluster_view import ClusterView
from tfos.failure import NodeFailure
from tfos.monitor.reports import ExecutorReport, NodeReport
from tfos.monitor.status import cluster_report, trained_rows

RATE_S = 10.0
"""Rates cover at least this long, if the kept heartbeats reach back so far."""
MOST_EPOCHS = 50
MOST_NEWER_EPOCHS = 10
"""For readers that look again and again: the page shows no more."""
MOST_FAILURES = 20
MOST_FEEDS = 8
MESSAGE_CHARS = 2000
TRACEBACK_CHARS = 8000
Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What never changes of a job."""

    cluster_id: str
    name: str
    """Name of the Spark application."""
    application_id: str
    spark_url: str = ""
    started_at: float = 0.0
    """Unix seconds."""
    started_s: float = 0.0
    """The same moment in monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a reader has of a job, by the numbers of its last snapshot."""

    curve_at_s: float = -math.inf
    num_epochs: int = 0
    num_evaluations: int = 0
    num_failures: int = 0


NOTHING_SEEN = Seen()


def snapshot(info: JobInfo, state: ClusterView, now_s: float, seen: Seen = NOTHING_SEEN) -> Json:
    """Return the job as it is now; the module's head has the schema.

    Args:
        info: the job's info.
        state: its cluster's state.
        now_s: monotonic seconds.
        seen: what the reader has.
    """
    report = cluster_report(info.cluster_id, state, now_s)
    members = state.members
    links = {"tensorboard": report.tensorboard_url, "spark": info.spark_url}
    return {
        "cluster_id": info.cluster_id,
        "name": visible(info.name),
        "application_id": info.application_id,
        "phase": report.phase,
        "started_at": info.started_at,
        "running_s": max(0.0, now_s - info.started_s),
        "links": {name: url for name, url in links.items() if url},
        "nodes": [_node(each, members[each.name]) for each in report.nodes],
        "executors": [_executor(each) for each in report.executors],
        "notes": list(report.notes),
        "curve": [
            [round(now_s - at_s, 1), steps, rows, _number(loss)]
            for at_s, steps, rows, loss in state.curve.after(seen.curve_at_s)
        ],
        "curve_at_s": now_s,
        "steps": _number(state.point(now_s).steps),
        "epochs": _epochs(state, seen.num_epochs),
        "num_epochs": state.epochs.count,
        "evaluations": _evaluations(state, seen.num_evaluations),
        "num_evaluations": state.epochs.num_evaluations,
        "checkpoints": _checkpoints(state),
        "stop": state.training_stop,
        "failures": _failures(state, seen.num_failures),
        "num_failures": state.num_failures,
        "is_failed": bool(state.fatal),
        "is_interrupted": state.is_interrupted,
    }


def _node(report: NodeReport, member: Member) -> Json:
    return {
        "name": report.name,
        "status": report.status,
        "phase": report.phase,
        "host": visible(report.host),
        "executor": visible(report.executor_id),
        "pid": report.pid,
        "attempt": report.attempt,
        "silent_s": round(report.silent_s, 1) if report.pid else 0.0,
        "rss_mib": round(report.rss_mib),
        "steps": _number(report.steps),
        "rows": report.rows,
        "loss": _number(report.loss),
        "metrics": _metrics(report.metrics),
        **_rates(report, member),
        "where": _where(report),
        "feeds": _feeds(member),
        "server": _server(report.server) if report.server is not None else None,
    }


def _executor(report: ExecutorReport) -> Json:
    return {
        "executor": visible(report.executor_id),
        "host": visible(report.host),
        "nodes": list(report.nodes),
        "rss_mib": round(report.rss_mib),
        "room_mib": round(report.room_mib),
    }


def _where(report: NodeReport) -> Json | None:
    times = report.times
    if times is None or not times.steps:
        return None
    names = ("compute_s", "feed_s", "lookup_s", "pull_s", "push_s", "wait_s")
    return {name: _number(getattr(times, name) / times.steps) for name in names}


def _rates(report: NodeReport, member: Member) -> Json:
    """Return steps and rows per second lately.

    None before there are two heartbeats, and of a node that does not run or is not heard.
    """
    # The first heartbeats come before the first numbers, and have no time of their own.
    beats = [each for each in member.beats if "at_s" in each.progress]
    is_heard = member.status is NodeStatus.RUNNING and report.silent_s <= RATE_S
    if not beats or not is_heard:
        return {"steps_per_s": None, "rows_per_s": None}
    new, at_s = beats[-1], beats[-1].progress["at_s"]
    before = [each for each in beats if at_s - each.progress["at_s"] >= RATE_S]
    old = (before[-1:] or beats[:1])[0]
    span_s = at_s - old.progress["at_s"]

    def rate(total: Callable[[Heartbeat], float]) -> float | None:
        grown = total(new) - total(old)
        return _number(grown / span_s) if span_s > 0 and grown >= 0 else None

    def rows(beat: Heartbeat) -> float:
        # Both heartbeats count the same rows: main_fun's own, or else those of its feeds.
        own = beat.progress.get("rows", 0.0)
        return own if new.progress.get("rows") else trained_rows(beat.progress, beat.feeds)

    steps_per_s = rate(lambda beat: beat.progress.get("steps", 0.0))
    return {"steps_per_s": steps_per_s, "rows_per_s": rate(rows)}


def _feeds(member: Member) -> list[Json]:
    return [
        {
            "feed": visible(each.feed),
            "fed": each.fed_rows,
            "taken": each.taken_rows,
            "trained": each.trained_rows,
            "dropped": each.dropped_rows,
            "unread_bytes": each.unread_bytes,
            "starved_s": _number(each.starved_s),
        }
        for each in member.feeds[:MOST_FEEDS]
    ]


def _server(stats: ServerStats) -> Json:
    return {
        "bytes_in": stats.bytes_in,
        "bytes_out": stats.bytes_out,
        "in_service": stats.in_service,
        "waiting": stats.waiting,
        "updates": stats.clock,
        "staleness_mean": _number(stats.mean_staleness),
        "staleness_p99": _number(stats.staleness_quantile(0.99)),
        "parameter_bytes": stats.parameter_bytes,
        "latencies": {
            name: str(stats.latency(name)) for name in SHOWN_REQUESTS if stats.latency(name).count
        },
    }


def _epochs(state: ClusterView, seen: int) -> list[Json]:
    return [
        {
            "fit": each.fit,
            "epoch": each.epoch,
            "metrics": _metrics(each.metrics),
            "seconds": _number(each.seconds),
            "rows": each.rows if each.is_distributed else None,
        }
        for each in state.epochs.since(seen)[-_most(seen) :]
    ]


def _evaluations(state: ClusterView, seen: int) -> list[Json]:
    return [
        {"step": each.step, "metrics": _metrics(each.metrics), "seconds": _number(each.seconds)}
        for each in state.epochs.evaluations_since(seen)[-_most(seen) :]
    ]


def _most(seen: int) -> int:
    return MOST_NEWER_EPOCHS if seen else MOST_EPOCHS


def _metrics(metrics: Mapping[str, float]) -> Json:
    kept = first_metrics(metrics, MOST_METRICS)
    return {visible(name): _number(value) for name, value in kept.items()}


def _checkpoints(state: ClusterView) -> Json | None:
    plan, saved, best = state.config.checkpoints, state.epochs.saved, state.epochs.best
    if plan is None:
        return None
    return {
        "directory": plan.directory,
        "saved": saved and {"path": saved.path, "step": saved.step, "error": saved.error},
        "best": best
        and {
            "path": visible(best.path),
            "step": best.step,
            "metric": best.metric,
            "value": _number(best.value),
        },
    }


def _failures(state: ClusterView, seen: int) -> list[Json]:
    if seen and seen == state.num_failures:
        return []
    return [_failure(each) for each in state.by_cause()[0][:MOST_FAILURES]]


def _failure(failure: NodeFailure) -> Json:
    return {
        "node": failure.node.name,
        "host": failure.host,
        "error": failure.error_type,
        "message": failure.message[:MESSAGE_CHARS],
        "traceback": failure.traceback[-TRACEBACK_CHARS:],
        "log_path": failure.log_path,
    }


def _number(value: float | None) -> float | None:
    """Return a number of at most five digits that JSON can hold."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) or value.is_integer() else float(f"{value:.5g}")
