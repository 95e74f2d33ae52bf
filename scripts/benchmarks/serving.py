"""How fast are batches of rows looked up in an index that serves, beside TensorFlow's table?

Figures: P25, the median, and P25p99, the 99th percentile, of the time of one lookup of 256 x 26
    ids out of 10 million rows of 16 floats.
Method: ids are random 62-bit numbers, all of them known. The index is on the local disk and in the
    page cache. The reference is tf.lookup.StaticHashTable with tf.gather inside a tf.function, one
    intra-op thread; its answer is read as numpy. Batches are new each time; 200 lookups of one
    side are a repeat, and the sides take turns.
Caveats: with less than 10 million rows the caches of the processor hold most.
Bar: at most 1.0 of the reference in both.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ps.manifest.rule_spec import Adagrad
from ps.manifest.table_spec import TableSpec
from ps.sorted_rows.sorter import RowSorter
from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report, timed
from scripts.benchmarks.reference import static_table
from tfos.serving import load
from tfos.serving.export_format import exported_table
from tfos.serving.export_writer import ExportWriter

Array = np.ndarray[Any, Any]

NUM_ROWS = 10_000_000
TOY_ROWS = 10_000
DIM = 16
SHAPE = (256, 26)
LOOKUPS = 200


def write(path: Path, ids: Array, rows: Array) -> None:
    spec = TableSpec(name="id", dim=DIM, rule=Adagrad())
    with (
        RowSorter(DIM, "float32", path.parent, is_newest_first=True) as sorter,
        ExportWriter(str(path)) as writer,
    ):
        for start in range(0, ids.size, 1 << 17):
            sorter.add(ids[start : start + (1 << 17)], rows[start : start + (1 << 17)])
        writer.add_table(exported_table(spec), sorter.batches())
        writer.commit(state="benchmark", source="a benchmark")


def percentiles(lookup: Callable[[Array], Array], ids: Array, count: int) -> tuple[float, float]:
    """Return the median and the 99th percentile of lookups, in milliseconds."""
    dice = np.random.default_rng()
    times_s = []
    for _ in range(count):
        wanted = ids[dice.integers(0, ids.size, SHAPE)]
        times_s.append(timed(partial(lookup, wanted)))
    median, last = np.percentile(times_s, (50, 99))
    return 1e3 * float(median), 1e3 * float(last)


def main() -> None:
    args = parse_arguments(__doc__, repeats=9)
    count, lookups = (TOY_ROWS, 5) if args.toy else (NUM_ROWS, LOOKUPS)
    dice = np.random.default_rng(1)
    ids = np.unique(dice.integers(0, 1 << 62, count))
    rows = dice.random((ids.size, DIM), np.float32)
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory:
        write(Path(directory) / "export", ids, rows)
        served = load(Path(directory) / "export", Path(directory) / "cache", progress=False)
        reference = static_table.lookup_of(ids, rows)

        def ours(wanted: Array) -> Array:
            return served.lookup("id", wanted)

        wanted = ids[dice.integers(0, ids.size, SHAPE)]
        if (ours(wanted) != reference(wanted)).any():
            raise RuntimeError("the index and the reference differ")
        times: dict[str, list[tuple[float, float]]] = {"ours": [], "reference": []}

        def measure(side: str, lookup: Callable[[Array], Array]) -> Callable[[], float]:
            def run() -> float:
                times[side].append(percentiles(lookup, ids, lookups))
                return 0.0

            return run

        interleave(args.repeats, measure("ours", ours), measure("reference", reference))
    for at, (name, text) in enumerate((("P25", "median"), ("P25p99", "99th percentile"))):
        figure = Figure(name, f"256 x 26 ids of {ids.size} rows, {text}", "ms", "lower")
        mine, theirs = ([each[at] for each in times[side]] for side in ("ours", "reference"))
        report(figure, mine, theirs, "StaticHashTable + gather", rows=ids.size)


if __name__ == "__main__":
    main()
