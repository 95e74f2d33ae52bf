"""How fast do tf.Example records in memory become columns, beside TensorFlow's parse_example?

Figures: DECODE, records → numpy columns; DECODE-arrow, the same records → Arrow columns, as Spark
    reads them; both for 784 floats, for 39 columns (13 floats, 26 integers), and for ragged
    integers beside byte strings.
Method: the decoder alone, on blocks of 512 records, one thread, no file and no CRC. The reference
    is tf.io.parse_example in a tf.function, with one thread for its operators, on a tensor of the
    same records; its tensors are not copied. All take turns.
Caveats: byte strings become Python objects in numpy columns, and stay bytes end to end in Arrow's
    columns and in TensorFlow's tensors.
Bar: none of its own; P10 has one for files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from feeding.formats.tfrecord.example import ExampleDecoder, Feature
from feeding.formats.tfrecord.framing import RecordBlock
from feeding.formats.tfrecord.from_rows import encode_example
from feeding.formats.tfrecord.to_arrow import ArrowDecoder
from feeding.reading.bad_records import BadData
from scripts.benchmarks import tfrecord
from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report, timed
from scripts.benchmarks.reference import tf_records
from tfos.bench.reference import tensorflow_apply

ROWS = 512
RAGGED = {"ids": Feature("int64", None), "name": Feature("bytes"), "tags": Feature("bytes", None)}
CASES = (("784 floats", tfrecord.WIDE), ("39 columns", tfrecord.NARROW), ("ragged", RAGGED))
ARROW = {"float32": pa.float32(), "int64": pa.int64(), "bytes": pa.binary()}


def ragged_row(dice: np.random.Generator) -> dict[str, Any]:
    return {
        "ids": dice.integers(0, 1 << 40, dice.integers(0, 20)),
        "name": b"x" * int(dice.integers(5, 40)),
        "tags": [b"tag%d" % number for number in range(dice.integers(0, 5))],
    }


def records_of(columns: dict[str, Feature]) -> list[bytes]:
    dice = np.random.default_rng(1)
    rows = (
        ragged_row(dice) if columns is RAGGED else tfrecord.row(columns, dice) for _ in range(ROWS)
    )
    return [encode_example(row) for row in rows]


def block_of(records: list[bytes]) -> RecordBlock:
    lengths = np.array(list(map(len, records)))
    buffer = np.frombuffer(b"".join(records), np.uint8).copy()
    return RecordBlock(buffer, np.cumsum(lengths) - lengths, lengths, 0, 0)


def arrow_field(name: str, feature: Feature) -> pa.Field:
    kind = ARROW[feature.dtype]
    return pa.field(name, kind if feature.shape == () else pa.list_(kind))


def measure(name: str, columns: dict[str, Feature], blocks: int, repeats: int) -> None:
    """Report one kind of records."""
    records = records_of(columns)
    block = block_of(records)
    to_numpy = ExampleDecoder(columns)
    to_arrow = ArrowDecoder(pa.schema([arrow_field(*each) for each in columns.items()]))
    parse = tf_records.parser(records, columns)

    def rate(work: Callable[[], Any]) -> Callable[[], float]:
        def repeated() -> None:
            for _ in range(blocks):
                work()

        work()  # compiled
        return lambda: ROWS * blocks / timed(repeated)

    numpy_rates, arrow_rates, theirs = interleave(
        repeats,
        rate(lambda: to_numpy.decode(block, "bench", BadData())),
        rate(lambda: to_arrow.decode(block, "bench", BadData())),
        rate(parse),
    )
    for figure, kind, ours in (
        ("DECODE", "numpy", numpy_rates),
        ("DECODE-arrow", "Arrow", arrow_rates),
    ):
        what = Figure(figure, f"tf.Example, {name}, to {kind} columns", "rows/s", "higher")
        report(what, ours, theirs, "parse_example", rows=ROWS * blocks)


def main() -> None:
    args = parse_arguments(__doc__, repeats=9)
    tensorflow_apply.use_one_thread()
    for name, columns in CASES:
        measure(name, columns, 2 if args.toy else 40, args.repeats)


if __name__ == "__main__":
    main()
