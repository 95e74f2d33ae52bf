"""Built: whether a model has its layers' weights, even if it was never called itself.

Covers: the question alone.
Does not: build a model (tfos.keras.data.tensors).      Threads: any; pure.
"""

from __future__ import annotations

from typing import Any


def has_built_layers(model: Any) -> bool:
    """Return whether all layers are built: by the model's call, or a `train_step` that calls them.

    Args:
        model: a Keras model.
    """
    layers = model._flatten_layers(include_self=False)
    # A vocabulary is no weight, and TextVectorization never builds the layer that holds it.
    built = [layer.built for layer in layers if not hasattr(layer, "lookup_table")]
    return all(built) and (model.built or bool(built))
