"""How many Python functions does one push, and one fed partition, go through?

Figures: CALLS and PUSH (explain P05, P17, P28; have no bar of their own).
Method: server and client, or feed task and two workers, are threads of this process, over loopback
    TCP, and a profile hook counts each call of a function of this project: a generator that goes on
    counts too. A push is one `push_pull` of two buckets of 4 KiB with Adam; a feed is one partition
    of one chunk, 256 rows of 784 ints, and one of nine chunks. Of the pushes the median is
    reported, with the files that were entered and how often the trace moved from one file to
    another. Microseconds are measured without the hook, and with the server as a process of its
    own: the median of single pushes, and the processor time of client and server per push.
Caveats: calls of numpy, msgspec and compiled kernels are not counted. Waits that are repeated
    because a byte came late add calls, hence the median.
Last result: docs/architecture/performance-notes.md.

    python -m scripts.benchmarks.calls [--toy] [--list]     --list: each function, to stderr
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np
import psutil

from feeding.columnar.batch import FeedEnd
from feeding.config import FeedConfig
from feeding.receiver.batch_reader import BatchReader
from feeding.receiver.channel import FeedChannel
from feeding.sender.task import FeedTarget, FeedTask
from ps.client.client import PSClient
from ps.manifest.manifest import Adam, GroupSpec, Hyper, Manifest, ParamSpec
from ps.server.server import PSServer, ServerSettings
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.server.listener import Listener
from scripts.benchmarks.harness import ROOT, Figure, parse_arguments, report
from scripts.benchmarks.row_exchange import timed
from tfos.bench.servers import server_group

ROOMS = ("rpc", "ps", "feeding")
GROUP = "trainable"
BUCKET_BYTES = 4096
NUM_BUCKETS = 2
HYPER = Hyper(1e-3)


class Trace:
    """Counts the calls of this project's functions in all threads started after `install`."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, str]] = []
        """Thread, file and function of each, in order."""
        self._on = False
        self._prefixes = tuple(f"{ROOT / room}/" for room in ROOMS)
        self._names: dict[Any, tuple[str, str] | None] = {}

    def install(self) -> None:
        """Hook into this thread and those that are started from now on."""
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def remove(self) -> None:
        """Remove the hook; threads that have it stay cheap."""
        threading.setprofile(None)
        sys.setprofile(None)
        self._on = False

    @contextlib.contextmanager
    def on(self) -> Iterator[list[tuple[int, str, str]]]:
        """Count during the block; gives the calls in order."""
        calls: list[tuple[int, str, str]] = []
        self.calls = calls
        self._on = True
        try:
            yield calls
        finally:
            self._on = False

    def _hook(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._on or event != "call":
            return
        code = frame.f_code
        if code not in self._names:
            path = code.co_filename
            is_ours = path.startswith(self._prefixes)
            name = getattr(code, "co_qualname", code.co_name)
            self._names[code] = (path[len(str(ROOT)) + 1 :], name) if is_ours else None
        known = self._names[code]
        if known is not None:
            self.calls.append((threading.get_ident(), *known))


class Counted:
    """What one trace holds, as numbers."""

    def __init__(self, calls: Sequence[tuple[int, str, str]], thread: int) -> None:
        by_thread: dict[int, list[str]] = {}
        for ident, path, _ in calls:
            by_thread.setdefault(ident, []).append(path)
        self.num_calls = len(calls)
        self.num_here = len(by_thread.get(thread, ()))
        self.num_functions = len({call[1:] for call in calls})
        self.num_files = len({path for _, path, _ in calls})
        self.num_moves = sum(
            one != other for paths in by_thread.values() for one, other in itertools.pairwise(paths)
        )
        self.by_function = collections.Counter((path, name) for _, path, name in calls)


def manifest(consistency: Any) -> Manifest:
    """Two buckets of one group."""
    params = (ParamSpec("w", (NUM_BUCKETS * BUCKET_BYTES // 4,)),)
    return Manifest(
        groups=(GroupSpec(GROUP, "float32", Adam(), params),),
        bucket_bytes=BUCKET_BYTES,
        consistency=consistency,
    )


@contextlib.contextmanager
def pushing(consistency: str, num_servers: int = 1) -> Iterator[Callable[[], object]]:
    """Yield what pushes and pulls once, to servers in this process."""
    credentials = Credentials.generate()
    with contextlib.ExitStack() as running:
        servers: list[PSServer] = []
        for rank in range(num_servers):
            settings = ServerSettings(rank=rank, num_servers=num_servers, num_workers=1)
            servers.append(running.enter_context(PSServer(settings, credentials)))
            servers[-1].bind_tcp("127.0.0.1")
            servers[-1].start()
        endpoints = [server.endpoint for server in servers]
        client = running.enter_context(
            PSClient(endpoints, credentials, Identity(Role.WORKER, 0), num_workers=1)
        )
        yield push_of(client, consistency)


def push_of(client: PSClient, consistency: str) -> Callable[[], object]:
    """Seed the servers and return one push_pull."""
    shape = manifest(consistency)
    values = np.zeros(shape.groups[0].num_elements, np.float32)
    gradient = np.full_like(values, 1e-3)
    client.seed(shape, {GROUP: values})
    grads, into = {GROUP: gradient}, {GROUP: values}
    return lambda: client.push_pull(grads, into, hyper=HYPER, rows=1)


def counted_push(trace: Trace, consistency: str, num_servers: int, repeats: int) -> Counted:
    """Return the trace with the median number of calls."""
    found: list[Counted] = []
    with pushing(consistency, num_servers) as push:
        for _ in range(10):
            push()
        settled = threading.Event()
        for _ in range(repeats):
            settled.wait(0.002)  # the server has counted the push before, and waits for this one
            with trace.on() as calls:
                push()
                settled.wait(0.002)
            found.append(Counted(calls, threading.get_ident()))
    found.sort(key=lambda each: each.num_calls)
    return found[len(found) // 2]


def counted_feed(trace: Trace, num_rows: int) -> tuple[Counted, int]:
    """Feed one partition to two workers; return its trace, and the chunks that were sent."""
    credentials = Credentials.generate()
    rows = [[(row + column) % 251 for column in range(784)] for row in range(num_rows)]
    with contextlib.ExitStack() as running:
        targets, channels = [], []
        for rank in range(2):
            channel = FeedChannel(FeedConfig(), worker=f"worker:{rank}")
            identity = Identity(Role.WORKER, rank)
            listener = Listener(
                channel.handler, credentials, identity, on_disconnect=channel.on_disconnect
            )
            listener.bind_tcp("127.0.0.1")
            listener.start()
            running.callback(listener.close)
            running.callback(channel.close, "the benchmark is over")
            targets.append(FeedTarget(rank, f"worker:{rank}", listener.endpoint))
            channels.append(channel)
        for channel in channels:
            thread = threading.Thread(target=_drop_all, args=(channel,), daemon=True)
            thread.start()
        task = FeedTask(
            targets=tuple(targets), credentials=lambda: credentials, epoch=0, config=FeedConfig()
        )
        for partition in range(2):  # after them, both workers are connected and caches are warm
            list(task(partition, iter(rows)))
        with trace.on() as calls:
            (report,) = task(2, iter(rows))
        if report.rows - report.dropped_rows != len(rows):
            raise RuntimeError(f"fed {len(rows)} rows, the report says {report}")
        for channel in channels:
            channel.finish("input")
    counted = Counted(calls, threading.get_ident())
    return counted, counted.by_function["feeding/sender/worker_link.py", "WorkerLink.put"]


def _drop_all(channel: FeedChannel) -> None:
    reader = BatchReader(channel)
    while not isinstance(reader.next_batch(64), FeedEnd):
        pass


def push_seconds(consistency: str, num_pushes: int) -> tuple[float, float, float]:
    """Return the median of single pushes, and processor seconds per push of client and server."""
    with server_group() as group, group.client() as client:
        push = push_of(client, consistency)
        for _ in range(200):
            push()
        return timed(lambda _: push(), psutil.Process(group.pids[0]), num_pushes)


PUSHES = (("async", 1), ("sync", 1), ("ssp", 1), ("async", 2))
"""Consistency and number of servers."""


def report_calls(name: str, counted: Counted, list_them: bool) -> None:
    """Print what one trace holds as one JSON line, and its functions to stderr if asked."""
    report(
        Figure("CALLS", name, "calls", "lower"),
        [counted.num_calls],
        in_calling_thread=counted.num_here,
        functions=counted.num_functions,
        files=counted.num_files,
        moves=counted.num_moves,
    )
    if list_them:
        print(f"\n{name}", file=sys.stderr)
        for (path, function), count in sorted(counted.by_function.items()):
            print(f"{count:>5}  {path}  {function}", file=sys.stderr)


def main() -> None:
    """Print the figures."""
    listing = {"action": "store_true", "help": "print the functions of each trace"}
    args = parse_arguments(__doc__, 5, {"--list": listing})
    num_traces, num_pushes = (3, 50) if args.toy else (41, 3000)
    trace = Trace()
    trace.install()
    for consistency, num_servers in PUSHES:
        counted = counted_push(trace, consistency, num_servers, num_traces)
        name = f"push_pull of 2 buckets, {consistency}, {num_servers} server(s)"
        report_calls(name, counted, args.list)
    for num_rows in (256, 9 * 256):
        counted, chunks = counted_feed(trace, num_rows)
        report_calls(f"feed of {chunks} chunk(s) of 256 rows, 2 workers", counted, args.list)
    trace.remove()
    for consistency in ("async", "sync"):
        runs = [push_seconds(consistency, num_pushes) for _ in range(args.repeats)]
        median, client, server = (
            [1e6 * each for each in column] for column in zip(*runs, strict=True)
        )
        report(
            Figure("PUSH", f"push_pull of 2 buckets, {consistency}", "us", "lower"),
            median,
            client_processor_us=round(statistics.median(client)),
            server_processor_us=round(statistics.median(server)),
        )


if __name__ == "__main__":
    main()
