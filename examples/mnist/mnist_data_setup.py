"""Write the bundled digits as files: mnist_tf.py reads csv, mnist_tf_ds.py tfrecord and parquet.

    spark-submit examples/mnist/mnist_data_setup.py --output hdfs://nn:8020/digits --format parquet

Each Spark partition becomes one file, on any file system that tfos knows: a directory that all
nodes see, hdfs://, or what fsspec serves. Files of an earlier run that this one did not replace
are removed. The digits that the examples test with are left out.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from pathlib import Path

import digits


def write_part(output, file_format, part, rows):
    """Write one partition's rows as one file; returns its name and how many there were."""
    from feeding import filesystem_for

    name = f"part-{part:05d}.{file_format}"
    path = f"{output}/{name}"
    with filesystem_for(path).create(path) as file:
        count = WRITERS[file_format](file, rows)
    yield name, count


def write_csv(file, rows):
    count = 0
    for pixels, label in rows:
        file.write(f"{label},{','.join(map(str, pixels.tolist()))}\n".encode())
        count += 1
    return count


def write_tfrecord(file, rows):
    from feeding import RecordWriter, encode_example

    records = RecordWriter(file)
    for pixels, label in rows:
        records.write(encode_example({"pixels": pixels, "label": label}))
    return records.num_records


def write_parquet(file, rows):
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    pixels, labels = zip(*rows, strict=True)
    ends = np.arange(0, 784 * len(labels) + 1, 784, np.int32)
    images = pa.ListArray.from_arrays(ends, pa.array(np.concatenate(pixels)))
    table = pa.table({"pixels": images, "label": pa.array(labels, pa.int64())})
    pq.write_table(table, file, row_group_size=256)
    return len(labels)


WRITERS = {"csv": write_csv, "tfrecord": write_tfrecord, "parquet": write_parquet}


def remove_others(output, written):
    """Remove parts that an earlier run left: they hold digits that are in the new ones too."""
    from feeding import filesystem_for

    filesystem = filesystem_for(output)
    for entry in filesystem.entries(output):
        if re.fullmatch(r"part-\d+\.(csv|tfrecord|parquet)", entry.name) and (
            entry.name not in written
        ):
            filesystem.delete(entry.path)


def write(sc, output, file_format, *, seed=1, num_files=4):
    """Write the digits to train on; returns their number."""
    images, labels = digits.bundled_digits(seed)
    training = zip(images[digits.HELD_OUT :], labels[digits.HELD_OUT :].tolist(), strict=True)
    parts = sc.parallelize(list(training), num_files)
    job = functools.partial(write_part, output, file_format)
    written = dict(parts.mapPartitionsWithIndex(job).collect())
    remove_others(output, written)
    return sum(written.values())


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="mnist_data", help="directory to write to")
    parser.add_argument("--format", choices=tuple(WRITERS), default="tfrecord")
    parser.add_argument("--num_files", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1, help="the examples' own, or they overlap")
    args = parser.parse_args(argv)
    from pyspark import SparkContext

    with SparkContext.getOrCreate() as sc:
        sc.addPyFile(str(Path(digits.__file__)))
        output = digits.located(sc, args.output)
        count = write(sc, output, args.format, seed=args.seed, num_files=args.num_files)
    print(f"written: {count} digits to {output}")


if __name__ == "__main__":
    sys.exit(main())
