"""Servers' counters as Prometheus metrics; docs/guides/metrics.md explains each of them.

Covers: names, labels and units of a server's metrics; the text of a page.
Does not: count (ps.stats.counters), serve the page (rpc.http_page).
Runs in: PS processes that are started with a metrics port, and the driver. prometheus_client is
imported when the first page is made, so a server without a page never pays for it.
Pure; no threads.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ps.stats.server_stats import ServerStats, TableStats
from rpc.histogram import Latency

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""Names of tables and feeds may hold them; a reader's terminal must not see any."""
_FIRST_OCTAVE, _LAST_OCTAVE = 4, 27
"""Buckets end at 16 us, 32 us, ... 134 s."""

Fields = dict[str, tuple[str, str]]

SERVER_GAUGES: Fields = {
    "uptime_seconds": ("uptime_s", "Since this server was started"),
    "connections": ("connections", "Authenticated connections"),
    "requests_in_service": ("in_service", "Requests that are being answered"),
    "pushes_waiting": ("waiting", "Pushes that wait for other workers"),
    "lookups_waiting": ("waiting_lookups", "Lookups that wait for older batches of their worker"),
    "parameter_bytes": ("parameter_bytes", "Dense values that this server owns"),
    "resident_memory_bytes": ("rss_bytes", "Resident memory of the process"),
}
SERVER_COUNTERS: Fields = {
    "updates": ("clock", "Updates of the parameters: pushes (async, ssp) or barriers (sync)"),
    "calls": ("calls", "Requests"),
    "errors": ("errors", "Requests that were answered with an error"),
    "received_bytes": ("bytes_in", "Payload received with requests"),
    "sent_bytes": ("bytes_out", "Payload sent with replies"),
    "lost_updates": ("lost_updates", "Acknowledged updates that a restore has undone"),
}
WORKER_COUNTERS: Fields = {
    "worker_pushes": ("pushes", "Gradients that became part of the parameters"),
    "worker_rows": ("rows", "Rows of those gradients"),
    "worker_null_pushes": ("null_pushes", "Pushes without a gradient"),
    "worker_table_pushes": ("table_pushes", "Pushes to tables"),
    "worker_repeated_requests": ("repeated", "Requests that were resent after a broken connection"),
    "worker_refused_pushes": ("refused", "Pushes refused as non-finite, stale or out of sequence"),
    "worker_wait_seconds": ("waited_s", "Waits of this worker's pushes for other workers"),
}
TABLE_GAUGES: Fields = {
    "table_rows": ("rows", "Rows of the table on this server"),
    "table_memory_bytes": ("memory_bytes", "Memory of those rows with ids, versions and index"),
    "table_admitted_early": ("admitted_early", "Share of new ids that are admitted too early"),
}
TABLE_COUNTERS: Fields = {
    "table_given_ids": ("given", "Ids in lookups and pushes as workers gave them"),
    "table_looked_up_ids": ("looked_up", "Distinct ids that were looked up"),
    "table_missed_ids": ("missed", "Of those, ids without a row"),
    "table_pushed_ids": ("pushed", "Distinct ids that were pushed"),
    "table_added_rows": ("added", "Rows created"),
    "table_dropped_ids": ("dropped", "Gradients of ids that were not admitted"),
    "table_evicted_rows": ("evicted", "Rows evicted"),
    "table_forgotten_deliveries": ("forgotten", "Lookups whose push has no staleness any more"),
}


@dataclass(frozen=True, slots=True)
class Page:
    """Metrics for prometheus_client; built for every page."""

    metrics: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics, as prometheus_client's registries do."""
        return self.metrics

    def text(self) -> bytes:
        """Return the page."""
        from prometheus_client import exposition

        written: str = exposition.generate_latest(self).decode()
        return _CONTROLS.sub(lambda found: rf"\\x{ord(found[0]):02x}", written).encode()


def server_metrics(servers: Sequence[ServerStats]) -> Iterator[Metric]:
    """Give every metric of these servers."""
    numbered = [((str(each.server),), each) for each in servers]
    yield from families(SERVER_GAUGES, ("server",), numbered)
    yield from families(SERVER_COUNTERS, ("server",), numbered, grows=True)
    yield _phases(servers)
    yield from _latencies(servers)
    yield _staleness(
        "tfos_ps_staleness_updates",
        "Updates by others between a worker's pull and its push; the sum is from bins' middles",
        ("server",),
        numbered,
    )
    workers = [
        ((str(server.server), str(worker.worker)), worker)
        for server in servers
        for worker in server.workers
    ]
    yield from families(WORKER_COUNTERS, ("server", "worker"), workers, grows=True)
    tables: list[tuple[tuple[str, ...], TableStats]] = [
        ((str(server.server), table.name), table) for server in servers for table in server.tables
    ]
    yield from families(TABLE_GAUGES, ("server", "table"), tables)
    yield from families(TABLE_COUNTERS, ("server", "table"), tables, grows=True)
    yield from families(
        {"table_max_rows": ("max_rows", "Rows that this server's share of the table may have")},
        ("server", "table"),
        [(labels, table) for labels, table in tables if table.max_rows is not None],
    )
    yield _staleness(
        "tfos_ps_table_row_staleness_updates",
        "Updates of a table between a lookup of rows and the push for them; the sum is from bins'"
        " middles",
        ("server", "table"),
        tables,
    )


def families(
    fields: Fields,
    labels: Sequence[str],
    sources: Sequence[tuple[tuple[str, ...], Any]],
    *,
    grows: bool = False,
    prefix: str = "tfos_ps_",
) -> Iterator[Metric]:
    """Yield one metric per field, with a value of each source.

    Args:
        fields: name without prefix -> attribute of the sources, help.
        labels: names of the labels.
        sources: values of the labels, and the object with the attributes.
        grows: whether the values only grow: counters, whose names end in `_total`.
        prefix: prefix of all names.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if grows else GaugeMetricFamily
    for name, (attribute, text) in fields.items():
        family = kind(prefix + name, text, labels=labels)
        for values, source in sources:
            family.add_metric(values, getattr(source, attribute))
        yield family


def _phases(servers: Sequence[ServerStats]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(
        "tfos_ps_phase", "1 for the phase that this server is in", labels=("server", "phase")
    )
    for server in servers:
        family.add_metric((str(server.server), server.phase), 1)
    return family


def _latencies(servers: Sequence[ServerStats]) -> Iterator[Metric]:
    from prometheus_client.core import HistogramMetricFamily

    requests = HistogramMetricFamily(
        "tfos_ps_request_seconds",
        "From a request's header to its answer's last byte, waits for other workers included",
        labels=("server", "request"),
    )
    applying = HistogramMetricFamily(
        "tfos_ps_apply_seconds",
        "In update kernels, of one push (async, ssp, tables) or one barrier (sync)",
        labels=("server",),
    )
    for server in servers:
        for request, latency in server.requests.items():
            _add_latency(requests, (str(server.server), request), latency)
        _add_latency(applying, (str(server.server),), server.apply)
    yield requests
    yield applying


def _add_latency(family: HistogramMetricFamily, labels: tuple[str, ...], latency: Latency) -> None:
    sums = list(itertools.accumulate(latency.octaves)) or [0]
    buckets = [
        (f"{2**octave / 1e6:g}", sums[min(octave, len(sums) - 1)])
        for octave in range(_FIRST_OCTAVE, _LAST_OCTAVE + 1)
    ]
    family.add_metric(labels, [*buckets, ("+Inf", sums[-1])], latency.total_s)


def _staleness(
    name: str,
    text: str,
    labels: Sequence[str],
    sources: Sequence[tuple[tuple[str, ...], ServerStats | TableStats]],
) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=labels)
    for values, source in sources:
        sums = list(itertools.accumulate(source.staleness)) or [0]
        buckets = [(str(2**place - 1), total) for place, total in enumerate(sums[:-1])]
        total = source.mean_staleness * sums[-1]
        family.add_metric(values, [*buckets, ("+Inf", sums[-1])], total)
    return family
