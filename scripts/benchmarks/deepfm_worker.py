"""DeepFM by tfos: a worker of its own process, as `main_fun` would be, without Spark.

Its task's `more`: `endpoints`, `cluster_id`, `secret`, `integrity` of the servers, `rank`,
`num_workers`, and the keywords of `ctx.distribute`.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from feeding.formats.tfrecord.example import Feature
from ps.client.client import PSClient
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint
from scripts.benchmarks.deepfm_model import (
    LEARNING_RATE,
    NUM_COLUMNS,
    NUM_NUMBERS,
    auc,
    build_model,
)
from scripts.benchmarks.deepfm_turns import Task, read_task, say, turn_callback
from scripts.benchmarks.worker_context import BenchWorker
from tfos.bench.servers import BenchServers

FEATURES = {
    "ids": Feature("int64", (NUM_COLUMNS,)),
    "numbers": Feature("float32", (NUM_NUMBERS,)),
    "label": Feature("float32"),
}
INPUTS = {"ids": "ids", "numbers": "numbers"}
JOIN_TIMEOUT_S = 300.0


def settings_of(servers: BenchServers, rank: int, num_workers: int) -> dict[str, Any]:
    """Return the part of a task that says where the servers are.

    Args:
        servers: the running servers.
        rank: the worker's rank.
        num_workers: workers that train together.
    """
    return {
        "endpoints": [(at.host, at.port, at.unix_path, at.boot_id) for at in servers.endpoints],
        "cluster_id": servers.credentials.cluster_id,
        "secret": servers.credentials.secret.hex(),
        "integrity": servers.credentials.integrity,
        "rank": rank,
        "num_workers": num_workers,
    }


def connect(more: dict[str, Any]) -> PSClient:
    """Return a new client of the task's servers."""
    return PSClient(
        [Endpoint(*at) for at in more["endpoints"]],
        Credentials(more["cluster_id"], bytes.fromhex(more["secret"]), more["integrity"]),
        Identity(Role.WORKER, more["rank"]),
        num_workers=more["num_workers"],
    )


def compiled_model(task: Task) -> Any:
    """Return the model with rows of tables instead of stock embedding layers."""
    import keras

    from tfos.keras import Embedding

    def embedding(dim: int) -> Any:
        return Embedding(dim, seed=task.seed)

    keras.utils.set_random_seed(task.seed)
    model = build_model(keras, embedding, tuple(task.hidden))
    optimizer = getattr(keras.optimizers, task.optimizer)(LEARNING_RATE[task.optimizer])
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def train(task: Task, log_dir: Path) -> None:
    """Train by turns, or for one pass; the chief then answers with the AUC.

    Args:
        task: this worker's task.
        log_dir: directory for event files.
    """
    import keras

    from tfos.keras.fit.distribute import distribute

    ctx = BenchWorker(
        partial(connect, task.more),
        log_dir,
        rank=task.more["rank"],
        num_workers=task.more["num_workers"],
    )
    model = distribute(compiled_model(task), ctx, **task.more.get("distribute", {}))
    rows = ctx.read.tfrecord(task.files, FEATURES).equal_steps()
    data = rows.dataset(task.batch_size, feature_cols=INPUTS, label_cols="label")
    say("ready")
    if task.turns:
        model.fit(data, epochs=1 << 30, callbacks=[turn_callback(keras)], verbose=0)
    model.fit(data, verbose=0)
    ctx.ps_client().rendezvous("learned", b"", timeout_s=JOIN_TIMEOUT_S)
    say(held_out_auc(model, ctx, task.held_out) if ctx.is_chief else None)


def held_out_auc(model: Any, ctx: BenchWorker, path: str) -> float:
    """Return the AUC of the model's predictions.

    Args:
        model: a distributed one.
        ctx: this worker's context.
        path: path of the held-out rows.
    """
    from tfos.reading.reading import Reading

    alone = BenchWorker(ctx.ps_client, Path(ctx.log_dir))  # reads all rows
    labels: list[Any] = []
    scores: list[Any] = []
    for batch in Reading(alone).tfrecord(path, FEATURES).batches(4096):
        inputs = {name: batch[name] for name in INPUTS}
        scores.append(model.predict_on_batch(inputs)[:, 0])
        labels.append(batch["label"])
    return auc(np.concatenate(labels), np.concatenate(scores))


def serve_turns() -> None:
    import tensorflow as tf

    task = read_task()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with tempfile.TemporaryDirectory(prefix="tfos-bench-") as log_dir:
        train(task, Path(log_dir))


if __name__ == "__main__":
    serve_turns()
