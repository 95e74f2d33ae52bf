"""What a step of DeepFM needs at least: one process with its own rows, no server and no `fit`.

Reads a batch from the files, finds distinct ids, gathers their rows, computes the gradients with
the rows given, updates the rows and the dense parameters in place. Half the work of each process is
TensorFlow's compute; the rest are the kernels that tfos has for files and tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from feeding.columnar.batch import Batch
from feeding.formats.tfrecord.source import TFRecordSource
from feeding.reading.reader import DirectReader
from ps.manifest.manifest import Adagrad, TableSpec
from ps.tables.routing import RoutedIds, Router
from ps.tables.table import Table
from scripts.benchmarks.deepfm_model import DIM, LEARNING_RATE, build_model
from scripts.benchmarks.deepfm_turns import Task, read_task, say, turns
from scripts.benchmarks.deepfm_worker import FEATURES
from tfos.bench.sparse import look_up, update

DIMS = (DIM, 1)
ADAGRAD_START = 0.1
Array = np.ndarray[Any, Any]


class GivenRows(keras.layers.Layer):  # type: ignore[misc]
    """The place of an embedding layer: returns rows that were given before the call."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self._dim = dim
        self.rows: Any = None

    def call(self, ids: Any) -> Any:
        """Return [batch, 26, dim]; zeros where a model is only being built."""
        return tf.zeros((*ids.shape, self._dim)) if self.rows is None else self.rows

    def compute_output_spec(self, ids: Any) -> Any:
        """Return the shape, without a call."""
        return keras.KerasTensor((*ids.shape, self._dim), "float32")


def compiled_step(hidden: tuple[int, ...], rate: float) -> Callable[..., Any]:
    """Return a function from a batch and its rows to the rows' gradients.

    Args:
        hidden: units of the perceptron's layers.
        rate: rate of the dense parameters' Adagrad.
    """
    layers: list[GivenRows] = []

    def embedding(dim: int) -> GivenRows:
        layers.append(GivenRows(dim))
        return layers[-1]

    model = build_model(keras, embedding, hidden)
    variables = [variable.value for variable in model.trainable_variables]
    slots = [tf.Variable(tf.fill(each.shape, ADAGRAD_START)) for each in variables]
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function  # type: ignore[untyped-decorator]
    def step(ids: Any, numbers: Any, labels: Any, *rows: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            for layer, given in zip(layers, rows, strict=True):
                layer.rows = given
            logits = model({"ids": ids, "numbers": numbers}, training=True)
            loss = loss_of(labels[:, None], logits)
        of_rows, dense = tape.gradient(loss, (rows, variables))
        for variable, slot, gradient in zip(variables, slots, dense, strict=True):
            tf.raw_ops.ResourceApplyAdagradV2(
                var=variable.handle, accum=slot.handle, lr=rate, epsilon=1e-7, grad=gradient
            )
        return of_rows

    found: Callable[..., Any] = step
    return found


class Rows:
    """The tables of this process."""

    def __init__(self) -> None:
        self._specs = [TableSpec(name=f"dim-{dim}", dim=dim, rule=Adagrad()) for dim in DIMS]
        self._tables = [Table(spec, rank=0, num_servers=1) for spec in self._specs]
        self._router = Router(self._specs[0], 1)

    def gather(self, ids: Array) -> tuple[RoutedIds, list[Array]]:
        """Return the distinct ids, and the rows of all ids, float32[batch, 26, dim], of each table.

        Args:
            ids: int64[batch, 26].
        """
        routed = self._router.route(ids)
        found = []
        for spec, table in zip(self._specs, self._tables, strict=True):
            values = np.empty((routed.unique.size, spec.dim), np.float32)
            look_up(table, routed.unique, values)
            found.append(routed.expand(values))
        return routed, found

    def update(self, routed: RoutedIds, grads: list[Array]) -> None:
        """Sum the gradients of equal ids and apply them.

        Args:
            routed: what `gather` returned.
            grads: float32[batch, 26, dim] of each table.
        """
        for table, gradient in zip(self._tables, grads, strict=True):
            update(table, routed.unique, routed.summed(gradient))


def endless(task: Task) -> Iterator[Batch]:
    """Yield batches of this process's share of the files, again and again."""
    share = (task.more["rank"], task.more["num_workers"])
    for _ in itertools.count():
        reader = DirectReader(TFRecordSource(task.files, FEATURES), *share)
        while isinstance(batch := reader.next_batch(task.batch_size), Batch):
            if batch.num_rows == task.batch_size:
                yield batch


def main() -> None:
    task = read_task()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    step = compiled_step(tuple(task.hidden), LEARNING_RATE[task.optimizer])
    rows, batches = Rows(), endless(task)
    say("ready")
    for num_steps in turns():
        for batch in itertools.islice(batches, num_steps):
            ids, numbers, labels = (np.asarray(batch.columns[name]) for name in FEATURES)
            routed, given = rows.gather(ids)
            grads = step(ids, numbers, labels, *given)
            rows.update(routed, [gradient.numpy() for gradient in grads])


if __name__ == "__main__":
    main()
