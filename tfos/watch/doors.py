"""Doors to a job: the terminal's ticket, the page, the metrics, the record at the end.

Covers: opening them while a cluster waits for its slots, closing them with it.
Does not: answer (tfos.watch.job), serve (tfos.watch.page_server).
Runs in: the driver.      Threads: the one that reserves; closing on that of the end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rpc.auth.certificates import TlsCredentials
from rpc.endpoint import is_loopback
from tfos.console.console import Console
from tfos.control.coordinator import Coordinator
from tfos.control.state.cluster_view import ClusterView
from tfos.errors import SettingsError
from tfos.monitor.prometheus import ClusterPage, MetricsRequest
from tfos.spark.facts import SparkFacts
from tfos.watch import run_history, ticket
from tfos.watch.job import Job
from tfos.watch.snapshot import JobInfo

if TYPE_CHECKING:
    from tfos.watch.page_server import JobPage


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What `reserve(page_port=…, page_host=…, page_hosts=…)` asks for."""

    port: object = None
    """Port of the page; None: there is no page."""
    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()

    def check(self) -> int | None:
        """Return the port; None: no page is wanted.

        Raises:
            SettingsError: a value cannot work, or the extra is not installed.
        """
        if self.port is None:
            return None
        port = self.port
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16:
            raise SettingsError(f"page_port must be in 0..65535, 0 for any free one: {port!r}")
        if not isinstance(self.host, str):
            raise SettingsError(f"page_host must be a str such as '127.0.0.1', got {self.host!r}")
        try:
            from tfos.watch import page_server  # noqa: F401 - Starlette and uvicorn: only here
        except ModuleNotFoundError as error:
            if not error.name or error.name.partition(".")[0] not in ("starlette", "uvicorn"):
                raise
            raise SettingsError(
                f"page_port={port} needs {error.name}, which is not installed: pip install "
                "'tfos[page]' at the driver, or leave page_port out; `tfos status` needs neither"
            ) from error
        return port


def host_names(given: object) -> tuple[str, ...]:
    """Return the names that `page_hosts` has.

    Raises:
        SettingsError: they are not host names.
    """
    names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
    if not all(isinstance(each, str) for each in names):
        raise SettingsError(
            f"page_hosts must be host names, such as ['jupyter.example'], got {given!r}"
        )
    return names


def job_info(cluster_id: str, facts: SparkFacts) -> JobInfo:
    """Return what never changes of a job that starts now.

    Args:
        cluster_id: the cluster's id.
        facts: its SparkContext's facts.
    """
    return JobInfo(
        cluster_id=cluster_id,
        name=facts.app_name,
        application_id=facts.application_id,
        spark_url=facts.ui_url,
        started_at=time.time(),
        started_s=time.monotonic(),
    )


def open_metrics(
    coordinator: Coordinator, metrics: ClusterPage, request: MetricsRequest, console: Console
) -> ClusterPage | None:
    """Serve a cluster's metrics until its control plane closes; None: no port is wanted.

    Args:
        coordinator: the cluster's coordinator.
        metrics: its page.
        request: where it listens.
        console: shows where the page is.

    Raises:
        SettingsError: the port is invalid or in use, or the token's file cannot be used.
    """
    if request.port is None:
        return None
    metrics.start(request)
    coordinator.at_close(metrics.close)
    needs = ", with the token of cluster.metrics_token()" if metrics.token else ""
    console.line(f"metrics: {metrics.url}{needs}")
    return metrics


def open_doors(
    job: Job,
    request: PageRequest,
    metrics: Callable[[], bytes],
    address: str,
    keys: TlsCredentials,
    console: Console,
) -> JobPage | None:
    """Let the user's other processes and browser look at the job until its control plane closes.

    Args:
        job: what they see.
        request: where the page listens.
        metrics: returns Prometheus' text.
        address: address of the control server.
        keys: keys of the authority's node OPERATOR_NAME.
        console: shows where the page is.

    Returns:
        The page, or None if none is wanted.

    Raises:
        SettingsError: the page's port is in use.
    """
    coordinator = job.coordinator
    coordinator.at_close(lambda: _record_end(job, console))
    page = _open_page(job, request, metrics, console)
    if page is not None:
        coordinator.at_close(page.note_end)
    coordinator.at_close(coordinator.await_last_looks)
    if page is not None:
        coordinator.at_close(page.close)
    page_url = page.url if page is not None else ""
    coordinator.at_close(_open_ticket(job, address, page_url, keys, console))
    coordinator.answer_with(job.answer)
    return page


def _open_page(
    job: Job, request: PageRequest, metrics: Callable[[], bytes], console: Console
) -> JobPage | None:
    port = request.check()
    if port is None:
        return None
    from tfos.watch.page_server import JobPage

    page = JobPage(job, metrics)
    page.start(request.host, port, request.hosts)
    console.line(f"page: {page.url.partition('?')[0]} (its token: cluster.page_url(), `tfos page`)")
    if not is_loopback(request.host):
        console.warn(
            f"the page on {request.host} has no TLS: its token can be read on the network. Keep "
            "it on 127.0.0.1 behind ssh -L, or behind a proxy with TLS"
        )
    return page


def ticket_of(
    info: JobInfo, address: str, keys: TlsCredentials, page_url: str = ""
) -> ticket.DriverTicket:
    """Return the ticket of a job whose driver this process is.

    Args:
        info: the job's info.
        address: address of the control server.
        keys: keys of the authority's node OPERATOR_NAME.
        page_url: URL of the job's page; empty: it has none.
    """
    return ticket.DriverTicket.of_this(
        cluster_id=info.cluster_id,
        name=info.name,
        application_id=info.application_id,
        started_at=info.started_at,
        address=address,
        page_url=page_url,
        cert_pem=keys.cert_pem,
        key_pem=keys.key_pem,
        ca_pem=keys.ca_pem,
    )


def _open_ticket(
    job: Job, address: str, page_url: str, keys: TlsCredentials, console: Console
) -> Callable[[], None]:
    """Let the user's other processes ask the driver; return a function that ends that."""
    try:
        path: Path | None = ticket.write(ticket_of(job.info, address, keys, page_url))
    except (OSError, SettingsError) as error:
        step = "; set XDG_CACHE_HOME to a directory of this user, for the driver and for them"
        is_said = getattr(error, "errno", None) is None  # our own errors say what to do
        console.line(
            "`tfos status`, `tfos save` and `tfos stop` cannot find this driver: "
            f"{error}{'' if is_said else step}"
        )
        path = None

    def close() -> None:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()

    return close


def _record_end(job: Job, console: Console) -> None:
    """Add the run to the user's history, if any of its nodes has been there."""
    if not job.coordinator.read(_has_begun):
        return
    try:
        run_history.add(run_history.record_of(job.snapshot()))
    except OSError as error:
        console.detail(f"`tfos history` will not have this run: {error}")


def _has_begun(state: ClusterView) -> bool:
    return any(member.attempt >= 0 for member in state.members.values())
