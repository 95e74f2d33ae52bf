"""How fast are rows of sparse tables looked up and updated, over TCP and alone?

Figures: P06, P07.
Method P06: one client, one server process, loopback TCP. A batch has 65,536 ids drawn by Zipf's law
    (exponent 1.05) from 1,000,000; a step deduplicates them, looks the rows up (dim 16, float32),
    spreads them over the batch, sums the gradients of equal ids and pushes (Adagrad). The reference
    does the same with the same kernels on a table in its own process. Both take turns.
Method P07: rows of 4,000,000 ids, dim 16; 65,536 distinct ones are looked up, then updated by
    Adagrad: what a server does with a request, hashing and the check for NaN included. The
    reference does both with TensorFlow's ResourceGather and ResourceSparseApplyAdagradV2 on a dense
    variable, where an id is its row number. One thread each; CPU seconds of this process.
Caveats: P06 runs both ends on the same two cores. P07's table takes ids of any 64 bits, the
    variable only row numbers below its size.
Bars: P06 at least 0.4 of the process without a network; P07 at least 1.0.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ps.manifest.manifest import Adagrad, Hyper, Manifest, TableSpec
from ps.tables.routing import Router
from ps.tables.table import Table
from tfos.bench.harness import Bench, Figure, interleave, timed
from tfos.bench.reference.tf_rows import TfRows, as_tensor
from tfos.bench.servers import served_for

Array = np.ndarray[Any, Any]

DIM = 16
HYPER = Hyper(0.1)
ZIPF = 1.05
NUM_BATCHES = 8
REPEATS = 15
SPEC = TableSpec(name="rows", dim=DIM, rule=Adagrad())


def zipf_batches(num_ids: int, batch_size: int) -> Iterator[Array]:
    """Batches of ids, the k-th most frequent drawn in proportion to k ** -1.05, again and again.

    Args:
        num_ids: number of ids of the table.
        batch_size: ids of a batch, repetitions included.
    """
    random = np.random.default_rng(0)
    weights = np.arange(1, num_ids + 1) ** -ZIPF
    cumulated = np.cumsum(weights) / weights.sum()
    names = random.permutation(num_ids)
    batches = [
        names[np.searchsorted(cumulated, random.random(batch_size))] for _ in range(NUM_BATCHES)
    ]
    return itertools.cycle(batches)


class InProcess:
    """The client's and the server's kernels, one after the other in this process."""

    def __init__(self) -> None:
        self._table = Table(SPEC, rank=0, num_servers=1)
        self._router = Router(SPEC, 1)

    def step(self, ids: Array, grads: Array) -> None:
        """Deduplicate, look up, spread, sum and update.

        Args:
            ids: [n] int64, may repeat.
            grads: [n, dim] float32.
        """
        routed = self._router.route(ids)
        values = np.empty((routed.unique.size, DIM), np.float32)
        look_up(self._table, routed.unique, values)
        routed.expand(values)
        update(self._table, routed.unique, routed.summed(grads))


def look_up(table: Table, ids: Array, out: Array) -> None:
    """Write the rows of arranged ids to `out`.

    Args:
        table: one server's share.
        ids: [n] int64, arranged by segment.
        out: [n, dim] float32; filled.
    """
    for at, own in enumerate(table.split(ids)):
        table.lookup(at, ids[own], out[own])


def update(table: Table, ids: Array, grads: Array) -> None:
    """Update the rows of arranged, distinct ids.

    Args:
        table: one server's share.
        ids: [n] int64, arranged by segment, distinct.
        grads: [n, dim] float32.
    """
    for at, own in enumerate(table.split(ids)):
        with table.segments[at].lock:
            table.push(at, ids[own], grads[own], HYPER)


def over_tcp(bench: Bench, num_ids: int, batch_size: int, steps: int) -> None:
    """P06.

    Args:
        bench: takes the figures.
        num_ids: number of ids of the table.
        batch_size: ids of a batch.
        steps: batches of a measurement.
    """
    grads = np.full((batch_size, DIM), 1e-3, np.float32)
    local = InProcess()
    ours, reference = zipf_batches(num_ids, batch_size), zipf_batches(num_ids, batch_size)

    def repeat(step: Callable[[Array, Array], object], batches: Iterator[Array]) -> float:
        taken = list(itertools.islice(batches, steps))
        return timed(lambda: [step(ids, grads) for ids in taken])

    with served_for(bench) as client:
        client.seed(Manifest(groups=(), tables=(SPEC,)), {})

        def over(ids: Array, given: Array) -> None:
            routed = client.tables.route({SPEC.name: ids})
            client.tables.lookup(routed)
            client.tables.push({SPEC.name: (routed[SPEC.name], given)}, hyper=HYPER)

        for _ in range(NUM_BATCHES):  # all rows are there afterwards
            repeat(over, ours), repeat(local.step, reference)
        seconds = interleave(
            bench.repeats(REPEATS),
            lambda: repeat(over, ours),
            lambda: repeat(local.step, reference),
        )
    ours_per_s, reference_per_s = (
        [steps * batch_size / 1e6 / value for value in values] for values in seconds
    )
    figure = Figure("P06", f"{batch_size} Zipf ids: pull + push, TCP", "million ids/s", "higher")
    unique = np.mean([np.unique(next(ours)).size for _ in range(NUM_BATCHES)]) / batch_size
    bench.report(
        figure,
        ours_per_s,
        reference_per_s,
        "same kernels in one process",
        unique_ratio=round(float(unique), 3),
    )


def alone(bench: Bench, num_rows: int, batch_size: int) -> None:
    """P07.

    Args:
        bench: takes the figures.
        num_rows: number of rows of the table.
        batch_size: ids of a batch.
    """
    random = np.random.default_rng(0)
    table, router = Table(SPEC, rank=0, num_servers=1), Router(SPEC, 1)
    grads = np.full((batch_size, DIM), 1e-3, np.float32)
    for start in range(0, num_rows, batch_size):
        ids = router.route(np.arange(start, min(num_rows, start + batch_size))).unique
        update(table, ids, grads[: ids.size])
    dense, dense_grads = TfRows(num_rows, DIM), as_tensor(grads)
    numbers = [random.choice(num_rows, batch_size, replace=False) for _ in range(NUM_BATCHES)]
    batches = itertools.cycle([router.route(ids).unique for ids in numbers])
    tensors = itertools.cycle([as_tensor(ids) for ids in numbers])
    out = np.empty((batch_size, DIM), np.float32)

    def ours() -> float:
        ids = next(batches)
        started_s = time.process_time()
        look_up(table, ids, out)
        update(table, ids, grads)
        return time.process_time() - started_s

    def reference() -> float:
        ids = next(tensors)
        started_s = time.process_time()
        dense.gather(ids)
        dense.update(ids, dense_grads)
        return time.process_time() - started_s

    for _ in range(2):
        ours(), reference()
    seconds = interleave(bench.repeats(REPEATS), ours, reference)
    ours_per_s, reference_per_s = (
        [batch_size / 1e6 / value for value in values] for values in seconds
    )
    figure = Figure("P07", "gather + sparse Adagrad, one thread", "million rows/s", "higher")
    bench.report(
        figure,
        ours_per_s,
        reference_per_s,
        "TF gather + ResourceSparseApplyAdagradV2",
        rows=num_rows,
    )


def run(bench: Bench) -> None:
    """Measure P06 and P07; of given servers P06 alone."""
    if bench.toy:
        over_tcp(bench, num_ids=5000, batch_size=1024, steps=1)
    else:
        over_tcp(bench, num_ids=1_000_000, batch_size=65_536, steps=4)
    if bench.given_servers is None:
        num_rows, batch_size = (5000, 512) if bench.toy else (4_000_000, 65_536)
        alone(bench, num_rows, batch_size)
