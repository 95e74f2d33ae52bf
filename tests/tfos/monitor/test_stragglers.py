"""Who holds the others up, from heartbeats: the worker or server that is named, and the reason."""

from __future__ import annotations

import msgspec
import pytest

from ps.stats.server_stats import OpenRendezvous, ServerStats, TableStats, WorkerStats
from rpc.histogram import Latency
from tests.support.cluster_states import node_id, running
from tfos.control import messages
from tfos.control.members import WINDOW_BEATS
from tfos.monitor.reports import ClusterReport
from tfos.monitor.status import cluster_report
from tfos.monitor.stragglers import ServerWindow, Waits, server_counters, waits_of
from tfos.topology import plan

NOW = 100.0


class Cluster:
    """A running cluster's state, and heartbeats for it."""

    def __init__(self, num_workers: int, num_ps: int) -> None:
        self.state = running(plan(num_workers + num_ps, num_ps), now_s=NOW)
        self._seq = 0

    def beat(self, name: str, progress: dict[str, float] | None = None, stats: bytes = b"") -> None:
        self._seq += 1
        beat = messages.Heartbeat(
            node_id(name), self._seq, "serving", progress=progress or {}, stats=stats
        )
        self.state.on_heartbeat(beat, NOW)

    def steps(self, name: str, steps: float, **seconds: float) -> None:
        names = ("compute", "feed", "pull", "push")
        times = {f"{part}_s": seconds.get(part, 0.0) for part in names}
        self.beat(name, {"steps": steps, **times})

    def served(self, name: str, **fields: object) -> None:
        given = {"server": node_id(name).index, "phase": "SERVING", "clock": 1, "uptime_s": 1.0}
        self.beat(name, stats=msgspec.msgpack.encode(ServerStats(**{**given, **fields})))  # type: ignore[arg-type]

    def report(self) -> ClusterReport:
        return cluster_report("c", self.state, NOW)


def pushes(count: int, total_s: float) -> dict[str, Latency]:
    return {"push": Latency(count, total_s, p50_s=total_s / count, p99_s=total_s / count)}


@pytest.mark.fault("F32")
def test_a_slow_worker_is_named_with_its_shares():
    cluster = Cluster(3, 1)
    for rank in range(3):
        cluster.steps(f"worker:{rank}", 0)
    cluster.steps("worker:0", 100, compute=10.0, push=5.0)
    cluster.steps("worker:1", 100, compute=10.0, push=5.0)
    cluster.steps("worker:2", 10, compute=12.0, feed=2.0, push=1.0)
    report = cluster.report()
    (note,) = report.notes
    assert note.startswith(
        "straggler: worker:2 takes 1.50 s of its own per step, the others 150.0 ms"
    )
    assert "compute 80%, feed 13%, lookup 0%, pull 0%, push 7%, waits for others 0%" in note
    assert note in str(report)


@pytest.mark.fault("F32")
def test_at_a_barrier_all_are_equally_fast_and_who_waits_least_is_the_slow_one():
    """All make 10 steps in 20 s; the servers know who waited for whom."""
    cluster = Cluster(3, 1)
    for rank in range(3):
        cluster.steps(f"worker:{rank}", 0)
    cluster.steps("worker:0", 10, compute=1.0, push=19.0)
    cluster.steps("worker:1", 10, compute=1.0, push=19.0)
    cluster.steps("worker:2", 10, compute=1.0, feed=18.0, push=1.0)
    cluster.served("ps:0")
    waits = (WorkerStats(0, waited_s=18.5), WorkerStats(1, waited_s=18.5), WorkerStats(2))
    cluster.served("ps:0", workers=waits, barrier_wait_s=37.0)
    report = cluster.report()
    (note,) = report.notes
    assert note.startswith("straggler: worker:2 takes 2.00 s")
    assert "feed 90%" in note
    times = {node.name: node.times for node in report.nodes}
    assert times["worker:0"] is not None
    assert times["worker:0"].wait_s == 18.5
    assert times["worker:0"].push_s == 0.5


def test_even_workers_and_servers_are_no_news():
    cluster = Cluster(3, 2)
    for rank in range(3):
        cluster.steps(f"worker:{rank}", 100, compute=10.0 + rank, push=5.0)
    for rank in range(2):
        cluster.served(f"ps:{rank}", requests=pushes(100, 1.0 + rank / 2), bytes_in=10**9)
    report = cluster.report()
    assert report.notes == ()
    assert "ps:1: push p50 15.0 ms, p99 15.0 ms; 0 requests in service, 0 pushes" in str(report)


def test_the_status_says_for_whom_a_rendezvous_waits():
    cluster = Cluster(3, 2)
    cluster.served("ps:0", open_rendezvous=(OpenRendezvous("fit/0/begin", 70.2, (1, 2)),))
    text = (
        "0 pushes waiting; staleness mean 0.0, p99 0.0; rendezvous 'fit/0/begin' waits for worker"
    )
    assert f"{text} 1, 2 since 70 s" in str(cluster.report())


def test_only_what_is_lately_counts():
    """Worker 1 was slow long ago, then as fast as the others."""
    cluster = Cluster(2, 1)
    cluster.steps("worker:0", 100, compute=10.0)
    cluster.steps("worker:1", 100, compute=900.0)
    assert cluster.report().notes
    for beat in range(1, WINDOW_BEATS + 1):
        cluster.steps("worker:0", 100 + beat, compute=10.0 + beat / 10)
        cluster.steps("worker:1", 100 + beat, compute=900.0 + beat / 10)
    assert cluster.report().notes == ()


def test_steps_longer_than_the_window_count_since_the_start():
    cluster = Cluster(2, 1)
    for beat in range(3):
        cluster.steps("worker:0", 5 + beat, compute=10.0 * (5 + beat))
        cluster.steps("worker:1", 4, compute=400.0)
    (note,) = cluster.report().notes
    assert note.startswith("straggler: worker:1 takes 100.00 s")


@pytest.mark.fault("F33")
def test_a_slow_server_is_named_with_its_table():
    cluster = Cluster(1, 3)
    for rank in range(3):
        cluster.served(f"ps:{rank}")
    for rank, seconds in enumerate((1.0, 9.0, 1.0)):
        cluster.served(
            f"ps:{rank}",
            uptime_s=2.0,
            requests=pushes(100, seconds),
            apply=Latency(100, 0.9),
            tables=(TableStats("user", looked_up=10, pushed=10), TableStats("item", pushed=60)),
        )
    (note,) = cluster.report().notes
    assert note == (
        "hot shard: ps:1 takes 90.0 ms for a request, the others 10.0 ms: update kernels 10%, "
        "receiving and sending 90%; table 'item' has 75% of its ids"
    )


@pytest.mark.fault("F33")
def test_a_server_that_moves_more_than_the_others_is_named():
    cluster = Cluster(1, 2)
    for rank, nbytes in enumerate((4 * 10**9, 10**9)):
        cluster.served(f"ps:{rank}", uptime_s=4.0, requests=pushes(100, 1.0), bytes_in=nbytes)
    (note,) = cluster.report().notes
    assert note == "hot shard: ps:0 moves 1000.0 MB/s, the others 250.0 MB/s"


def test_servers_whose_heartbeats_are_of_other_moments_are_even():
    """One server's window is three times as long: its heartbeats are late on a busy host."""
    cluster = Cluster(1, 2)
    for rank, lately_s in enumerate((6.0, 2.0)):
        for uptime_s in (10.0 - lately_s, 10.0):
            cluster.served(
                f"ps:{rank}",
                uptime_s=uptime_s,
                requests=pushes(round(100 * uptime_s), uptime_s / 10),
                bytes_in=round(uptime_s * 10**7),
            )
    assert cluster.report().notes == ()


def test_servers_that_move_next_to_nothing_are_even():
    """A model of one bucket: its server moves some MB, the other one nearly none."""
    cluster = Cluster(1, 2)
    for rank, nbytes in enumerate((36_000_000, 100_000)):
        cluster.served(f"ps:{rank}", uptime_s=4.0, requests=pushes(1000, 0.01), bytes_in=nbytes)
    assert cluster.report().notes == ()


def test_a_restarted_server_counts_from_its_start():
    cluster = Cluster(1, 2)
    for rank in range(2):
        cluster.served(f"ps:{rank}", uptime_s=500.0, requests=pushes(1000, 900.0))
    cluster.served("ps:0", uptime_s=502.0, requests=pushes(1100, 901.0))
    cluster.served("ps:1", uptime_s=1.0, requests=pushes(50, 0.5))
    assert cluster.report().notes == ()


def test_a_server_that_has_run_longer_than_the_one_before_it_counts_from_its_start_too():
    """One that ended soon after its start: the new one's uptime passes the old one's."""
    cluster = Cluster(1, 2)
    for rank in range(2):
        cluster.served(f"ps:{rank}", uptime_s=2.0, start=1, requests=pushes(1000, 10.0))
    cluster.served("ps:0", uptime_s=9.0, start=1, requests=pushes(1100, 11.0))
    cluster.served("ps:1", uptime_s=3.0, start=2, requests=pushes(50, 0.5))
    assert cluster.report().notes == ()


def test_waits_count_from_the_start_of_a_restarted_server():
    cluster = Cluster(2, 1)
    for rank in range(2):
        cluster.steps(f"worker:{rank}", 0)
    cluster.served("ps:0", start=1, workers=(WorkerStats(0, waited_s=50.0),))
    cluster.served("ps:0", start=2, uptime_s=5.0, workers=(WorkerStats(0, waited_s=4.0),))
    for rank in range(2):
        cluster.steps(f"worker:{rank}", 10, compute=1.0, push=4.0)
    waited = {node.name: node.times.wait_s for node in cluster.report().nodes if node.times}
    assert waited == {"worker:0": 4.0, "worker:1": 0.0}


def test_a_push_waits_as_long_as_at_the_server_where_it_waited_longest():
    def server(waited_s: float) -> ServerStats:
        workers = (WorkerStats(0, waited_s=waited_s),)
        return ServerStats(server=0, phase="SERVING", clock=1, uptime_s=1.0, workers=workers)

    waited = (9.0, 6.0), (8.0, 2.0), (5.0, 5.0)
    windows = [ServerWindow(server(now_s), server(before_s)) for now_s, before_s in waited]
    assert waits_of(windows) == Waits(lately={0: 6.0}, since_start={0: 9.0})


@pytest.mark.parametrize("stats", [b"\xc1", b"\x90", b"\x80", b"\xff" * 40])
def test_counters_that_cannot_be_read_are_left_out(stats: bytes):
    cluster = Cluster(1, 1)
    cluster.beat("ps:0", stats=stats)
    report = cluster.report()
    assert report.notes == ()
    assert all(node.server is None for node in report.nodes)
    assert server_counters(None) is None
