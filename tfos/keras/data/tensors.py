"""Tensors of a batch: their rows, and building a model from one.

Covers: conversion, row counts, a description of a batch that travels to workers without rows.
Does not: read batches (tfos.keras.data.dataset), run them (tfos.keras.step.gradients).      Pure
but for building the model.
"""

from __future__ import annotations

from typing import Any

import keras
import msgspec
import numpy as np
import optree
from keras import tree

from feeding.columnar.batch import Ragged
from tfos.errors import UnsupportedModel
from tfos.keras.built import has_built_layers
from tfos.keras.data.lists import explained


class Input(msgspec.Struct, frozen=True, tag=True):
    """One input tensor, without the batch dimension."""

    dtype: str
    shape: tuple[int, ...]
    """Shape of a row, or of an item of a row's list if the input is ragged."""
    is_ragged: bool = False


class Several(msgspec.Struct, frozen=True, tag=True):
    """Inputs in order."""

    items: tuple[Inputs, ...]


class Named(msgspec.Struct, frozen=True, tag=True):
    """Inputs by name."""

    items: dict[str, Inputs]


Inputs = Input | Several | Named
_decoder = msgspec.msgpack.Decoder(Inputs)


def to_tensors(data: Any) -> Any:
    """Return the batch as nested tensors, as Keras hands it to train_step."""
    import tensorflow as tf

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, tf.Tensor) or leaf is None:
            return leaf
        if isinstance(leaf, tf.experimental.Optional):
            return None  # Keras' own meaning: an absent target or weight
        return leaf if isinstance(leaf, tf.__internal__.CompositeTensor) else tf.constant(leaf)

    return tree.map_structure(convert, data)


def constant(values: Any) -> Any:
    """Return nested arrays as tensors, and Ragged as tf.RaggedTensor [batch, None]."""
    import tensorflow as tf

    if type(values) is np.ndarray:
        return tf.constant(values)
    if type(values) is dict:  # what most batches are: Keras takes longer to walk it than to copy it
        return {name: constant(each) for name, each in values.items()}
    if type(values) is tuple:
        return tuple(map(constant, values))
    if isinstance(values, Ragged):
        return ragged(values)
    return tree.map_structure(constant, values) if tree.is_nested(values) else tf.constant(values)


def ragged(column: Ragged) -> Any:
    """Return a tf.RaggedTensor [batch, None] with int64 row splits."""
    import tensorflow as tf

    return tf.RaggedTensor.from_row_splits(column.values, column.offsets, validate=False)


def num_rows(data: Any) -> int:
    """Return the rows of a batch: the first dimension of its first tensor."""
    import tensorflow as tf

    for leaf in optree.tree_iter(data, namespace="keras"):
        if isinstance(leaf, tf.__internal__.EagerTensor):
            if shape := leaf._shape_tuple():  # `shape` makes an object
                return int(shape[0])
        elif leaf.shape.rank:
            return int(leaf.shape[0] if leaf.shape[0] is not None else leaf.nrows())
    return 1


def describe(data: Any) -> bytes:
    """Return dtypes and shapes of a batch's inputs, for `build` on any worker.

    Raises:
        UnsupportedModel: inputs that are neither tensors nor lists, [batch, None, ...].
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return msgspec.msgpack.encode(_inputs(x))


def zeros_of(specs: Any) -> Any:
    """Return a batch of one row of zeros, without targets; None: the specs leave a dimension open.

    Args:
        specs: nested specs of a batch's tensors.
    """
    import tensorflow as tf

    x, _, _ = keras.utils.unpack_x_y_sample_weight(specs)
    for spec in tree.flatten(x):
        ragged = getattr(spec, "ragged_rank", 0)
        if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec) or ragged > 1:
            return None
        if not spec.shape.rank or not spec.shape[1 + ragged :].is_fully_defined():
            return None
    return (tree.map_structure(_zeros_of, x),)


def _zeros_of(spec: Any) -> Any:
    ragged = getattr(spec, "ragged_rank", 0)
    return _zeros(Input(spec.dtype.name, tuple(spec.shape[1 + ragged :]), bool(ragged)))


def build(model: Any, described: bytes) -> None:
    """Create the model's variables by calling it on one row of zeros, unless it has them.

    A trace would lose what a layer's build assigns, and fails where the first values of a weight
    come from another variable (weight normalization, a SeedGenerator).

    Args:
        model: a Keras model.
        described: from `describe`, possibly on another worker.
    """
    if not is_built(model):
        zeros = _zeros(_decoder.decode(described))
        with explained(model, zeros):
            model(zeros)


def is_built(model: Any) -> bool:
    """Whether all variables exist, so that they can be distributed before any batch."""
    return has_built_layers(model) and bool(model.trainable_variables)


def _inputs(x: Any) -> Inputs:
    import tensorflow as tf

    if isinstance(x, dict):
        return Named({name: _inputs(value) for name, value in x.items()})
    if isinstance(x, tuple | list):
        return Several(tuple(map(_inputs, x)))
    if isinstance(x, tf.RaggedTensor) and x.ragged_rank == 1:
        return Input(x.dtype.name, tuple(x.values.shape[1:]), is_ragged=True)
    if not isinstance(x, tf.Tensor):
        raise UnsupportedModel(
            f"cannot build the model from an input of type {type(x).__name__}; build it before "
            "ctx.distribute(model): call it once, model(x[:1])"
        )
    return Input(x.dtype.name, tuple(x.shape[1:]))


def _zeros(inputs: Inputs) -> Any:
    import tensorflow as tf

    if isinstance(inputs, Named):
        return {name: _zeros(value) for name, value in inputs.items.items()}
    if isinstance(inputs, Several):
        return [_zeros(value) for value in inputs.items]
    zeros = tf.zeros((1, *inputs.shape), inputs.dtype)
    return tf.RaggedTensor.from_row_lengths(zeros, [1]) if inputs.is_ragged else zeros
