"""Adapted layers: what `adapt` has learned that is in no variable, so that no server brings it.

Covers: vocabularies with their weights (StringLookup, IntegerLookup, TextVectorization) and limits
of bins (Discretization); the comparison with other workers.
Does not: exchange them (tfos.keras.fit.epoch_agreement). Normalization's mean and variance are
variables (tfos.keras.step.variables).
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import keras
import msgspec


class AdaptedLayer(msgspec.Struct, frozen=True):
    """One layer, and a digest of what it has learned."""

    name: str
    digest: bytes


def adapted_layers(model: Any) -> tuple[AdaptedLayer, ...]:
    """Return the layers that hold a vocabulary or bins, in the model's order.

    Args:
        model: a Keras model, built or not.
    """
    found = ((layer.name, _learned(layer)) for layer in model._flatten_layers())
    return tuple(AdaptedLayer(name, _digest(what)) for name, what in found if what is not None)


def differing(
    own: tuple[AdaptedLayer, ...], rank: int, told: Mapping[int, tuple[AdaptedLayer, ...]]
) -> str:
    """Return how a worker's layers differ from those of another; empty: all are the same.

    Args:
        own: the layers of this worker.
        rank: its rank.
        told: the layers of each worker by rank. Names may differ, as Keras numbers layers.
    """
    for other, theirs in sorted(told.items()):
        for mine, each in zip(own, theirs, strict=False):  # another model is refused elsewhere
            if mine.digest != each.digest:
                return f"layer {mine.name!r} on worker {rank} and the same one on worker {other}"
    return ""


def _learned(layer: Any) -> Any:
    if isinstance(layer, keras.layers.Discretization):
        return layer.bin_boundaries
    if not isinstance(layer, keras.layers.StringLookup | keras.layers.IntegerLookup):
        return None
    weights: dict[str, Any] = {}
    layer.save_own_variables(weights)  # those of TF-IDF
    return _vocabulary(layer), [each.tolist() for each in weights.values()]


def _vocabulary(layer: Any) -> list[Any]:
    """Return the words in the order of their numbers; Keras' get_vocabulary is 10 times slower."""
    if not layer.lookup_table.size():
        return []
    keys, values = (each.numpy() for each in layer.lookup_table.export())
    numbers, words = (keys, values) if layer.invert else (values, keys)
    found: list[Any] = words[numbers.argsort()].tolist()
    return found


def _digest(what: Any) -> bytes:
    return hashlib.blake2b(repr(what).encode(), digest_size=16).digest()
