"""Row flow: where a layer's call gets its rows from, and how their gradient leaves the step.

Covers: the three sources of rows (a recording, the rows of a prepared batch, a lookup in the call),
which of them holds for the running thread, the anchor.
Does not: look up (tfos.keras.embedding.sources), prepare batches (batch_rows).
Threads: a flow belongs to the thread that entered it.

A layer's trainable weight is its *anchor*, of shape (0, dim): the rows themselves are in a table.
Rows enter the step as a constant, and the step's own tape gives the anchor their gradient, as
tf.IndexedSlices: `values` [n, dim], one per id, and `indices` [n], which name the rows. So every
`train_step` that trains its model's variables brings the gradient to `optimizer.apply`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from tfos.errors import UnsupportedModel

_NO_ROWS = 0
"""Number of rows that an anchor claims to have; nothing makes it dense."""

NOT_FOUND = (
    "Keras finds no layer inside a Lambda or a Python object that is not a layer, so its rows "
    "would never be trained; make it an attribute of the model or of a layer, or call it outside "
    "of the Lambda"
)
"""Advice for an Embedding that a step calls and that is not one of the model's."""


class RowFlow(Protocol):
    """Gives the rows of a layer's calls, in the order of the calls."""

    def rows(self, layer: Any, keys: Any) -> tuple[Any, Any]:
        """Return the rows of one call.

        Args:
            layer: the Embedding.
            keys: [n] int64.

        Returns:
            Rows [n, dim] of the table's dtype, and the indices [n] of their gradient.
        """


_running = threading.local()


def flow_for(layer: Any, training: bool | None) -> RowFlow | None:
    """Return the flow of this thread; None: the call looks its rows up.

    A layer of the model has its rows from the flow whatever `training` is, which Keras' Embedding
    does not ask either: fine-tuning calls its base with training=False.

    Args:
        layer: the Embedding that is called.
        training: argument of the call; False lets a step ask a model that it does not train.

    Raises:
        UnsupportedModel: the layer is not one of the model's.
    """
    flow, layers = getattr(_running, "flow", (None, ()))
    if flow is None or any(layer is each for each in layers):
        return flow
    if training is False:
        return None
    raise UnsupportedModel(f"layer {layer.name!r} is not part of the model: {NOT_FOUND}")


@contextmanager
def flowing(flow: RowFlow, layers: Sequence[Any]) -> Iterator[None]:
    """Let the calls of the block get their rows from this flow.

    Args:
        flow: the flow of a step.
        layers: the model's Embeddings.
    """
    before = getattr(_running, "flow", (None, ()))
    _running.flow = flow, layers
    try:
        yield
    finally:
        _running.flow = before


@contextmanager
def rows_left_out() -> Iterator[None]:
    """Let models be saved without the rows of their tables in the block."""
    _running.leaves_out = True
    try:
        yield
    finally:
        _running.leaves_out = False


def saves_rows() -> bool:
    """Whether a file of a model gets the rows of its tables."""
    return not getattr(_running, "leaves_out", False)


def anchored(rows: Any, indices: Any, anchor: Any) -> Any:
    """Return the rows, whose gradient reaches the anchor.

    Args:
        rows: [n, dim]; no gradient goes further back.
        indices: [n] int32 or int64: what the gradient's slices are called; None: outside of a
            training that brings it to the table.
        anchor: the layer's weight, [0, dim].
    """
    import tensorflow as tf

    dim = rows.shape[1]

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def joined(given: Any, _: Any) -> tuple[Any, Any]:
        def gradient(upstream: Any) -> tuple[None, Any]:
            if indices is None:
                raise UnsupportedModel(
                    "a gradient of an Embedding's rows was requested outside of fit and "
                    "train_on_batch, which bring it to the table. Train through them, if necessary "
                    f"with your own train_step. Within fit, the cause is that {NOT_FOUND}"
                )
            shape = tf.constant([_NO_ROWS, dim], indices.dtype)
            return None, tf.IndexedSlices(upstream, indices, shape)

        return tf.identity(given), gradient

    return joined(rows, tf.convert_to_tensor(anchor))
