"""The command `stats` of `python -m ps` and `tfos`: what running servers have counted.

Covers: which servers, one line or table per server for people, JSON for programs.
Does not: count (ps.stats.counters) or serve a page (ps.stats.prometheus).
Runs in: the main thread of its own process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import msgspec

from ps.cli.addresses import endpoint_of
from ps.cli.credentials import add_credentials, credentials_of
from ps.cli.printed import line
from ps.client.client import PSClient
from ps.stats.server_stats import ServerStats, TableStats
from rpc.auth.handshake import Identity, Role

TIMEOUT_S = 10.0
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("addresses", nargs="+", metavar="HOST:PORT", help="In the order of ranks.")
    add_credentials(parser)
    parser.add_argument("--json", action="store_true", help="JSON, for programs.")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Ask the servers and print; returns the exit status."""
    client = PSClient(
        [endpoint_of(address) for address in options.addresses],
        credentials_of(options),
        Identity(Role.DRIVER, 0),
        num_workers=1,  # only asks, so the servers' number does not matter
        timeout_s=TIMEOUT_S,
        reconnect_s=TIMEOUT_S / 2,
    )
    with client:
        servers = client.stats()
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(servers)).decode() + "\n")
    else:
        for server in servers:
            sys.stdout.writelines(map(line, lines(server)))
    return 0


def lines(server: ServerStats) -> Iterator[str]:
    """Describe one server."""
    pushes = sum(worker.pushes for worker in server.workers)
    yield (
        f"ps:{server.server} {server.phase}: clock {server.clock}, up {server.uptime_s:.0f} s, "
        f"{server.connections} connections, {server.in_service} requests in service, "
        f"{server.waiting} pushes waiting, {server.rss_bytes / _MIB:.0f} MiB"
    )
    yield (
        f"  {server.calls} requests, {server.errors} errors, {server.bytes_in:,} bytes in, "
        f"{server.bytes_out:,} bytes out"
    )
    yield (
        f"  staleness of {pushes} pushes: mean {server.mean_staleness:.1f}, "
        f"p99 {server.staleness_quantile(0.99):.1f} updates"
    )
    if server.missing or server.waiting_lookups:
        late = ", ".join(map(str, server.missing)) or "nobody"
        yield f"  waiting for worker {late}; {server.waiting_lookups} lookups wait for a permit"
    for each in server.open_rendezvous:
        yield f"  {each}"
    for name, latency in (*server.requests.items(), ("(update kernels)", server.apply)):
        if latency.count:
            yield f"  {name:<16} {latency.count:>10} times, {latency}"
    for worker in server.workers:
        yield (
            f"  worker {worker.worker}: {worker.pushes} pushes, {worker.rows} rows, "
            f"{worker.null_pushes} null, {worker.table_pushes} to tables, {worker.repeated} "
            f"repeated, {worker.refused} refused, waited {worker.waited_s:.1f} s"
        )
    for table in server.tables:
        yield from _table_lines(table)


def _table_lines(table: TableStats) -> Iterator[str]:
    limit = "" if table.max_rows is None else f" of at most {table.max_rows:,}"
    yield (
        f"  table {table.name}: {table.rows:,} rows{limit}, "
        f"{table.memory_bytes / _MIB:.1f} MiB, {table.looked_up:,} ids looked up, "
        f"{table.miss_ratio:.1%} missed, {table.unique_id_ratio:.1%} of ids unique"
    )
    yield (
        f"    {table.added:,} rows created, {table.evicted:,} evicted, {table.dropped:,} gradients "
        "of ids not admitted"
    )
    if num_pushes := sum(table.staleness):
        yield (
            f"    staleness of the rows of {num_pushes:,} pushes: mean {table.mean_staleness:.1f}, "
            f"p99 {table.staleness_quantile(0.99):.1f} updates of the table"
        )
