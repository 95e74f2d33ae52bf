"""Label handwritten digits with an exported model: an RDD of images in, an RDD of predictions out.

    spark-submit --master local-cluster[2,1,1024] examples/mnist/mnist_inference.py --cluster_size 2

Every worker loads the model of --export_dir once; results come back in the order of the rows.
The worker's side is `digits.predict_fun`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import digits


def main(argv=None):
    flags = "cluster_size", "batch_size", "images_labels", "export_dir", "output", "seed"
    args = digits.arguments(__doc__, *flags).parse_args(argv)
    from pyspark import SparkContext

    with SparkContext.getOrCreate() as sc:
        sc.addPyFile(str(Path(digits.__file__)))
        digits.locate(sc, args)
        _, held_out = digits.rows(sc, args, num_partitions=4)
        digits.predict(sc, args, held_out)


if __name__ == "__main__":
    sys.exit(main())
