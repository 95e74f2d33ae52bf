"""How much of the slots' time do trainings have, if there are many tiny ones?

Figures: P27.
Method: 2,000 trainings of a logistic regression on 1,000 rows of 20 numbers by gradient descent
    (some 50 ms each) on 2 executors of one core, by `map_train`. Busy is the time in the function,
    of all attempts; the slots' time is their number times the time from the call to the end of the
    last training, so the start of slots and processes counts as idle. `per_item_ms` is the rest per
    training. The reference is one Spark task for each training.
Caveats: slots, driver and Spark share two cores, and a slot that waits for a core counts as busy.
Bar: at least 0.9 of the slots' time.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import time
from typing import Any

from scripts.benchmarks.harness import Figure, parse_arguments, report
from scripts.benchmarks.local_spark import executors

NUM_SLOTS = 2
NUM_ITEMS, TOY_ITEMS = 2000, 20
ROWS, COLUMNS, STEPS = 1000, 20, 1000


def train(seed: int) -> dict[str, float]:
    """Fit one model."""
    import numpy as np

    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, COLUMNS))
    y = (x @ rng.normal(size=COLUMNS) > 0).astype(float)
    weights = np.zeros(COLUMNS)
    for _ in range(STEPS):
        weights -= 0.1 * x.T @ (1 / (1 + np.exp(-x @ weights)) - y) / ROWS
    return {"accuracy": float(((x @ weights > 0) == y).mean())}


def timed_train(seed: int) -> float:
    """Return the seconds of one training."""
    started = time.monotonic()
    train(seed)
    return time.monotonic() - started


def ours(sc: Any, num_items: int) -> tuple[float, float]:
    """Return the busy share, and milliseconds beside each training."""
    import tfos

    started = time.monotonic()
    trainings = tfos.map_train(range(num_items), train, sc=sc, slots=NUM_SLOTS, verbose=False)
    trainings.raise_failed()
    rows = trainings.table()
    busy_s = sum(row.seconds for row in rows)
    idle_s = NUM_SLOTS * (time.monotonic() - started) - busy_s
    return trainings.busy_share, 1000 * idle_s / num_items


def by_tasks(sc: Any, num_items: int) -> float:
    """Return the busy share with one Spark task for each training."""
    started = time.monotonic()
    busy_s = sum(sc.parallelize(range(num_items), num_items).map(timed_train).collect())
    return float(busy_s / (NUM_SLOTS * (time.monotonic() - started)))


def main() -> None:
    args = parse_arguments(__doc__, repeats=3)
    num_items = TOY_ITEMS if args.toy else NUM_ITEMS
    shares, beside, tasks = [], [], []
    with executors(NUM_SLOTS, "map_train") as sc:
        for _ in range(args.repeats):
            share, per_item_ms = ours(sc, num_items)
            shares.append(share)
            beside.append(per_item_ms)
            tasks.append(by_tasks(sc, num_items))
    figure = Figure("P27", f"map_train of {num_items} tiny trainings: busy share", "", "higher")
    report(figure, shares, tasks, "one Spark task each", per_item_ms=round(min(beside), 2))


if __name__ == "__main__":
    main()
