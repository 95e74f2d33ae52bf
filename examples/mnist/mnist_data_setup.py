"""Write the bundled digits as files that mnist_tf.py (csv) and mnist_tf_ds.py (tfrecord) read.

    spark-submit examples/mnist/mnist_data_setup.py --output hdfs://nn:8020/digits --format tfrecord

Each Spark partition becomes one file, on any file system that tfos knows: a directory that all
nodes see, hdfs://, or what fsspec serves. The digits that the examples test with are left out.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import digits


def write_part(output, file_format, part, rows):
    """Write one partition's rows as one file; returns how many there were."""
    from feeding.example_writer import encode_example
    from feeding.filesystem.choose import filesystem_for
    from feeding.tfrecord import RecordWriter

    count = 0
    path = f"{output}/part-{part:05d}.{file_format}"
    with filesystem_for(path).create(path) as file:
        records = RecordWriter(file)
        for pixels, label in rows:
            count += 1
            if file_format == "tfrecord":
                records.write(encode_example({"pixels": pixels, "label": label}))
            else:
                file.write(f"{label},{','.join(map(str, pixels.tolist()))}\n".encode())
    yield count


def write(sc, output, file_format, *, seed=1, num_files=4):
    """Write the digits to train on; returns their number."""
    images, labels = digits.bundled_digits(seed)
    training = zip(images[digits.HELD_OUT :], labels[digits.HELD_OUT :].tolist(), strict=True)
    parts = sc.parallelize(list(training), num_files)
    return parts.mapPartitionsWithIndex(functools.partial(write_part, output, file_format)).sum()


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="mnist_data", help="directory to write to")
    parser.add_argument("--format", choices=("csv", "tfrecord"), default="tfrecord")
    parser.add_argument("--num_files", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1, help="the examples' own, or they overlap")
    args = parser.parse_args(argv)
    from pyspark import SparkContext

    output = digits.absolute(args.output)
    with SparkContext.getOrCreate() as sc:
        sc.addPyFile(str(Path(digits.__file__)))
        count = write(sc, output, args.format, seed=args.seed, num_files=args.num_files)
    print(f"written: {count} digits to {output}")


if __name__ == "__main__":
    sys.exit(main())
