"""Dense embeddings: `keras.layers.Embedding` in a distributed model, whose gradient is sent dense.

Covers: which layer has a weight, the line that would replace it, the warning at distribution.
Does not: refuse a step (tfos.keras.step.gradients).      Pure, but for the log.
"""

from __future__ import annotations

import logging
from typing import Any

import keras

logger = logging.getLogger(__name__)

MAX_DENSIFIED_BYTES = 64 << 20
"""Largest dense gradient made from the rows of an embedding, in bytes; every step would send it."""
WARNED_BYTES = 1 << 20
"""Smallest weights that are warned of, in bytes; a table is not worth its lookups below it."""


def replacement(model: Any, variable: Any) -> str:
    """Return what to write instead of the layer that has a weight; empty: none has it.

    Args:
        model: model to search, nested layers included.
        variable: the weight.
    """
    for layer in _dense_layers(model):
        if any(weight is variable for weight in layer.weights):
            return _line(layer)
    return ""


def warn_of_large(model: Any) -> None:
    """Log one warning that names the large dense embeddings of a built model, if it has any.

    Training refuses those above MAX_DENSIFIED_BYTES.
    """
    found = []
    for layer in _dense_layers(model):
        num_bytes = sum(
            weight.value.dtype.size * int(weight.value.shape.num_elements())
            for weight in layer.trainable_weights
        )
        if WARNED_BYTES <= num_bytes <= MAX_DENSIFIED_BYTES:
            found.append(f"{_line(layer)}, {num_bytes} bytes")
    if found:
        logger.warning(
            "every step sends the whole gradient of these layers and receives all their weights, "
            "but a table sends only the rows of the batch. Write %s",
            "; ".join(found),
        )


def _dense_layers(model: Any) -> list[Any]:
    return [each for each in model._flatten_layers() if isinstance(each, keras.layers.Embedding)]


def _line(layer: Any) -> str:
    return (
        f"tfos.keras.Embedding({layer.output_dim}, table={layer.name!r}) instead of "
        f"keras.layers.Embedding({layer.input_dim}, {layer.output_dim}), layer {layer.name!r}"
    )
