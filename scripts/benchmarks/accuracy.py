"""Does training through a parameter server learn as much as one process does?

Figure: ACC, the accuracy on 1,000 held-out digits, by seed.
Method: examples/mnist/mnist_spark.py on three local executors, 1 PS + 2 asynchronous workers, 4,000
    real digits; the reference is plain `fit` of the same model, for the same number of epochs, with
    the same seed and split, in this process. One pair per seed.
Caveats: two workers see half of the rows each and push to the same parameters, so the number of
    updates is equal and their gradients are a little old.
Bar: the mean over the seeds within 0.01 of the reference's.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.benchmarks.harness import ROOT, Figure, parse_arguments, report
from scripts.benchmarks.local_spark import executors

EXAMPLES = ROOT / "examples" / "mnist"


def distributed(sc: Any, args: Any, digits: Any) -> float:
    """Train the example on a cluster and return the exported model's accuracy."""
    from tfos import InputMode, TFCluster

    main_fun = importlib.import_module("mnist_spark").main_fun
    data, held_out = digits.rows(sc, args, num_partitions=6)
    with TFCluster.reserve(sc, 3, num_ps=1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(main_fun, args)
        cluster.train(data, num_epochs=args.epochs)
    return float(digits.held_out_accuracy(args, held_out))


def alone(args: Any, digits: Any) -> float:
    """Train the same model in this process and return its accuracy."""
    import keras

    keras.utils.set_random_seed(args.seed)
    images, labels = digits.bundled_digits(args.seed)
    cut = digits.HELD_OUT
    model = digits.build_model()
    model.fit(images[cut:], labels[cut:], batch_size=args.batch_size, epochs=args.epochs, verbose=0)
    return float(model.evaluate(images[:cut], labels[:cut], batch_size=500, verbose=0)[1])


def main() -> None:
    args = parse_arguments(__doc__, repeats=5)
    sys.path.insert(0, str(EXAMPLES))
    digits = importlib.import_module("digits")
    ours, reference = [], []
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory, executors(3, "acc") as sc:
        for module in ("digits.py", "mnist_spark.py"):
            sc.addPyFile(str(EXAMPLES / module))
        for seed in range(1, args.repeats + 1):
            flags = ["--seed", str(seed), "--epochs", "1" if args.toy else "6"]
            flags += ["--export_dir", str(Path(directory) / str(seed)), "--model_dir", directory]
            names = *digits.CLUSTER, "epochs", "images_labels"
            run = digits.arguments("", *names).parse_args(flags)
            digits.locate(sc, run)
            ours.append(distributed(sc, run, digits))
            reference.append(alone(run, digits))
    figure = Figure("ACC", "accuracy on held-out digits, 1 PS + 2 async workers", "1", "higher")
    report(
        figure,
        ours,
        reference,
        "plain model.fit in one process",
        mean_ours=round(statistics.mean(ours), 4),
        mean_reference=round(statistics.mean(reference), 4),
    )


if __name__ == "__main__":
    main()
