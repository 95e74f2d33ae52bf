"""The command line for running servers: `python -m ps stats HOST:PORT ...`.

Covers: which servers, one line or table per server for people, JSON for programs.
Does not: count (ps.stats.counters) or serve a page (ps.stats.prometheus).
Runs in: the main thread of its own process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import msgspec

from ps.cli.credentials import add_credentials, credentials_of
from ps.client.client import PSClient
from ps.errors import PSSettingsError
from ps.stats.server_stats import ServerStats
from rpc.auth.handshake import Identity, Role
from rpc.endpoint import Endpoint

TIMEOUT_S = 10.0
_MIB = 1 << 20


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `stats`."""
    parser = commands.add_parser("stats", help="print what running servers have counted")
    parser.add_argument("addresses", nargs="+", metavar="HOST:PORT", help="in order of rank")
    add_credentials(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> int:
    """Ask the servers and print; returns the exit status."""
    client = PSClient(
        [_endpoint(address) for address in options.addresses],
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
            sys.stdout.writelines(f"{line}\n" for line in lines(server))
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
        yield (
            f"  table {table.name}: {table.rows} rows, {table.memory_bytes / _MIB:.1f} MiB, "
            f"{table.miss_ratio:.1%} missed, {table.unique_id_ratio:.1%} of ids unique"
        )


def _endpoint(address: str) -> Endpoint:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise PSSettingsError(f"{address!r} is no HOST:PORT, e.g. 127.0.0.1:40001")
    return Endpoint(host.strip("[]"), int(port))
