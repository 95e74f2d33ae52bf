"""Status of a cluster as a report. Pure."""

from __future__ import annotations

from tfos.control.members import Member
from tfos.control.state import ClusterState
from tfos.monitor import reports, stragglers

_MIB = 1 << 20


def cluster_report(cluster_id: str, state: ClusterState, now_s: float) -> reports.ClusterReport:
    """Return the report of status() at this moment.

    Args:
        cluster_id: of the cluster.
        state: of the cluster.
        now_s: monotonic seconds.
    """
    board = state.tensorboard
    waits = stragglers.waits_of(state.servers)
    times = {each.name: stragglers.step_times(each, waits) for each in state.workers}
    training = {each.name for each in state.training()}
    loads = {each.name: stragglers.server_load(each) for each in state.servers if each.is_live}
    notes = (
        stragglers.find_straggler(
            {name: each for name, each in times.items() if name in training and each}
        ),
        stragglers.hot_shard({name: load for name, load in loads.items() if load}),
    )
    return reports.ClusterReport(
        cluster_id=cluster_id,
        phase=state.phase.name,
        nodes=tuple(
            _node_report(member, now_s, times.get(member.name)) for member in state.members.values()
        ),
        tensorboard_url=board.url or None if board is not None else None,
        failures=tuple(state.failures),
        notes=tuple(note for note in notes if note),
    )


def _node_report(
    member: Member, now_s: float, times: reports.StepTimes | None
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
        rows=sum(feed.taken_rows for feed in beat.feeds) if beat is not None else 0,
        loss=progress.get("loss"),
        times=times,
        server=stragglers.server_counters(beat),
    )
