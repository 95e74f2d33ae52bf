"""What does a training step's traffic with tables cost: three requests, or one push with rows?

Figures: ROWS (explains decision 026; has no bar of its own).
Method: one server as a process of its own, one worker, loopback TCP. A step has a dense gradient of
    1 M float32 (Adam), row gradients of 6,500 distinct ids of dim 16 (Adagrad, row-wise), and the
    rows of the next 6,500, each drawn from 65,000. "Three" is push_pull, tables.push and
    lookup_into; "one" is push_pull(table_grads, next_rows). Both ways take turns; ids are routed
    and gradients summed beforehand. The median of single steps, and the processor time of client
    and server per step.
Caveats: on one host three round trips cost no network latency; between hosts each adds its own.
Last result: docs/decisions/026-rows-inside-a-push.md.

    python -m scripts.benchmarks.row_exchange [--toy]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from ps.client.client import PSClient
from ps.manifest.manifest import Adam, GroupSpec, Hyper, Manifest, ParamSpec
from ps.manifest.rule_spec import RowWiseAdagrad
from ps.manifest.table_spec import TableSpec
from scripts.benchmarks.harness import Figure, parse_arguments, report
from tfos.bench.servers import server_group

NUM_ELEMENTS, NUM_IDS, DIM = 1_000_000, 6_500, 16
NUM_BATCHES = 8
HYPER = Hyper(1e-3)
Step = Callable[[int], object]


def manifest(consistency: Any, num_elements: int) -> Manifest:
    """One dense group and one table."""
    dense = GroupSpec("dense", "float32", Adam(), (ParamSpec("w", (num_elements,)),))
    table = TableSpec(name="ids", dim=DIM, rule=RowWiseAdagrad())
    return Manifest(groups=(dense,), tables=(table,), consistency=consistency)


def steps_of(client: PSClient, num_elements: int, num_ids: int) -> dict[str, Step]:
    """Return both ways to make a step, by name."""
    values = {"dense": np.zeros(num_elements, np.float32)}
    grads = {"dense": np.full(num_elements, 1e-3, np.float32)}
    random = np.random.default_rng(0)
    batches = []
    for _ in range(NUM_BATCHES):
        ids = random.choice(10 * num_ids, num_ids, replace=False)
        routed = client.tables.route({"ids": ids})["ids"]
        rows = np.zeros((ids.size, DIM), np.float32)
        batches.append((routed, rows, np.full_like(rows, 1e-3)))

    def three(step: int) -> None:
        ids, _, row_grads = batches[step % NUM_BATCHES]
        following, rows, _ = batches[(step + 1) % NUM_BATCHES]
        client.push_pull(grads, values, hyper=HYPER, rows=1)
        client.tables.push({"ids": (ids.unique, row_grads)}, hyper=HYPER)
        client.tables.lookup_into({"ids": (following, rows)}, training=True)

    def one(step: int) -> None:
        ids, _, row_grads = batches[step % NUM_BATCHES]
        following, rows, _ = batches[(step + 1) % NUM_BATCHES]
        client.push_pull(
            grads,
            values,
            hyper=HYPER,
            rows=1,
            table_grads={"ids": (ids, row_grads)},
            next_rows={"ids": (following, rows)},
        )

    return {"three requests": three, "one push with rows": one}


def timed(step: Step, server: psutil.Process, num_steps: int) -> tuple[float, float, float]:
    """Return the median seconds of a step, and processor seconds of client and server per step."""
    before, own = sum(server.cpu_times()[:2]), time.process_time()
    seconds = []
    for number in range(num_steps):
        begun_s = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - begun_s)
    client_s, server_s = time.process_time() - own, sum(server.cpu_times()[:2]) - before
    return statistics.median(seconds), client_s / num_steps, server_s / num_steps


def main() -> None:
    """Print the figures."""
    args = parse_arguments(__doc__, repeats=5)
    scale, num_steps = (100, 3) if args.toy else (1, 300)
    for consistency in ("async", "sync"):
        with server_group() as group, group.client() as client:
            server = psutil.Process(group.pids[0])
            size = NUM_ELEMENTS // scale
            shape = manifest(consistency, size)
            client.seed(shape, {"dense": np.zeros(size, np.float32)})
            steps = steps_of(client, size, NUM_IDS // scale)
            for step in steps.values():
                timed(step, server, NUM_BATCHES)
            runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
            for _ in range(args.repeats):
                for name, step in steps.items():
                    runs[name].append(timed(step, server, num_steps))
        for name, found in runs.items():
            median, client_s, server_s = (
                [1e6 * seconds for seconds in column] for column in zip(*found, strict=True)
            )
            report(
                Figure("ROWS", f"{name}, {consistency}", "us", "lower"),
                median,
                client_processor_us=round(statistics.median(client_s)),
                server_processor_us=round(statistics.median(server_s)),
            )


if __name__ == "__main__":
    main()
