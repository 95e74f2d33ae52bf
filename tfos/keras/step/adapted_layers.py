"""Adapted layers: what `adapt` has learned that the servers' values do not bring by themselves.

Covers: vocabularies with their weights (StringLookup, IntegerLookup, TextVectorization) and limits
of bins (Discretization), which no variable holds; their comparison with other workers, and with
the record on the servers of what the parameters were trained with; Normalization after the servers
have given its variables values (tfos.keras.step.attach).
Does not: exchange the digests between workers (tfos.keras.fit.epoch_agreement).
Threads: the thread that attaches the model or runs `fit`.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import msgspec
import numpy as np

from tfos.errors import SettingsError
from tfos.keras.protocols import WorkerContext

METADATA_NAME = "tfos.adapted"
_SERVED = "the servers' parameters"
_digests: weakref.WeakKeyDictionary[Any, tuple[Any, bytes, int]] = weakref.WeakKeyDictionary()
"""Weights, digest and size by vocabulary: Keras makes another table for other words, and a million
words take a second."""


class AdaptedLayer(msgspec.Struct, frozen=True):
    """One layer, and a digest of what it has learned."""

    name: str
    digest: bytes
    size: int = 0
    """Number of its words or limits of bins."""


class _Learned(NamedTuple):
    """What one layer has learned."""

    values: list[Any]
    """Words in the order of their numbers, or limits of bins."""
    weights: list[float] | None = None
    can_grow: bool = False
    """Whether further values leave the numbers of the first ones as they are."""

    def digest(self, size: int | None = None) -> bytes:
        """Return the digest of all values, or of the first `size`."""
        what = repr((self.values[:size], self.weights))
        return hashlib.blake2b(what.encode(), digest_size=16).digest()


class AdaptedRecord:
    """The record of what the layers had learned when the servers' parameters were trained.

    It is metadata of the run, so checkpoints contain it. The chief compares and keeps it; the other
    workers compare with the chief at each fit (tfos.keras.fit.epoch_agreement).

    Args:
        ctx: the worker's context.
        client: the process's PSClient.
        model: the model.
    """

    def __init__(self, ctx: WorkerContext, client: Any, model: Any) -> None:
        self._ctx = ctx
        self._client = client
        self._model = model
        self._kept: tuple[AdaptedLayer, ...] | None = None

    def attached(self) -> None:
        """Compare with the servers' record, once they are filled, and keep it up to date.

        Raises:
            SettingsError: a layer has learned something else.
        """
        if self._ctx.is_chief and _found(self._model):
            kept = recorded(self._client.metadata())
            self._keep(check_like(self._model, kept, _SERVED, may_be_empty=True))

    def begin_fit(self) -> None:
        """Compare with what the layers had learned before. Raises as `attached`."""
        if self._kept is None:
            return
        if (now := check_like(self._model, self._kept, _SERVED)) != self._kept:
            self._keep(now)

    def _keep(self, now: tuple[AdaptedLayer, ...]) -> None:
        self._kept = now
        self._client.set_metadata(METADATA_NAME, msgspec.to_builtins(now), of_run=True)


def recorded(metadata: Mapping[str, Any]) -> tuple[AdaptedLayer, ...]:
    """Return the layers with which parameters were trained; empty: it is unknown, or none.

    Args:
        metadata: metadata of the servers.
    """
    return msgspec.convert(metadata.get(METADATA_NAME, ()), tuple[AdaptedLayer, ...])


def check_like(
    model: Any, kept: tuple[AdaptedLayer, ...], what: str, *, may_be_empty: bool = False
) -> tuple[AdaptedLayer, ...]:
    """Refuse a model whose layers have learned something else than when parameters were trained.

    Words that were added at the end are accepted: the others keep their numbers.

    Args:
        model: a Keras model.
        kept: the layers then. Names may differ, as Keras numbers layers.
        what: the parameters, for the message.
        may_be_empty: whether a layer that has learned nothing is one to be adapted yet.

    Returns:
        The model's layers, those of `kept` for the ones to be adapted yet.

    Raises:
        SettingsError: the text names the layer, and what to do.
    """
    found, layers = _found(model), adapted_layers(model)
    named = {each.name: each for each in kept}
    result = []
    for at, (now, layer) in enumerate(zip(layers, found, strict=True)):
        # Keras numbers layers anew, and a program may name its columns in another order.
        befores = [named[now.name]] if now.name in named else []
        if len(layers) == len(kept):
            befores.insert(0, kept[at])
        elif befores:  # layers have moved into, or out of, the data's own map: numbers shift
            befores = list(kept)
        if may_be_empty and not now.size and befores:
            result.append(named.get(now.name, befores[0]))
            continue
        if befores and not any(_is_like(layer, now, before) for before in befores):
            _refuse(now, named.get(now.name, befores[0]), what)
        result.append(now)
    return tuple(result)


def adapted_layers(model: Any) -> tuple[AdaptedLayer, ...]:
    """Return the layers that hold a vocabulary or bins, in the model's order.

    Args:
        model: a Keras model, built or not.
    """
    return tuple(AdaptedLayer(each.name, *_digest_and_size(each)) for each in _found(model))


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


def _found(model: Any) -> list[Any]:
    kinds = keras.layers.Discretization | keras.layers.StringLookup | keras.layers.IntegerLookup
    return [each for each in model._flatten_layers() if isinstance(each, kinds)]


def _is_like(layer: Any, now: AdaptedLayer, before: AdaptedLayer) -> bool:
    if now.digest == before.digest or not before.size:
        return True
    learned = _learned(layer) if before.size < now.size else None
    return learned is not None and learned.can_grow and learned.digest(before.size) == before.digest


def _refuse(now: AdaptedLayer, before: AdaptedLayer, what: str) -> None:
    raise SettingsError(
        f"layer {now.name!r} has learned {now.size} words or limits of bins "
        f"(digest {now.digest.hex()[:8]}), but {what} were trained with "
        f"{before.size} others (digest {before.digest.hex()[:8]}), so the same number "
        "would mean different things. Give it the same on every worker and in every run, "
        "instead of adapting: StringLookup(vocabulary=...), Discretization(bin_boundaries=...); "
        "new words may follow at the end. For another vocabulary, train anew, with "
        "another Checkpoints(directory=...)"
    )


def _digest_and_size(layer: Any) -> tuple[bytes, int]:
    table, weights = getattr(layer, "lookup_table", None), getattr(layer, "idf_weights_const", None)
    known = None if table is None else _digests.get(table)
    if known is not None and known[0] is weights:
        return known[1:]
    learned = _learned(layer)
    result = learned.digest(), len(learned.values)
    if table is not None:
        _digests[table] = (weights, *result)
    return result


def _learned(layer: Any) -> _Learned:
    if isinstance(layer, keras.layers.Discretization):
        limits = layer.bin_boundaries
        as_computed = np.asarray([] if limits is None else limits, "float32")
        return _Learned(list(as_computed.tolist()))
    weights = getattr(layer, "idf_weights_const", None)  # unset before `adapt`, as the vocabulary
    if weights is None:
        return _Learned(_vocabulary(layer), can_grow=True)
    return _Learned(_vocabulary(layer), weights.numpy().tolist())


def _vocabulary(layer: Any) -> list[Any]:
    """Return the words in the order of their numbers; Keras' get_vocabulary is 10 times slower."""
    if not layer.lookup_table.size():
        return []
    keys, values = (each.numpy() for each in layer.lookup_table.export())
    numbers, words = (keys, values) if layer.invert else (values, keys)
    found: list[Any] = words[numbers.argsort()].tolist()
    return found
