"""Ids that Keras rounds: floats of a batch for a model's input of integers.

Covers: refusing them, by the name of the feature.
Does not: find casts on the way to the ids (ids_ahead), refuse floats that reach a layer (keys).

A functional model casts what it is given to the dtypes of its inputs before any layer sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from keras import tree

from tfos.errors import UnsupportedModel
from tfos.keras.embedding.ids_ahead import IdsAhead


def check_no_rounding(model: Any, batch: Any, ids: IdsAhead) -> None:
    """Refuse floats for an input of integers that an Embedding's ids are made of.

    Args:
        model: compiled; only functional and Sequential models cast by themselves.
        batch: (x, y, weights) as nested tensor specs.
        ids: recorded with this kind of batch.

    Raises:
        UnsupportedModel: names the feature, both dtypes and the next step.
    """
    for place, name, given, declared in _features(model, batch):
        if place in ids.rounded and "int" in declared:
            raise UnsupportedModel(
                f"feature {name!r} has {given} numbers, which Keras would round to the {declared} "
                "of the model's input, and ids are made of them: float32 has no odd number above "
                "2^24. Feed integers: df.withColumn(name, col(name).cast('long')), "
                "array.astype('int64'); or declare the input as the floats that it gets, and cast "
                "in the model"
            )


def _features(model: Any, batch: Any) -> Iterator[tuple[int, str, str, str]]:
    """Yield each input's first place among the batch's tensors, its name, given and own dtype."""
    import tensorflow as tf

    inputs = getattr(model, "inputs", None) or ()
    x = batch[0] if isinstance(batch, tuple) else batch
    if isinstance(x, dict):
        by_name = {each.name: each for each in inputs}
        pairs = [(x[name], by_name.get(name)) for name in sorted(x)]
    else:
        leaves = tree.flatten(x)
        pairs = list(zip(leaves, inputs, strict=True)) if len(leaves) == len(inputs) else []
    place = 0
    for leaf, own in pairs:
        if own is not None:
            yield place, own.name, tf.as_dtype(leaf.dtype).name, str(own.dtype)
        place += len(tf.nest.flatten(leaf, expand_composites=True))
