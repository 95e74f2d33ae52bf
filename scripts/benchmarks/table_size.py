"""How fast are the rows of a large table, beside those of a small one?

Figures: P24, P24c, P24n, P24f, P24d, P24r.
Method: one server process, loopback TCP, one client; two tables of dim 16 with Adagrad, of 50 and
    of 1 million rows, made by pushes of 65,536 new ids, which are spread over 63 bits. P24: steps
    of 12,500 ids drawn evenly from all rows, each routed once, looked up and pushed; groups of
    steps on either table in turn; wall time. P24c: processor time of the server for the lookup
    alone. P24n: processor time of the server while rows are made; the reference is the bar.
    Floors, in P24c's and P24n's lines: a bare loop copies random rows, ids and slots out of arrays
    as large as the tables', in this process (`floor_ms` of both sides and their ratio); the time in
    which the system hands out 2 MiB that nobody used before, and that somebody gave back just now
    (`first_use_ms`, `second_use_ms`). The floor's memory is given back while rows are made, so P24n
    is about the server and not about how a host backs memory. P24f, P24d, P24r: a full save of both
    tables, a delta after 20 pushes of 6,500 ids to the large one, and the restore of both by a new
    server; seconds, with bytes and processor time of the server.
Caveats: both tables are in one process. Even draws are the worst case: real ids repeat, and hot
    rows stay in the processor's cache. Needs 10 GB of memory, 8.5 of disk; `--rows N` makes the
    large table smaller.
Bars: P24 at least 0.7, P24c at most 1.5, P24n at least 3 million rows/s.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from ps.client.client import PSClient
from ps.client.saving.saver import SaveOptions
from ps.manifest.manifest import Adagrad, Hyper, Manifest, TableSpec
from scripts.benchmarks.floor_of_memory import MemoryFloor
from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report, timed
from tfos.bench.servers import server_group

Array = np.ndarray[Any, Any]

DIM = 16
HYPER = Hyper(0.1)
LARGE, SMALL = "large", "small"
MANIFEST = Manifest(
    groups=(),
    tables=tuple(TableSpec(name=name, dim=DIM, rule=Adagrad()) for name in (LARGE, SMALL)),
)
NUM_LARGE, NUM_SMALL = 50_000_000, 1_000_000
NEW_AT_ONCE = 1 << 16
ROW_BYTES = 170
"""Bytes of a row with its id, its version and the index while that grows."""
GIVEN_BEFORE_BYTES = 128 << 20
"""Memory that is given back ahead of its use: arrays grow by half."""
NUM_IDS = 12_500
NUM_DELTA_IDS, DELTA_PUSHES = 6_500, 20
STEPS = 10
REPEATS = 15
CREATED_PER_S = 3.0
"""The bar of P24n: million rows per second of processor time."""
OPTIONS = SaveOptions(full_every=1000)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_PROCESS_CLOCK = 2
"""CPUCLOCK_SCHED of Linux."""


class _Size(NamedTuple):
    """How much is measured."""

    rows: dict[str, int]
    ids: int
    steps: int


def ids_of(numbers: Array) -> Array:
    """Return one id of 63 bits for each number, [n] int64."""
    return ((numbers.astype(np.uint64) * _SPREAD) >> np.uint64(1)).view(np.int64)


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far, that of threads that have ended too.

    To the nanosecond, where psutil counts in ticks. The clock's number is that of Linux'
    clock_getcpuclockid(3), which Python has for threads alone.
    """
    return time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)


def _create(client: PSClient, pid: int, size: _Size, floor: MemoryFloor) -> None:
    """Measure P24n."""
    grads = np.full((NEW_AT_ONCE, DIM), 1e-3, np.float32)
    for name, num_rows in reversed(size.rows.items()):
        before_s = cpu_s(pid)
        floor.give_back(min(GIVEN_BEFORE_BYTES, num_rows * ROW_BYTES))
        for start in range(0, num_rows, NEW_AT_ONCE):
            floor.give_back(min(NEW_AT_ONCE, num_rows) * ROW_BYTES)
            ids = ids_of(np.arange(start, min(num_rows, start + NEW_AT_ONCE)))
            client.tables.push({name: (ids, grads[: ids.size])}, hyper=HYPER)
        per_s = num_rows / 1e6 / (cpu_s(pid) - before_s)
        figure = Figure("P24n", f"making {num_rows:,} rows", "million rows/s of CPU", "higher")
        resident_mb = round(psutil.Process(pid).memory_info().rss / 1e6)
        uses_ms = {"first_use_ms": floor.first_use_ms, "second_use_ms": floor.second_use_ms}
        report(figure, [per_s], [CREATED_PER_S], "the bar", server_mb=resident_mb, **uses_ms)


def _compare(client: PSClient, pid: int, size: _Size, repeats: int, floors_ms: list[float]) -> None:
    """Measure P24 and P24c."""
    grads = np.full((size.ids, DIM), 1e-3, np.float32)
    random = np.random.default_rng(0)

    def batches(name: str) -> Iterator[Array]:
        for _ in range(size.steps):
            yield ids_of(random.integers(0, size.rows[name], size.ids))

    def steps(name: str) -> float:
        given = list(batches(name))

        def work() -> None:
            for ids in given:
                routed = client.tables.route({name: ids})
                client.tables.lookup(routed)
                client.tables.push({name: (routed[name], grads)}, hyper=HYPER)

        return len(given) * size.ids / 1e6 / timed(work)

    def lookups(name: str) -> float:
        routed = [client.tables.route({name: ids}) for ids in batches(name)]
        before_s = cpu_s(pid)
        for ids in routed:
            client.tables.lookup(ids)
        return (cpu_s(pid) - before_s) * 1e3 / len(routed)

    measures = [partial(measure, name) for measure in (steps, lookups) for name in size.rows]
    interleave(1, *measures)  # connections and memory are there afterwards
    ours, reference, ours_ms, reference_ms = interleave(repeats, *measures)
    what, than = (f"{size.rows[name]:,} rows" for name in (LARGE, SMALL))
    figure = Figure("P24", f"lookup + push of {size.ids} ids, {what}", "million ids/s", "higher")
    report(figure, ours, reference, than)
    figure = Figure("P24c", f"lookup of {size.ids} ids, {what}", "ms of server CPU", "lower")
    ratio = round(floors_ms[0] / floors_ms[1], 3)
    report(figure, ours_ms, reference_ms, than, floor_ms=floors_ms, floor_ratio=ratio)


def _save(client: PSClient, pid: int, size: _Size, root: Path) -> None:
    """Measure P24f and P24d."""
    random = np.random.default_rng(1)
    num_ids = min(NUM_DELTA_IDS, size.ids)
    grads = np.full((num_ids, DIM), 1e-3, np.float32)
    rows = f"{sum(size.rows.values()):,} rows"
    _report_save(client, pid, ("P24f", f"full save of {rows}", root, 0))
    for _ in range(DELTA_PUSHES):
        ids = ids_of(random.integers(0, size.rows[LARGE], num_ids))
        client.tables.push({LARGE: (ids, grads)}, hyper=HYPER)
    what = f"delta after {DELTA_PUSHES} pushes of {num_ids} ids"
    _report_save(client, pid, ("P24d", f"{what}, {rows}", root, 1))


def _report_save(client: PSClient, pid: int, save: tuple[str, str, Path, int]) -> None:
    id_, name, root, step = save
    before_s = cpu_s(pid)
    seconds = timed(partial(client.save, root, step, options=OPTIONS))
    taken_s = cpu_s(pid) - before_s
    files = (root / f"step-{step}").iterdir()
    nbytes = sum(path.stat().st_size for path in files)
    report(Figure(id_, name, "s", "lower"), [seconds], bytes=nbytes, cpu_s=round(taken_s, 3))


def _restore(root: Path, size: _Size) -> None:
    """Measure P24r: to the end of the restore, the start of the process included."""
    begun_s = time.perf_counter()
    with server_group(arguments=["--restore", str(root)]) as group, group.client() as client:
        client.attach()  # the server listens before it has restored, and answers this after it
        seconds = time.perf_counter() - begun_s
        taken_s = cpu_s(group.pids[0])
    name = f"start and restore of {sum(size.rows.values()):,} rows"
    report(Figure("P24r", name, "s", "lower"), [seconds], cpu_s=round(taken_s, 3))


def main() -> None:
    """Print the figures."""
    args = parse_arguments(__doc__, REPEATS, {"--rows": {"type": int, "default": NUM_LARGE}})
    size = _Size({LARGE: args.rows, SMALL: NUM_SMALL}, NUM_IDS, STEPS)
    if args.toy:
        size = _Size({LARGE: 3000, SMALL: 1000}, 200, 1)
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory:
        nbytes = sum(2 * rows * ROW_BYTES for rows in size.rows.values())
        nbytes = min(nbytes, nbytes // 2 + 2 * GIVEN_BEFORE_BYTES)
        floor = MemoryFloor(max(size.rows.values()), DIM, nbytes)
        floors_ms = floor.lookups_ms(list(size.rows.values()), size.ids)
        with server_group() as group, group.client() as client:
            client.seed(MANIFEST, {})
            _create(client, group.pids[0], size, floor)
            floor.close()
            _compare(client, group.pids[0], size, args.repeats, floors_ms)
            _save(client, group.pids[0], size, Path(directory))
        _restore(Path(directory), size)


if __name__ == "__main__":
    main()
