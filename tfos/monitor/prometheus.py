"""Prometheus page of a whole cluster, at the driver; docs/guides/metrics.md explains each metric.

Covers: nodes' counters from their heartbeats, servers' counters, the page's address and token.
Does not: name servers' metrics (ps.stats.prometheus), serve HTTP (rpc.http_page).
Runs in: the driver.      Threads: any; the page has its own thread.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ps.cli.credentials import metrics_token
from ps.stats.prometheus import CONTENT_TYPE, Fields, Page, families, server_metrics
from rpc.endpoint import advertised_host, bracketed, is_loopback, is_wildcard
from rpc.errors import RpcError
from rpc.http_page import PATH, HttpPage
from tfos.control.coordinator import Coordinator
from tfos.control.members import Member, NodeStatus
from tfos.control.state.cluster_view import ClusterView
from tfos.errors import SettingsError
from tfos.monitor import stragglers

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_TOKEN_BYTES = 32

NODE_GAUGES: Fields = {
    "node_up": ("is_up", "1 while the node runs, or has done its work and still exists"),
    "node_silence_seconds": ("silent_s", "Since the node's last heartbeat"),
    "node_resident_memory_bytes": ("rss_bytes", "Resident memory of the node's process"),
}
WORKER_COUNTERS: Fields = {
    "worker_steps": ("steps", "Steps that the training loop has reported"),
    "worker_compute_seconds": ("compute_s", "Forward, backward, taking over the servers' values"),
    "worker_feed_seconds": ("feed_s", "Waiting for the next batch"),
    "worker_lookup_seconds": ("lookup_s", "Preparing ids and waiting for rows of tables"),
    "worker_pull_seconds": ("pull_s", "Pulling outside of steps"),
    "worker_push_seconds": ("push_s", "Pushing, waits for other workers included"),
}
FEED_GAUGES: Fields = {
    "feed_unread_bytes": ("unread_bytes", "Bytes that have arrived and the worker has not read"),
}
FEED_COUNTERS: Fields = {
    "feed_fed_rows": ("fed_rows", "Rows that arrived"),
    "feed_taken_rows": ("taken_rows", "Rows that were read, perhaps ahead of main_fun"),
    "feed_trained_rows": ("trained_rows", "Rows that main_fun has trained"),
    "feed_dropped_rows": ("dropped_rows", "Rows that no worker trained"),
    "feed_starved_seconds": ("starved_s", "Time that main_fun waited for rows"),
}
CLUSTER_GAUGES: Fields = {
    "cluster_running": ("is_running", "1 while the cluster runs"),
    "cluster_lost_nodes": ("lost_nodes", "Lost workers and evaluator, while others go on"),
}


@dataclass(frozen=True, slots=True)
class MetricsRequest:
    """Where the user wants the page; see TFCluster.reserve."""

    port: object = None
    """0: the system chooses; None: no page."""
    host: object = "127.0.0.1"
    token_file: object = None


class ClusterPage:
    """A cluster's metrics over HTTP until it is closed.

    Args:
        coordinator: knows the nodes.
        cluster_id: the label of `tfos_cluster_running`.
    """

    def __init__(self, coordinator: Coordinator, cluster_id: str) -> None:
        self._coordinator = coordinator
        self._cluster_id = cluster_id
        self._page: HttpPage | None = None
        self.url = ""
        self.token = ""
        """Token of the page; empty: the page is for this host only and needs none."""

    def start(self, request: MetricsRequest) -> None:
        """Listen.

        Args:
            request: where; its port is not None.

        Raises:
            SettingsError: host or port is invalid, the port in use, or the token's file of no use.
        """
        host, port = request.host, request.port
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16:
            raise SettingsError(f"metrics_port must be in 0..65535, 0 for any free one: {port!r}")
        if not isinstance(host, str):
            raise SettingsError(f"metrics_host must be a str such as '127.0.0.1', got {host!r}")
        if request.token_file is not None:
            self.token = _token_in(request.token_file)
        elif not is_loopback(host):
            self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        page = HttpPage(self.render, CONTENT_TYPE, token=self.token)
        try:
            bound = page.start(host, port)
        except (RpcError, OSError) as error:
            page.close()
            raise SettingsError(
                f"metrics_host={host!r}, metrics_port={port}: metrics cannot be served: {error}"
            ) from error
        self._page = page
        shown = advertised_host() if is_wildcard(host) else host
        self.url = f"http://{bracketed(shown)}:{bound}{PATH}"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._page is not None:
            self._page.close()

    def render(self) -> bytes:
        """Return the page as it is now."""
        now_s = self._coordinator.now_s()
        sources = self._sources(self._coordinator.copied(), now_s)
        return Page(tuple(metric for source in sources for metric in source())).text()

    def _sources(self, state: ClusterView, now_s: float) -> list[Callable[[], Iterator[Metric]]]:
        """Return what yields the metrics of a copy of the state."""
        members = list(state.members.values())
        nodes = [((each.name,), _node(each, now_s)) for each in members]
        workers = [((each.name,), _worker(each)) for each in state.workers]
        feeds = [((each.name, feed.feed), feed) for each in state.workers for feed in each.feeds]
        beats = [each.heartbeat for each in state.servers]
        lost = sum(each.status is NodeStatus.LOST for each in members)
        running = SimpleNamespace(is_running=state.phase.name == "RUNNING", lost_nodes=lost)
        cluster = [((self._cluster_id,), running)]

        def servers() -> Iterator[Metric]:
            counters = [stragglers.server_counters(beat) for beat in beats]
            yield from server_metrics([stats for stats in counters if stats is not None])

        return [
            lambda: families(CLUSTER_GAUGES, ("cluster",), cluster, prefix="tfos_"),
            lambda: families(NODE_GAUGES, ("node",), nodes, prefix="tfos_"),
            lambda: families(WORKER_COUNTERS, ("node",), workers, prefix="tfos_", grows=True),
            lambda: families(FEED_GAUGES, ("node", "feed"), feeds, prefix="tfos_"),
            lambda: families(FEED_COUNTERS, ("node", "feed"), feeds, prefix="tfos_", grows=True),
            servers,
        ]


def _token_in(file: object) -> str:
    if not isinstance(file, str | os.PathLike) or not os.fspath(file):
        raise SettingsError(f"metrics_token_file must be a path on the driver's host, got {file!r}")
    try:
        return metrics_token(os.fspath(file))
    except OSError as error:
        raise SettingsError(f"metrics_token_file={str(file)!r}: {error.strerror}") from error


def _node(member: Member, now_s: float) -> SimpleNamespace:
    beat = member.heartbeat
    return SimpleNamespace(
        is_up=member.is_live,
        silent_s=max(0.0, now_s - member.heard_s) if member.attempt >= 0 else 0.0,
        rss_bytes=beat.rss_bytes if beat is not None else 0,
    )


def _worker(member: Member) -> SimpleNamespace:
    names = (name for name, _ in WORKER_COUNTERS.values())
    return SimpleNamespace(**{name: member.progress.get(name, 0.0) for name in names})
