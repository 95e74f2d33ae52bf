"""Status of a cluster as a report. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

from rpc.printable import visible
from tfos.control.members import Member
from tfos.control.messages import DRIVER_EXECUTOR, METRIC, MOST_METRICS, FeedSnapshot
from tfos.control.state.cluster_view import ClusterView
from tfos.monitor import reports, stragglers

_MIB = 1 << 20
_NAME_CHARS = 100


def cluster_report(cluster_id: str, state: ClusterView, now_s: float) -> reports.ClusterReport:
    """Return the report of status() at this moment.

    Args:
        cluster_id: the cluster's id.
        state: the cluster's state.
        now_s: monotonic seconds.
    """
    board = state.tensorboard
    found = {each.name: stragglers.window_of(each) for each in state.servers}
    windows = {name: window for name, window in found.items() if window is not None}
    waits = stragglers.waits_of(windows.values())
    times = {each.name: stragglers.step_times(each, waits) for each in state.workers}
    training = {each.name for each in state.training()}
    live = {each.name for each in state.live()}
    loads = {name: stragglers.server_load(each) for name, each in windows.items() if name in live}
    notes = (
        stragglers.find_straggler(
            {name: each for name, each in times.items() if name in training and each}
        ),
        stragglers.hot_shard(loads),
    )
    nodes = tuple(
        _node_report(member, now_s, times.get(member.name), windows.get(member.name))
        for member in state.members.values()
    )
    executors = _executors(nodes, state.rooms_mib)
    return reports.ClusterReport(
        cluster_id=cluster_id,
        phase=state.phase.name,
        nodes=nodes,
        tensorboard_url=board.url or None if board is not None else None,
        failures=tuple(state.failures),
        notes=(
            *((state.waits_for,) if state.waits_for else ()),
            *(note for note in notes if note),
            *_not_kept(state),
            *(str(each) for each in executors if each.is_over),
        ),
        executors=executors,
    )


def _not_kept(state: ClusterView) -> list[str]:
    dropped = state.num_failures - len(state.failures)
    return [f"{dropped} failures between the first and the newest are not kept"] * bool(dropped)


def _executors(
    nodes: tuple[reports.NodeReport, ...], rooms_mib: Mapping[str, float]
) -> tuple[reports.ExecutorReport, ...]:
    """Sum the nodes' memory by executor; servers beside the driver are on none."""
    together: dict[tuple[str, str], list[reports.NodeReport]] = {}
    for node in nodes:
        if node.rss_mib and node.executor_id != DRIVER_EXECUTOR:
            together.setdefault((node.executor_id, node.host), []).append(node)
    return tuple(
        reports.ExecutorReport(
            executor_id=executor_id,
            host=host,
            nodes=tuple(each.name for each in some),
            rss_mib=sum(each.rss_mib for each in some),
            room_mib=rooms_mib.get(some[0].name, 0.0),
        )
        for (executor_id, host), some in together.items()
    )


def _node_report(
    member: Member,
    now_s: float,
    times: reports.StepTimes | None,
    window: stragglers.ServerWindow | None,
) -> reports.NodeReport:
    beat = member.heartbeat
    progress = member.progress
    return reports.NodeReport(
        name=member.name,
        status=member.status.value,
        phase=member.phase,
        host=member.host,
        executor_id=member.executor_id,
        pid=member.pid,
        attempt=max(member.attempt, 0),
        silent_s=max(0.0, now_s - member.heard_s),
        rss_mib=beat.rss_bytes / _MIB if beat is not None else 0.0,
        steps=progress.get("steps", 0.0),
        rows=trained_rows(progress, member.feeds),
        loss=progress.get("loss"),
        times=times,
        server=window.new if window is not None else None,
        metrics=_metrics(progress),
    )


def _metrics(progress: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that main_fun reports itself, by names without terminal control."""
    found = {
        visible(name.removeprefix(METRIC))[:_NAME_CHARS]: value
        for name, value in progress.items()
        if name.startswith(METRIC)
    }
    return dict(itertools.islice(found.items(), MOST_METRICS))


def trained_rows(progress: Mapping[str, float], feeds: Iterable[FeedSnapshot]) -> int:
    """Return the rows that main_fun reports, or else those of its feeds.

    Args:
        progress: its numbers.
        feeds: counts of its feeds.
    """
    own = progress.get("rows", 0.0)
    return int(own) if math.isfinite(own) and own else sum(each.trained_rows for each in feeds)
