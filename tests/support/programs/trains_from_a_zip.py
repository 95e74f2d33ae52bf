"""A cluster whose executors have tfos as a zip file: trains_from_a_zip.py FILE.

`--py-files` would put the file behind the checkout, which the tests' environment names.
"""

from __future__ import annotations

import sys
from typing import Any


def main_fun(args: Any, ctx: Any) -> tuple[str, float]:
    """Train a line on a parameter server; tell where this node's tfos is, and the last loss."""
    import keras

    import tfos

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ctx.distribute(model)
    fitted = model.fit(ctx.dataset(8), epochs=2, verbose=0)
    return str(tfos.__file__), float(fitted.history["loss"][-1])


def main() -> None:
    """Train, and print what the worker has returned."""
    import numpy as np
    from pyspark.sql import SparkSession

    from tfos import TFCluster

    rows = [(np.array([n % 3, 1.0], "float32"), float(n % 3)) for n in range(64)]
    packed = SparkSession.builder.config("spark.executorEnv.PYTHONPATH", sys.argv[1])
    with packed.getOrCreate() as spark:
        sc = spark.sparkContext
        mode = TFCluster.InputMode.SPARK
        with TFCluster.reserve(sc, 2, 1, input_mode=mode, page_port=0) as cluster:
            cluster.start(main_fun)
            cluster.train(sc.parallelize(rows, 2), num_epochs=2)
        print(f"trained: {cluster.results()[0]}")


if __name__ == "__main__":
    main()
