"""Adapted layers: what `adapt` has learned that the servers' values do not bring by themselves.

Covers: vocabularies with their weights (StringLookup, IntegerLookup, TextVectorization) and limits
of bins (Discretization), which no variable holds; their comparison with other workers;
Normalization after the servers have given its variables values (tfos.keras.step.attach).
Does not: exchange the digests (tfos.keras.fit.epoch_agreement).
Threads: the thread that attaches the model or runs `fit`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
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


@contextlib.contextmanager
def renewing_normalization(model: Any) -> Iterator[None]:
    """Let Normalization compute with the values that its variables get in the block.

    It computes with tensors that were made of them, which Keras' compiled functions hold as well.

    Args:
        model: a built Keras model.
    """
    layers = list(model._flatten_layers())
    scaling = [each for each in layers if isinstance(each, keras.layers.Normalization)]
    before = [v.numpy().tobytes() for layer in scaling for v in layer.non_trainable_variables]
    yield
    for layer in scaling:
        layer.finalize_state()
    if before == [v.numpy().tobytes() for layer in scaling for v in layer.non_trainable_variables]:
        return
    for each in layers:
        if not isinstance(each, keras.Model):
            continue
        if each.test_function is not None:
            each.make_test_function(force=True)
        if each.predict_function is not None:
            each.make_predict_function(force=True)


def _learned(layer: Any) -> Any:
    if isinstance(layer, keras.layers.Discretization):
        return layer.bin_boundaries
    if not isinstance(layer, keras.layers.StringLookup | keras.layers.IntegerLookup):
        return None
    weights = getattr(layer, "idf_weights_const", None)  # unset before `adapt`, as the vocabulary
    return _vocabulary(layer), None if weights is None else weights.numpy().tolist()


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
