"""The Prometheus page of servers' counters, as Prometheus' own parser reads it."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ps.cli.credentials import metrics_token
from ps.errors import PSSettingsError
from ps.manifest.manifest import WorkerRank
from ps.stats.counters import Counters
from ps.stats.prometheus import Page, server_metrics
from ps.stats.server_stats import ServerStats, TableStats, WorkerStats
from rpc.histogram import Latency, LatencyHistogram

DOCUMENT = Path(__file__).parents[3] / "docs" / "guides" / "metrics.md"


def histogram(*seconds: float) -> Latency:
    filled = LatencyHistogram()
    for each in seconds:
        filled.add(each)
    return filled.snapshot()


def samples(servers: Sequence[ServerStats]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the page by name and labels, as Prometheus would store it."""
    text = Page(tuple(server_metrics(servers))).text().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.attack("A24")
def test_names_cannot_steer_the_terminal_of_a_reader_and_stay_apart():
    tables = tuple(TableStats(name, rows=1) for name in ("a", "a\x1b[2J", "a\x9b2J\r", "a\nb"))
    stats = ServerStats(0, "SERVING", clock=0, uptime_s=0.0, tables=tables)
    text = Page(tuple(server_metrics([stats]))).text().decode()
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    named = {dict(labels).get("table") for name, labels in samples([stats]) if "_rows" in name}
    assert named >= {"a", r"a\x1b[2J", r"a\x9b2J\x0d", "a\nb"}


def test_the_parser_reads_what_was_counted():
    table = TableStats(
        "user",
        rows=7,
        max_rows=10,
        memory_bytes=640,
        given=30,
        looked_up=12,
        staleness=(1, 0, 2),
        forgotten=4,
    )
    stats = ServerStats(
        1,
        "SERVING",
        clock=5,
        uptime_s=2.5,
        workers=(WorkerStats(0, pushes=3, rows=96, waited_s=0.25), WorkerStats(1, refused=2)),
        staleness=(4, 2, 1, 0),
        bytes_in=4096,
        in_service=3,
        waiting=2,
        requests={"push": histogram(0.0004, 0.002, 0.02), "pull": histogram()},
        apply=histogram(0.001, 0.003),
        tables=(table,),
    )
    found = samples([stats])
    server = ("server", "1")
    assert found["tfos_ps_updates_total", (server,)] == 5
    assert found["tfos_ps_received_bytes_total", (server,)] == 4096
    stale = "tfos_ps_table_row_staleness_updates"
    user = (server, ("table", "user"))
    assert found[f"{stale}_bucket", (("le", "0"), *user)] == 1
    assert found[f"{stale}_count", user] == 3
    assert found[f"{stale}_sum", user] == 5
    assert found["tfos_ps_table_forgotten_deliveries_total", user] == 4
    assert found["tfos_ps_requests_in_service", (server,)] == 3
    assert found["tfos_ps_pushes_waiting", (server,)] == 2
    assert found["tfos_ps_phase", (("phase", "SERVING"), server)] == 1
    assert found["tfos_ps_worker_pushes_total", (server, ("worker", "0"))] == 3
    assert found["tfos_ps_worker_wait_seconds_total", (server, ("worker", "0"))] == 0.25
    assert found["tfos_ps_worker_refused_pushes_total", (server, ("worker", "1"))] == 2
    assert found["tfos_ps_table_rows", (server, ("table", "user"))] == 7
    assert found["tfos_ps_table_max_rows", (server, ("table", "user"))] == 10
    assert found["tfos_ps_table_given_ids_total", (server, ("table", "user"))] == 30


def test_histograms_are_cumulative():
    stats = ServerStats(
        0,
        "SERVING",
        clock=0,
        uptime_s=0.0,
        staleness=(4, 2, 1, 3),
        requests={"push": histogram(0.0004, 0.002, 0.02, 500.0)},
    )
    found = samples([stats])
    labels = (("request", "push"), ("server", "0"))

    def up_to(bound: str) -> float:
        return found["tfos_ps_request_seconds_bucket", (("le", bound), *labels)]

    assert [up_to(bound) for bound in ("0.000256", "0.000512", "0.002048", "0.032768")] == [
        0,
        1,
        2,
        3,
    ]
    assert up_to("134.218") == 3
    assert up_to("+Inf") == found["tfos_ps_request_seconds_count", labels] == 4
    assert found["tfos_ps_request_seconds_sum", labels] == 500.0224
    stale = {
        dict(key)["le"]: value
        for (name, key), value in found.items()
        if "staleness_updates_b" in name
    }
    assert stale == {"0": 4, "1": 6, "3": 7, "+Inf": 10}


def test_names_with_quotes_and_newlines_stay_one_label():
    """A table's name is the user's: it must not forge a line of the page."""
    name = 'x"} 1\ntfos_ps_updates_total{server="9"} 77\n\\'
    found = samples(
        [ServerStats(0, "SERVING", clock=0, uptime_s=0.0, tables=(TableStats(name, rows=3),))]
    )
    assert found["tfos_ps_table_rows", (("server", "0"), ("table", name))] == 3
    assert ("tfos_ps_updates_total", (("server", "9"),)) not in found


def test_the_document_names_exactly_the_metrics_that_there_are():
    stats = ServerStats(0, "EMPTY", clock=0, uptime_s=0.0)
    made = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name
        for metric in server_metrics([stats])
    }
    words = re.findall(r"tfos_ps_\w+", DOCUMENT.read_text())
    named = {re.sub("_(bucket|sum|count)$", "", word) for word in words}
    assert named == made


def test_counters_count():
    counters = Counters()
    counters.begin_call()
    counters.begin_call()
    counters.end_call("push", 0.002, failed=False)
    counters.begin_call()
    counters.end_call("", 0.001, failed=True)
    counters.applied(0.5, bytes_in=10)
    counters.add_sent(7)
    counters.count_push(WorkerRank(3), rows=32, staleness=5)
    with counters.waiting(WorkerRank(3)):
        during = counters.snapshot(ServerStats(0, "SERVING", clock=0, uptime_s=0.0))
    stats = counters.snapshot(ServerStats(0, "SERVING", clock=0, uptime_s=0.0))
    assert stats.start == during.start != Counters().snapshot(during).start
    assert (stats.calls, stats.in_service, stats.errors) == (3, 1, 1)
    assert (during.waiting, stats.waiting) == (1, 0)
    assert stats.latency("push").count == 1
    assert stats.latency("pull").count == 0
    assert set(stats.requests) == {"push"}
    assert (stats.apply_s, stats.bytes_in, stats.bytes_out) == (0.5, 10, 7)
    (worker,) = stats.workers
    assert (worker.worker, worker.pushes, worker.rows) == (3, 1, 32)
    assert worker.waited_s == stats.barrier_wait_s > 0.0
    assert stats.staleness[3] == 1


def test_staleness_is_read_from_bins_middles():
    stats = ServerStats(0, "SERVING", clock=0, uptime_s=0.0, staleness=(2, 0, 2, 0))
    assert stats.mean_staleness == 1.25
    assert stats.staleness_quantile(0.5) == 0.0
    assert stats.staleness_quantile(0.99) == 2.5
    empty = ServerStats(0, "EMPTY", clock=0, uptime_s=0.0)
    assert (empty.mean_staleness, empty.staleness_quantile(0.99)) == (0.0, 0.0)


def test_ratios_of_a_table():
    table = TableStats("t", given=100, looked_up=30, missed=6, pushed=20)
    assert table.miss_ratio == 0.2
    assert table.unique_id_ratio == 0.5
    assert (TableStats("t").miss_ratio, TableStats("t").unique_id_ratio) == (0.0, 1.0)


@pytest.mark.parametrize(
    "token", [b"first line of it\nsecond", b"with a space in it", b"\xc3\xa4" * 9]
)
def test_a_token_that_no_reader_can_show_is_refused(tmp_path: Path, token: bytes):
    """`base64` breaks its lines: without a word every reader would be refused."""
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_bytes(token)
    with pytest.raises(PSSettingsError, match="one line of visible ASCII"):
        metrics_token(str(file))
    file.write_bytes(b"0123456789abcdef\n")
    assert metrics_token(str(file)) == "0123456789abcdef"
