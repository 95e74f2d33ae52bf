"""What does it cost a step that its rows come from a server, when they are looked up ahead?

Figure: P23.
Method: the DeepFM of `scripts/bench deepfm`, batch 512, Adagrad, asynchronous, with the defaults of
    `ctx.distribute`; one PS process and one worker (this process), one intra-op thread. Steps are
    timed by `fit`; the figure is their median. The reference is the same model with the same rows,
    pushed and dense parameters alike, whose rows come from an array of this process. Rounds of both
    take turns.
Caveats: the reference copies its rows from memory that is in the cache more often than a server's.
Bar: at most 1.15 of the step with rows given.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from examples.recommender.criteo_rows import LABEL, CriteoRows
from ps.client.client import PSClient
from scripts.benchmarks.deepfm_model import BATCH_SIZE, TOY, Size, build_model
from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report
from scripts.benchmarks.reference.plain_fit import step_seconds
from scripts.benchmarks.worker_context import BenchWorker
from tfos.bench.servers import served

SKIPPED_STEPS = 5
NUM_GIVEN = 1 << 16
"""Rows in memory, which ids share."""


def with_rows_given(client: PSClient) -> PSClient:
    """Let a client fill the rows that its worker asks for from memory; pushes stay as they are.

    Args:
        client: a worker's client.
    """
    push = client.push_pull
    memory: dict[int, Any] = {}

    def fill(rows: Any) -> None:
        for routed, into in rows.values():
            width = into.shape[1]
            if width not in memory:
                memory[width] = np.full((NUM_GIVEN, width), 0.01, np.float32)
            np.take(memory[width], routed.unique % NUM_GIVEN, axis=0, out=into)

    def push_pull(*args: Any, next_rows: Any = None, **options: Any) -> Any:
        ack = push(*args, **options)
        fill(next_rows or {})
        return ack

    def lookup_into(into: Any, *, training: bool) -> None:  # noqa: ARG001 - as the client's
        fill(into)

    vars(client)["push_pull"] = push_pull
    vars(client.tables)["lookup_into"] = lookup_into
    return client


def main() -> None:
    args = parse_arguments(__doc__, repeats=7)
    import keras
    import tensorflow as tf

    from tfos.keras import Embedding
    from tfos.keras.fit.distribute import distribute

    tf.config.threading.set_intra_op_parallelism_threads(1)
    size = TOY if args.toy else Size()
    num_steps = SKIPPED_STEPS + size.turn_steps
    rows = CriteoRows(size.num_ids).rows(0, num_steps * BATCH_SIZE)
    labels = rows.pop(LABEL)

    def compiled() -> Any:
        model = build_model(keras, lambda dim: Embedding(dim, table=f"rows{dim}"), size.hidden)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adagrad(0.02), loss, jit_compile=False)
        return model

    def step_ms(model: Any) -> float:
        seconds = step_seconds(model, rows, labels, BATCH_SIZE, SKIPPED_STEPS)
        return 1e3 * statistics.median(seconds)

    with ExitStack() as stack:
        log_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        looks_up = stack.enter_context(served(unix=True))
        given = with_rows_given(stack.enter_context(served(unix=True)))
        ours = distribute(compiled(), BenchWorker(lambda: looks_up, log_dir))
        reference = distribute(compiled(), BenchWorker(lambda: given, log_dir))
        step_ms(ours), step_ms(reference)
        found, theirs = interleave(args.repeats, lambda: step_ms(ours), lambda: step_ms(reference))
    figure = Figure("P23", f"DeepFM step, rows looked up ahead, batch {BATCH_SIZE}", "ms", "lower")
    report(figure, found, theirs, "the same step with rows given in memory")


if __name__ == "__main__":
    main()
