"""Lists: rows of differing lengths as inputs of a model.

Covers: whether a model takes them, and the error of one that does not.
Does not: convert them (tensors).      Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras import tree

from feeding.columnar.batch import Ragged
from tfos.errors import TFOSError, UnsupportedModel


def has_lists(data: Any) -> bool:
    """Whether nested arrays or tensors hold rows of differing lengths."""
    import tensorflow as tf

    return any(isinstance(leaf, Ragged | tf.RaggedTensor) for leaf in tree.flatten(data))


def refusal_of_lists(model: Any) -> str:
    """Return why a model takes no lists; empty: it does, or its own code decides."""
    # A Dense layer would fail inside TensorFlow's product of ragged matrices, or in its build.
    has_own_code = not isinstance(model, keras.Sequential | keras.src.models.Functional)
    return "" if has_own_code or _knows_lists(model) else _refusal(model)


@contextmanager
def explained(model: Any, data: Any) -> Iterator[None]:
    """Explain what to do if a model without any part for lists fails on them.

    Args:
        model: model that runs inside the block.
        data: nested tensors that it is given.

    Raises:
        UnsupportedModel: instead of its own error.
    """
    import tensorflow as tf

    try:
        yield
    except TFOSError:
        raise
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        if has_lists(data) and not _knows_lists(model):
            raise UnsupportedModel(_refusal(model)) from error
        raise


def _knows_lists(model: Any) -> bool:
    """Whether a keras.Input is ragged or a layer looks ids up."""
    inputs = getattr(model, "inputs", None) or ()
    if any(getattr(each, "ragged", False) for each in tree.flatten(inputs)):
        return True
    layers = model._flatten_layers(include_self=False)
    # tfos.keras.Embedding declares it: its package is above this one.
    return any(
        isinstance(layer, keras.layers.Embedding) or getattr(layer, "takes_lists", False)
        for layer in layers
    )


def _refusal(model: Any) -> str:
    return (
        f"the rows of an input have differing lengths, which the model {model.name!r} does not "
        "take. Pad them in map_fn=..., or look ids up with tfos.keras.Embedding and a combiner, "
        "and declare other inputs as keras.Input(..., ragged=True)"
    )
