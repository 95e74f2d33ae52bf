"""Steps for any number of rows: the losses of a model's outputs as Keras has them for its own data.

Covers: what Keras traces for fed batches.      Does not: make a step.
Runs in: workers. Keras is imported in functions only.

Keras' mean of an output's own loss (`total_loss` of the output `total`) weights a batch by its rows
if its trace knows them, else by 1. A trace for a batch that is a tensor knows them; one for the
batches of a tf.data.Dataset, as Keras makes it of arrays, does not. Of fed batches, the first size
would be known and another one, as of an epoch's last batch, would not: it would hardly count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def for_any_rows(model: Any, *, trains: bool) -> None:
    """Let Keras trace a model's steps without the number of rows.

    Args:
        model: the compiled model.
        trains: whether Keras itself trains it; otherwise Keras only evaluates it.
    """
    for name in ("train_step", "test_step") if trains else ("test_step",):
        vars(model)[name] = _for_any_rows(getattr(model, name))


def _for_any_rows(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    import keras

    @functools.wraps(step)
    def relaxed(data: Any) -> Any:
        return step(keras.tree.map_structure(_without_rows, data))

    return relaxed


def _without_rows(leaf: Any) -> Any:
    """Return a tensor of a trace, [rows, ...], with an unknown number of rows."""
    import tensorflow as tf

    is_traced = isinstance(leaf, tf.Tensor) and not tf.executing_eagerly()
    if not is_traced or not leaf.shape.rank or leaf.shape[0] is None:
        return leaf
    return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])
