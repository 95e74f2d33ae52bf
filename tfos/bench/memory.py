"""How much memory does a parameter server need for what it holds?

Figure: P21.
Method: one server process of its own per size and rule, asynchronous; it is seeded and gets four
    push_pulls by shared memory, as on one host, or, for a table, pushes that make its rows. Then
    its resident memory as the kernel tells it, shared pages included. The reference is what the bar
    allows: 1.35 x parameters x (1 + slots) + 220 MB; a ratio above 1 breaks it. `peak_bytes` is the
    largest it ever was. A server before it, which is not measured, has filled the kernel cache.
Caveats: synchronous training stages up to one gradient per worker beside it. A server that has to
    compile its kernels keeps 20 to 45 MB of the compiler's.
Bar: a ratio of at most 1.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ps.manifest.manifest import SGD, Adagrad, Adam, AMSGrad, Hyper, Manifest, RuleConfig, TableSpec
from ps.optim.rules import rule_of
from tfos.bench.dense import GROUP, HYPER, MIB, manifest
from tfos.bench.harness import Bench, Figure
from tfos.bench.servers import BenchServers, server_group

MB = 1e6
SIZES_MIB = (16, 256)
RULES: tuple[RuleConfig, ...] = (SGD(), Adagrad(), Adam(), AMSGrad())
NUM_ROWS = (100_000, 2_000_000)
DIM = 16
PUSHES = 4
AT_ONCE = 1 << 16
FACTOR = 1.35
BASE_BYTES = 220 * MB
Report = Callable[[BenchServers, RuleConfig, int, str], None]
REFERENCE = "1.35 x parameters x (1 + slots) + 220 MB"


def resident_bytes(pid: int) -> tuple[int, int]:
    """Return a process's resident memory now and its largest so far, as the kernel counts it."""
    fields = {
        line.split()[0]: int(line.split()[1]) * 1024
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        if line.startswith(("VmRSS:", "VmHWM:"))
    }
    return fields["VmRSS:"], fields["VmHWM:"]


def dense(report: Report, rule: RuleConfig, num_bytes: int) -> None:
    """Measure one server that holds `num_bytes` of parameters.

    Args:
        report: takes the figure.
        rule: rule of the parameters.
        num_bytes: size of the parameters, without slots.
    """
    gradient = np.full(num_bytes // 4, 1e-3, np.float32)
    into = np.zeros_like(gradient)
    with server_group(unix=True) as group, group.client() as client:
        client.seed(manifest(rule, gradient.size), {GROUP: into})
        client.attach(timeout_s=60)
        for _ in range(PUSHES):
            client.push_pull({GROUP: gradient}, {GROUP: into}, hyper=HYPER, rows=1)
        what = f"{num_bytes / MIB:g} MiB of parameters"
        report(group, rule, num_bytes, what)


def table(report: Report, rule: RuleConfig, num_rows: int) -> None:
    """Measure one server that holds a table of `num_rows` rows.

    Args:
        report: takes the figure.
        rule: the table's rule.
        num_rows: rows of the table.
    """
    spec = TableSpec(name="rows", dim=DIM, rule=rule)
    with server_group(unix=True) as group, group.client() as client:
        client.seed(Manifest(groups=(), tables=(spec,)), {})
        client.attach(timeout_s=60)
        for start in range(0, num_rows, AT_ONCE):
            ids = np.arange(start, min(start + AT_ONCE, num_rows))
            grads = np.full((ids.size, DIM), 1e-3, np.float32)
            client.tables.push({spec.name: (ids, grads)}, hyper=Hyper(0.1))
        what = f"table of {num_rows:,} rows of {DIM}"
        report(group, rule, num_rows * DIM * 4, what)


def _report(bench: Bench, group: BenchServers, rule: RuleConfig, held: int, what: str) -> None:
    now, peak = resident_bytes(group.pids[0])
    slots = len(rule_of(rule).slot_starts)
    allowed = FACTOR * held * (1 + slots) + BASE_BYTES
    name = f"{what}, {type(rule).__name__}, {slots} slots"
    figure = Figure("P21", f"memory of a server: {name}", "MB", "lower")
    bench.report(
        figure, [now / MB], [allowed / MB], REFERENCE, parameter_bytes=held, peak_bytes=peak
    )


def _leave(*_: object) -> None:
    """Report nothing."""


def run(bench: Bench) -> None:
    """Measure P21."""
    report = functools.partial(_report, bench)
    if bench.toy:
        dense(report, Adam(), MIB)
        table(report, Adagrad(), 1000)
        return
    for rule in RULES:
        dense(_leave, rule, MIB)
        for size in SIZES_MIB:
            dense(report, rule, size * MIB)
    table(_leave, Adagrad(), 1000)
    for num_rows in NUM_ROWS:
        table(report, Adagrad(), num_rows)
