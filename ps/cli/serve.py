"""The command line of a hand-started parameter server: `python -m ps.server`.

Covers: arguments, the secret's file, the line that shows where it listens, ending on a signal.
Does not: what a node of a Spark cluster does (tfos.node.ps_process).
Runs in: the main thread of its own process.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import itertools
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence

from ps.checkpoint.choice import RestoreOptions
from ps.checkpoint.fencing import GenerationFence
from ps.checkpoint.storage import storage_at
from ps.cli.credentials import add_credentials, credentials_of, metrics_token
from ps.cli.self_saving import SelfSaving, refuse_foreign
from ps.client.saving.periodic_saver import Period
from ps.client.saving.saver import SaveOptions
from ps.collector import StartFreeze
from ps.config import ServerSettings
from ps.errors import PSSettingsError
from ps.protocol.permissions import ServerPhase
from ps.server.loss_report import LossReport
from ps.server.server import PSServer
from ps.stats.prometheus import CONTENT_TYPE, Page, server_metrics
from rpc.auth.handshake import Credentials
from rpc.auth.process_memory import forbid_core_dumps
from rpc.errors import TFOSError
from rpc.http_page import HttpPage

REPLACED_STATUS = 3
"""The exit status of a server that another process has replaced."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_S = 0.2
_LOOKS_PER_COUNT = 5
"""Reading all counters takes as long as a small push, so it is not done at every look."""
_KEEP = 3
"""Newest checkpoints."""
FULL_EVERY = 10
"""One in this many saves that servers make themselves holds everything."""
_NEEDS = {
    "step": "restore",
    "strict": "restore",
    "save_keep": "save_every",
    "metrics_host": "metrics_port",
    "metrics_token_file": "metrics_port",
}
"""Options that another one makes use of."""

_logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM, SIGINT or a stop request; returns the exit status."""
    options = _parser().parse_args(arguments)
    forbid_core_dumps()  # which would hold the secret
    logging.basicConfig(level=options.log_level, format="%(asctime)s %(name)s %(message)s")
    try:
        return _serve(options)
    except (TFOSError, OSError) as error:
        sys.stderr.write(f"ps.server: {error}\n")
        return 2


def _refuse_unread(options: argparse.Namespace) -> None:
    """Refuse an option that nothing reads without another one."""
    values = vars(options).items()
    given = {name for name, value in values if value not in (None, "") and value is not False}
    for name, other in _NEEDS.items():
        if name in given and other not in given:
            alone, missing = (f"--{each.replace('_', '-')}" for each in (name, other))
            raise PSSettingsError(f"{alone} without {missing}: give both, or leave {alone} out")


def _serve(options: argparse.Namespace) -> int:
    _refuse_unread(options)
    credentials = credentials_of(options)
    token = metrics_token(options.metrics_token_file)
    settings = ServerSettings(
        rank=options.rank,
        num_servers=options.num_servers,
        num_workers=options.num_workers,
        on_lost=options.on_lost,
    )
    with _signals_caught() as caught:  # before any thread of ours, which inherits what is blocked
        return _serve_until_told(options, settings, credentials, token, caught)


def _serve_until_told(
    options: argparse.Namespace,
    settings: ServerSettings,
    credentials: Credentials,
    token: str,
    caught: Sequence[int],
) -> int:
    guard = _guard(options)
    saves = _self_saving(options, settings, credentials, guard)
    with PSServer(settings, credentials, guard=guard) as server:
        server.bind_tcp(options.host, options.port)
        if options.unix:
            server.bind_unix()
        page = _metrics_page(server, options, token)
        with contextlib.closing(page) if page else contextlib.nullcontext():
            metrics_host = options.metrics_host or "127.0.0.1"
            metrics_port = page.start(metrics_host, options.metrics_port) if page else 0
            step = _start(server, options, metrics_port, caught)
            if step is not None:
                _serve_filled(server, saves, step, caught)
        # No look after a signal during the restore: the directory may be slow to answer.
        is_watching = step is not None or server.wait_stopped(0.0)
        replaced = server.look_for_successor() if is_watching else ""
    if replaced:
        sys.stderr.write(f"ps.server: {replaced}\n")
    status = REPLACED_STATUS if replaced else 0
    if step is None:  # the thread that restores must not run while the interpreter shuts down
        atexit._run_exitfuncs()
        os._exit(status)
    return status


def _serve_filled(
    server: PSServer, saves: SelfSaving | None, step: int, caught: Sequence[int]
) -> None:
    """Serve until told to end; save all servers meanwhile, if this process does so."""
    if saves is not None:
        saves.start(saved_step=step)
    try:
        _wait_for_end(server, caught)
    finally:
        if saves is not None:
            is_ours = server.phase is ServerPhase.SERVING and not server.look_for_successor()
            saves.close(last=is_ours)


def _start(
    server: PSServer, options: argparse.Namespace, metrics_port: int, caught: Sequence[int]
) -> int | None:
    """Listen, and say where.

    Returns:
        The step of the checkpoint that it was filled from; -1: it begins without one. None: it was
        told to end while it restored.
    """

    def announce() -> None:
        _announce(server, metrics_port)

    if not options.restore:
        server.start()
        announce()
        return -1
    like = RestoreOptions(strict=options.strict)
    step = server.restore_beside(
        lambda: server.start_restoring(
            options.restore, step=options.step, like=like, listening=announce
        ),
        lambda: _is_signalled(caught),
    )
    if step is not None:
        age_s = server.stats().lost_s
        resumes = "%s resumes from step %d of %s, as it was %.0f s ago"
        _logger.warning(resumes, server, step, options.restore, age_s)
    return step


def _self_saving(
    options: argparse.Namespace,
    settings: ServerSettings,
    credentials: Credentials,
    guard: GenerationFence | None,
) -> SelfSaving | None:
    """Make what saves all servers, if that is wanted and this is the first of them."""
    if options.save_every is None:
        return None
    if not options.save_dir or guard is None:
        raise PSSettingsError(
            f"--save-every {options.save_every:g} needs --save-dir DIR, the same for all servers"
        )
    if not 0 < options.save_every < math.inf:
        raise PSSettingsError(f"--save-every takes seconds above 0, got {options.save_every!r}")
    if settings.rank:
        return None  # ps:0 saves for all of them
    if not options.restore:
        refuse_foreign(options.save_dir)
    keep = _KEEP if options.save_keep is None else options.save_keep
    kept = SaveOptions(keep=keep, full_every=FULL_EVERY)
    period = Period(directory=options.save_dir, every_s=options.save_every, options=kept)
    return SelfSaving(period, settings, credentials, guard)


def _metrics_page(server: PSServer, options: argparse.Namespace, token: str) -> HttpPage | None:
    """Make the page for Prometheus, if one is wanted; it does not listen yet."""
    if options.metrics_port is None:
        return None

    def render() -> bytes:
        return Page(tuple(server_metrics([server.stats()]))).text()

    return HttpPage(render, CONTENT_TYPE, token=token)


def _guard(options: argparse.Namespace) -> GenerationFence | None:
    place = options.save_dir or options.restore
    if not place:
        return None
    return GenerationFence(storage_at(place), options.cluster_id, options.rank)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ps.server",
        allow_abbrev=False,
        description="Serve one shard of the parameters. Prints one JSON line with its endpoint, "
        "then serves until SIGTERM, SIGINT or a stop request.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="Address to bind (default: loopback).")
    parser.add_argument(
        "--port", type=int, default=0, help="TCP port; 0, the default: any free one."
    )
    parser.add_argument("--unix", action="store_true", help="Listen on a Unix socket as well.")
    parser.add_argument("--rank", type=int, default=0, help="Rank of this server, from 0.")
    parser.add_argument(
        "--num-servers", type=int, default=1, help="Servers that share the parameters (default: 1)."
    )
    parser.add_argument("--num-workers", type=int, required=True, help="Workers of the cluster.")
    add_credentials(parser)
    parser.add_argument(
        "--on-lost",
        choices=("fail", "continue"),
        default="fail",
        help="What a lost worker does to a sync barrier (default: fail).",
    )
    parser.add_argument("--restore", metavar="DIR", help="Start from the newest checkpoint there.")
    parser.add_argument("--step", type=int, help="Start from this checkpoint of --restore instead.")
    parser.add_argument(
        "--strict", action="store_true", help="Fail if the newest checkpoint is damaged."
    )
    parser.add_argument(
        "--save-dir",
        metavar="DIR",
        help="Where this cluster saves; a server that is started there later replaces this one.",
    )
    parser.add_argument(
        "--save-every",
        type=float,
        metavar="SECONDS",
        help="Save all servers to --save-dir every so many seconds; all need the same --save-dir.",
    )
    parser.add_argument(
        "--save-keep",
        type=int,
        metavar="N",
        help=f"Newest checkpoints to keep (default: {_KEEP}).",
    )
    _add_metrics(parser)
    parser.add_argument(
        "--log-level",
        type=str.upper,
        choices=("DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL"),
        default="WARNING",
        help="What is written to standard error, and all above it (default: WARNING).",
    )
    return parser


def _add_metrics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="N",
        help="Serve Prometheus metrics on this port; 0: any free one.",
    )
    parser.add_argument(
        "--metrics-host",
        help="Address of that page (default: loopback; any other needs a token).",
    )
    parser.add_argument(
        "--metrics-token-file",
        metavar="FILE",
        help="File of mode 0600 with the token that readers send as `Authorization: Bearer`.",
    )


def _announce(server: PSServer, metrics_port: int) -> None:
    endpoint = server.endpoint
    line = {
        "server": str(server),
        "pid": os.getpid(),
        "host": endpoint.host,
        "port": endpoint.port,
        "unix_path": endpoint.unix_path,
        "boot_id": endpoint.boot_id,
    }
    if metrics_port:
        line["metrics_port"] = metrics_port
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _signals_caught() -> Iterator[list[int]]:
    """Block the signals, which `_wait_for_end` looks for; yields where the others are noted.

    A handler that takes a lock may meet its own thread holding it, so signals stay pending. But a
    thread that a library made when it was imported does not block them: what is delivered to it
    must not end the process, and its handler only notes it.
    """
    caught: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: caught.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    yield caught
    # One that is still pending would reach such a thread once Python has taken its handlers back.
    while signal.sigpending().intersection(_SIGNALS):
        signal.sigtimedwait(_SIGNALS, 0)


def _wait_for_end(server: PSServer, caught: Sequence[int]) -> None:
    """Wait for a signal, a stop request or a successor."""
    losses, freeze = LossReport(), StartFreeze()
    for look in itertools.count(1):
        is_stopped = server.wait_stopped(_POLL_S)
        if is_stopped or _is_signalled(caught) or server.look_for_successor():
            break
        freeze.poll(server.phase)
        if look % _LOOKS_PER_COUNT == 0:
            _warn(losses.poll(server.stats(), time.monotonic()))
    _warn(losses.last(server.stats()))


def _is_signalled(caught: Sequence[int]) -> bool:
    # Not sigtimedwait: suspended beyond its timeout and continued, it returns a signal that nobody
    # has sent (CPython reads a result that the interrupted call has not filled).
    return bool(caught or signal.sigpending().intersection(_SIGNALS))


def _warn(text: str) -> None:
    if text:
        _logger.warning("%s", text)
