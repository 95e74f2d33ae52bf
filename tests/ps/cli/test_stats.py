"""What the command `stats` prints of a server."""

from __future__ import annotations

from ps.cli.stats import lines
from ps.stats.server_stats import OpenRendezvous, ServerStats, TableStats


def test_a_tables_rows_limit_evictions_admission_and_staleness_are_shown():
    full = TableStats(
        name="user",
        rows=4000,
        max_rows=5000,
        memory_bytes=3 << 20,
        given=400_000,
        looked_up=90_000,
        missed=9_000,
        pushed=10_000,
        added=4100,
        dropped=77,
        evicted=100,
        staleness=(10, 80, 10),
    )
    server = ServerStats(1, "TRAINING", 7, 60.0, tables=(full, TableStats(name="new")))
    assert list(lines(server))[3:] == [
        "  table user: 4,000 rows of at most 5,000, 3.0 MiB, 90,000 ids looked up, 10.0% missed, "
        "25.0% of ids unique",
        "    4,100 rows created, 100 evicted, 77 gradients of ids not admitted",
        "    staleness of the rows of 100 pushes: mean 1.1, p99 2.5 updates of the table",
        "  table new: 0 rows, 0.0 MiB, 0 ids looked up, 0.0% missed, 100.0% of ids unique",
        "    0 rows created, 0 evicted, 0 gradients of ids not admitted",
    ]


def test_whom_a_rendezvous_waits_for_is_shown():
    meeting = OpenRendezvous("epoch", 70.2, (1, 3))
    server = ServerStats(0, "SERVING", 7, 60.0, open_rendezvous=(meeting,))
    assert "  rendezvous 'epoch' waits for worker 1, 3 since 70 s" in lines(server)


def test_whom_a_barrier_waits_for_is_shown():
    waiting = ServerStats(0, "TRAINING", 7, 60.0, missing=(1, 3), waiting_lookups=2)
    assert "  waiting for worker 1, 3; 2 lookups wait for a permit" in lines(waiting)
    assert not any("waiting for" in line for line in lines(ServerStats(0, "TRAINING", 7, 60.0)))
