"""What does a training step cost when the parameters live on a server?

Figure: P13.
Method: one PS process and one worker (this process) on one host, asynchronous, Adam, a perceptron
    of 1.28 million parameters, batch 256, numpy input, TensorFlow's default threads. Steps per
    second from the median step after tracing. The reference is plain `fit` of the same model;
    rounds of both take turns in this process.
Caveats: the PS competes with TensorFlow for the same cores; on more cores it does not.
Bar: at least 0.88 of plain `fit`.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report
from scripts.benchmarks.reference.plain_fit import build_model, digits_like, step_seconds
from scripts.benchmarks.worker_context import BenchWorker
from tfos.bench.servers import served

BATCH_SIZE = 256
SKIPPED_STEPS = 5


def main() -> None:
    args = parse_arguments(__doc__, repeats=5)
    from tfos.keras.fit.distribute import distribute

    hidden, num_steps = (16, 10) if args.toy else (800, 60)
    images, labels = digits_like(num_steps * BATCH_SIZE)
    with served(unix=True) as client, tempfile.TemporaryDirectory() as log_dir:
        plain, shared = build_model(hidden), build_model(hidden)
        distribute(shared, BenchWorker(lambda: client, Path(log_dir)))

        def steps_per_s(model: Any) -> float:
            seconds = step_seconds(model, images, labels, BATCH_SIZE, SKIPPED_STEPS)
            return 1.0 / statistics.median(seconds)

        steps_per_s(shared), steps_per_s(plain)
        ours, reference = interleave(
            args.repeats, lambda: steps_per_s(shared), lambda: steps_per_s(plain)
        )
    figure = Figure("P13", f"Keras step, MLP {hidden}, 1 PS + 1 worker, async", "steps/s", "higher")
    report(figure, ours, reference, "plain model.fit", parameters=int(plain.count_params()))


if __name__ == "__main__":
    main()
