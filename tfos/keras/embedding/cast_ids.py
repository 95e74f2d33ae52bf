"""Ids that Keras casts: numbers of a batch that the model's input of integers cannot hold.

Covers: floats, refused by dtype; integers of a wider dtype, refused by value; of the inputs whose
numbers an Embedding may get. Floats that only stand for ids while Keras builds a model.
Does not: refuse floats that reach a layer (keys), or ids out of the table's range (ps.tables.ids).
Threads: any.

A functional model casts what it is given to the dtypes of its inputs, before any layer sees it:
float32 rounds ids above 2^24, and int32 has 5 for the id 2^32 + 5. Whatever runs the model (`fit`,
`evaluate`, `predict`, serving, a call, another model around it) passes Functional.call, where it
casts, or Sequential.__call__, which casts floats earlier. So the check is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import tree

from tfos.errors import UnsupportedModel

Kind = type[keras.layers.Layer]


def checking(original: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    """Return a model's call, which first refuses ids that the cast would change.

    Args:
        original: Functional.call or Sequential.__call__.
        kind: class of the layers that take ids.
    """

    @functools.wraps(original)
    def call(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        graph = _graph_of(self)
        if contains(graph, kind):
            inputs = _checked(graph, inputs, kind)
        return original(self, inputs, *args, **kwargs)

    return call


def contains(layer: Any, kind: Kind) -> bool:
    """Whether a layer is, or has inside, one of a kind; an operation of keras.ops has none.

    Args:
        layer: or a model, an operation, None.
        kind: class of the layers.
    """
    found = layer._flatten_layers() if isinstance(layer, keras.layers.Layer) else ()
    return any(isinstance(each, kind) for each in found)


def takes_ids(model: Any, kind: Kind) -> tuple[bool, ...]:
    """Whether layers of a kind may get the integers of each input, in the inputs' order.

    Args:
        model: functional or Sequential.
        kind: class of the layers that take ids.
    """
    graph = _graph_of(model)
    wanted = _inputs_of_ids(graph, kind) if contains(graph, kind) else set()
    return tuple(id(own) in wanted for own in graph.inputs)


def are_guessed(ids: Any) -> bool:
    """Whether floats stand for ids while Keras builds a model or asks for a shape: nothing runs.

    The file of a model of an own class has the shapes of its inputs, and Keras takes them for
    floats. A model that it could not build would have random dense weights, for which there is
    only a warning. Real floats, also of an own layer behind a keras.Input of floats, are refused
    when the model runs.
    """
    return bool(
        keras.src.backend.in_symbolic_scope()
        and keras.backend.is_float_dtype(keras.backend.standardize_dtype(ids.dtype))
    )


def _graph_of(model: Any) -> Any:
    """Return the functional model of a Sequential, None before it is built; or the model."""
    return getattr(model, "_functional", model)


def _checked(model: Any, inputs: Any, kind: Kind) -> Any:
    """Return the inputs, of which integers are compared with their input's range when they run.

    Raises:
        UnsupportedModel: floats, or no numbers; names the feature, both dtypes and the next step.
    """
    wanted = _inputs_of_ids(model, kind)
    if not wanted:
        return inputs
    if isinstance(inputs, dict) and not isinstance(model.input, dict):  # as Keras finds them
        by_name = {own.name: own for own in model.inputs if id(own) in wanted}
        return {name: _fitting(leaf, by_name.get(name)) for name, leaf in inputs.items()}
    leaves = tree.flatten(inputs)
    own = [each if id(each) in wanted else None for each in model.inputs]
    own += [None] * (len(leaves) - len(own))  # other numbers of inputs are Keras' to refuse
    return tree.pack_sequence_as(inputs, list(map(_fitting, leaves, own)))


def _inputs_of_ids(model: Any, kind: Kind) -> set[int]:
    """Return the `id` of each input of integers whose numbers an Embedding may get."""
    wanted: set[int] = set()
    for _, nodes in sorted(model._nodes_by_depth.items()):  # from the outputs to the inputs
        for node in nodes:
            reaches = any(id(each) in wanted for each in node.outputs)
            if reaches or contains(node.operation, kind):
                wanted.update(id(each) for each in node.arguments.keras_tensors)
    return {id(own) for own in model.inputs if id(own) in wanted and "int" in str(own.dtype)}


def _fitting(leaf: Any, own: Any) -> Any:
    import tensorflow as tf

    given = getattr(leaf, "dtype", None)
    if own is None or given is None:
        return leaf
    given, declared = tf.as_dtype(given), tf.as_dtype(own.dtype)
    if given.is_floating and are_guessed(leaf) and not isinstance(leaf, keras.KerasTensor):
        return leaf
    if given.is_floating:
        raise UnsupportedModel(
            f"feature {own.name!r} has {given.name} numbers, which Keras would round to the "
            f"{declared.name} of the model's input before making ids: float32 has no odd number "
            "above 2^24. Feed integers: df.withColumn(name, col(name).cast('long')) or "
            "array.astype('int64'). If all ids are below 2^24, you may declare the input as the "
            "floats that it gets, and cast in the model"
        )
    if given.is_complex or given == tf.string:
        raise UnsupportedModel(
            f"feature {own.name!r} has {given.name} values, and the model makes ids of "
            f"{declared.name} there; feed integers, or declare the input as "
            "keras.Input(shape, dtype='string')"
        )
    if isinstance(leaf, keras.KerasTensor):
        return leaf  # a model is being built, nothing runs
    # int64 holds the bits of ids of uint64, and the reverse: see keys_of.
    if not given.is_integer or _holds(declared, given) or given.size == declared.size == 8:
        return leaf
    return _of_range(leaf, given, declared, own.name)


def _holds(declared: Any, given: Any) -> bool:
    one, other = np.iinfo(declared.as_numpy_dtype), np.iinfo(given.as_numpy_dtype)
    return bool(one.min <= other.min and one.max >= other.max)


def _of_range(leaf: Any, given: Any, declared: Any, name: str) -> Any:
    """Return integers that are refused when they run, if one is out of the declared range."""
    import tensorflow as tf

    is_ragged = isinstance(leaf, tf.RaggedTensor)
    values = leaf.flat_values if is_ragged else tf.convert_to_tensor(leaf)
    limits, own_limits = np.iinfo(declared.as_numpy_dtype), np.iinfo(given.as_numpy_dtype)
    low, high = max(limits.min, own_limits.min), min(limits.max, own_limits.max)
    is_inside = tf.reduce_all((values >= low) & (values <= high))
    refusal = tf.debugging.Assert(
        is_inside,
        [
            f"feature {name!r} has {given.name} numbers outside of {limits.min}..{limits.max}, the "
            f"range of the model's input of {declared.name}; Keras would turn them into other ids. "
            f"Declare it as keras.Input(shape, dtype='{given.name}'), or correct the ids"
        ],
    )
    with tf.control_dependencies([] if refusal is None else [refusal]):
        values = tf.identity(values)
    return leaf.with_flat_values(values) if is_ragged else values
