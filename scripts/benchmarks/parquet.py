"""How fast do Parquet files become dicts of numpy batches, beside pyarrow and petastorm?

Figures: P11, for rows of 784 floats (one list column) and of 39 columns (13 floats, 26 integers).
Method: files that the page cache holds, snappy, row groups of 64 MiB or less, read into batches of
    512 by one consumer. The reference is `ParquetFile.iter_batches` of the same batch size and each
    column as numpy without a copy; both use pyarrow's threads. They take turns.
    With --petastorm PYTHON (an interpreter that has petastorm, which wants pyarrow 14):
    its make_batch_reader with one thread, reading the same files in turns.
Caveats: iter_batches alone is faster with batches of thousands of rows, and ours decodes so many
    and cuts them; batches of 10,000 are measured too.
Bar: at least 0.8 of pyarrow; 1.0 of petastorm's reader.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from feeding.columnar.batch import Batch
from feeding.formats.parquet.source import ParquetSource
from feeding.reading.reader import DirectReader
from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report, timed
from scripts.benchmarks.reference import parquet_batches

WIDTH = 784


def wide(num_rows: int) -> pa.Table:
    dice = np.random.default_rng(1)
    ends = np.arange(0, WIDTH * num_rows + 1, WIDTH, dtype=np.int32)
    pixels = pa.ListArray.from_arrays(ends, dice.random(WIDTH * num_rows, np.float32))
    return pa.table({"pixels": pixels, "label": dice.integers(0, 10, num_rows)})


def narrow(num_rows: int) -> pa.Table:
    dice = np.random.default_rng(1)
    floats = {f"i{n}": dice.random(num_rows, np.float32) for n in range(13)}
    return pa.table(floats | {f"c{n}": dice.integers(0, 1 << 20, num_rows) for n in range(26)})


CASES: tuple[tuple[str, Callable[[int], pa.Table], int, int], ...] = (
    ("784 floats", wide, 40_000, 8_000),
    ("39 columns", narrow, 1_000_000, 250_000),
)


def read(path: Path, batch_rows: int) -> int:
    reader = DirectReader(ParquetSource(str(path)), 0, 1)
    rows = 0
    while isinstance(batch := reader.next_batch(batch_rows), Batch):
        rows += batch.num_rows
    return rows


def measure(path: Path, name: str, num_rows: int, batch_rows: int, repeats: int) -> None:
    """Report one kind of rows beside pyarrow."""

    def checked(rows: int) -> None:
        if rows != num_rows:
            raise RuntimeError(f"{path} gave {rows} rows, not {num_rows}")

    def ours() -> None:
        checked(read(path, batch_rows))

    def theirs() -> None:
        checked(parquet_batches.read(str(path), batch_rows))

    ours()
    mine, reference = interleave(
        repeats, lambda: num_rows / timed(ours), lambda: num_rows / timed(theirs)
    )
    figure = Figure("P11", f"Parquet, {name}, batches of {batch_rows}", "rows/s", "higher")
    report(figure, mine, reference, "pyarrow iter_batches", rows=num_rows)


def beside_petastorm(path: Path, name: str, num_rows: int, args: argparse.Namespace) -> None:
    """Report one kind of rows beside petastorm, which runs in an interpreter of its own."""
    program = Path(parquet_batches.__file__).with_name("petastorm_batches.py")

    def theirs() -> float:
        command = [args.petastorm, str(program), str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        rows, seconds = result.stdout.split()
        if int(rows) != num_rows:
            raise RuntimeError(f"petastorm gave {rows} rows, not {num_rows}")
        return num_rows / float(seconds)

    mine, reference = interleave(
        args.repeats, lambda: num_rows / timed(lambda: read(path, 512)), theirs
    )
    figure = Figure("P11", f"Parquet, {name}, beside petastorm", "rows/s", "higher")
    report(figure, mine, reference, "petastorm make_batch_reader", rows=num_rows)


def main() -> None:
    args = parse_arguments(__doc__, 7, {"--petastorm": {"help": "a Python that has it"}})
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory:
        for name, make, count, group_rows in CASES:
            num_rows = count // 100 if args.toy else count
            path = Path(directory) / name.replace(" ", "-")
            pq.write_table(make(num_rows), path, row_group_size=group_rows)
            for batch_rows in (512, 10_000):
                measure(path, name, num_rows, batch_rows, args.repeats)
            if args.petastorm:
                beside_petastorm(path, name, num_rows, args)


if __name__ == "__main__":
    main()
