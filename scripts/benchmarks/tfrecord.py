"""How fast do TFRecord files become dicts of numpy batches, beside tf.data and parse_example?

Figures: P10, for records of 784 floats and of 39 columns (13 floats, 26 integers).
Method: files of tf.Example that the page cache holds, read into batches of 512 by one thread, CRCs
    checked, values copied out. The reference is TFRecordDataset, batch, parse_example (its fastest
    form: sequential, batched before it is parsed), with one thread for its operators and one for
    tf.data. Both take turns.
Caveats: tf.data's own thread and Python's take turns on one core or overlap on two; the pipeline of
    the reference is as users write it, with prefetch.
Bar: at least 1.0.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from feeding.columnar.batch import Batch
from feeding.formats.tfrecord.example import Feature
from feeding.formats.tfrecord.framing import RecordWriter
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.formats.tfrecord.source import TFRecordSource
from feeding.reading.reader import DirectReader
from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report, timed
from scripts.benchmarks.reference import tf_records
from tfos.bench.reference import tensorflow_apply

BATCH_ROWS = 512
WIDE = {"pixels": Feature("float32", (784,)), "label": Feature("int64")}
NARROW = {f"i{n}": Feature("float32") for n in range(13)} | {
    f"c{n}": Feature("int64") for n in range(26)
}

CASES = (("784 floats", WIDE, 60_000), ("39 columns", NARROW, 150_000))


def row(columns: dict[str, Feature], dice: np.random.Generator) -> dict[str, Any]:
    return {
        name: dice.random(feature.shape, np.float32)
        if feature.dtype == "float32"
        else dice.integers(0, 1 << 20, feature.shape)
        for name, feature in columns.items()
    }


def write(path: Path, columns: dict[str, Feature], num_rows: int) -> None:
    dice = np.random.default_rng(1)
    sample = [encode_example(row(columns, dice)) for _ in range(min(num_rows, 2000))]
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for number in range(num_rows):
            writer.write(sample[number % len(sample)])


def read(path: Path, columns: dict[str, Feature]) -> int:
    reader = DirectReader(TFRecordSource(str(path), columns), 0, 1)
    rows = 0
    while isinstance(batch := reader.next_batch(BATCH_ROWS), Batch):
        rows += batch.num_rows
    return rows


def measure(path: Path, name: str, columns: dict[str, Feature], args: Any) -> None:
    """Report one kind of records."""
    num_rows = args.rows

    def ours() -> None:
        if read(path, columns) != num_rows:
            raise RuntimeError(f"{path} does not give {num_rows} rows")

    def theirs() -> None:
        spec = {key: (each.shape, each.dtype) for key, each in columns.items()}
        tf_records.read(str(path), spec, BATCH_ROWS)

    ours()  # kernels are compiled
    mine, reference = interleave(
        args.repeats, lambda: num_rows / timed(ours), lambda: num_rows / timed(theirs)
    )
    figure = Figure("P10", f"TFRecord, {name}, into numpy batches", "rows/s", "higher")
    report(figure, mine, reference, "TFRecordDataset + parse_example", rows=num_rows)


def main() -> None:
    args = parse_arguments(__doc__, repeats=7)
    tensorflow_apply.use_one_thread()
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory:
        for name, columns, count in CASES:
            args.rows = count // 100 if args.toy else count
            path = Path(directory) / name.replace(" ", "-")
            write(path, columns, args.rows)
            measure(path, name, columns, args)


if __name__ == "__main__":
    main()
