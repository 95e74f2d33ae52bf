#!/usr/bin/env python
"""What the order of rows costs: AUC of a small model on a table that is sorted by month.

    scripts/sorted_data.py [--rows 120000] [--seeds 5]

Writes a table of 24 months twice, as `month=…` directories and as files of mixed rows, and trains a
logistic model on crossed features by plain SGD for one epoch, read as `ctx.read` reads them. Labels
depend on features in a way that changes with the seasons, so that a model trained month by
month ends with the last season's.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from feeding.columnar.batch import Batch
from feeding.formats.parquet.plan import ParquetRequest
from feeding.formats.parquet.source import ParquetSource
from feeding.reading.reader import DirectReader

Array = np.ndarray[Any, np.dtype[Any]]

NUM_FEATURES = 12
MONTHS = 24
BATCH = 64
ORDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "files by month, one after the other, windows of 4,096 rows": (
        "sorted",
        {"shuffle_rows": 4096},
    ),
    "files by month, `shuffled(seed)`": ("sorted", {"shuffle_rows": 65_536, "interleave": 32}),
    "files of mixed rows, `shuffled(seed)`": (
        "mixed",
        {"shuffle_rows": 65_536, "interleave": 32},
    ),
    "files of mixed rows, one after the other, windows of 4,096 rows": (
        "mixed",
        {"shuffle_rows": 4096},
    ),
}


def table_of(num_rows: int, seed: int) -> tuple[Array, Array, Array]:
    """Return months int64[n], features float32[n, NUM_FEATURES] and labels int64[n]."""
    random = np.random.default_rng(seed)
    month = np.sort(random.integers(0, MONTHS, num_rows))
    x = random.normal(size=(num_rows, NUM_FEATURES)).astype(np.float32)
    common = np.random.default_rng(1).normal(size=NUM_FEATURES) * 0.35
    season = np.random.default_rng(2).normal(size=(MONTHS, NUM_FEATURES)) * 0.5
    level = np.random.default_rng(3).normal(size=MONTHS)
    logits = x @ common + (x * season[month]).sum(axis=1) + level[month]
    return month, x, (random.random(num_rows) < 1 / (1 + np.exp(-logits))).astype(np.int64)


def write(root: Path, num_rows: int) -> None:
    """Write the table below `root/sorted/month=…` and as files `root/mixed/…`."""
    month, x, y = table_of(num_rows, 10)
    mixed = np.random.default_rng(4).permutation(num_rows)
    for number in range(MONTHS):
        for name, rows in (
            (f"sorted/month={number}", np.flatnonzero(month == number)),
            (f"mixed/part-{number}", mixed[number::MONTHS]),
        ):
            columns = {f"x{index}": x[rows, index] for index in range(NUM_FEATURES)}
            path = root / name / "rows.parquet"
            path.parent.mkdir(parents=True)
            pq.write_table(pa.table({**columns, "y": y[rows]}), path)


def trained(path: Path, seed: int, mixing: dict[str, Any]) -> Array:
    """Return the weights after one epoch of SGD, float64[NUM_FEATURES + 1]."""
    names = [*(f"x{index}" for index in range(NUM_FEATURES)), "y"]
    source = ParquetSource(str(path), ParquetRequest(columns=names))
    reader = DirectReader(source, 0, 1, seed=seed, **mixing)
    weights = np.zeros(NUM_FEATURES + 1)
    while isinstance(batch := reader.next_batch(BATCH), Batch):
        *features, y = (np.asarray(batch.columns[name]) for name in names)
        x = np.column_stack([*features, np.ones(len(y))])
        weights -= 0.1 * x.T @ (1 / (1 + np.exp(-x @ weights)) - y) / len(y)
    return weights


def auc(weights: Array, num_rows: int) -> float:
    """Return the area under the ROC curve on fresh rows of all months."""
    _, x, y = table_of(num_rows, 11)
    ranks = np.empty(num_rows)
    ranks[np.argsort(x @ weights[:-1])] = np.arange(num_rows)
    positives = int(y.sum())
    above = ranks[y == 1].sum() - positives * (positives - 1) / 2
    return float(above / (positives * (num_rows - positives)))


def main() -> None:
    """Print a table of the orders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=120_000)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        write(Path(root), given.rows)
        for name, (kind, mixing) in ORDERS.items():
            found = [
                auc(trained(Path(root, kind), seed, mixing), given.rows)
                for seed in range(1, given.seeds + 1)
            ]
            print(f"| {name} | {np.mean(found):.4f} ({min(found):.4f}, {max(found):.4f}) |")


if __name__ == "__main__":
    main()
