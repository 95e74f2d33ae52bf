"""Plain copy of a model: its Embeddings as layers of Keras alone, for where tfos is not installed.

Covers: functional and Sequential models, nested ones; all ids but ragged ones, combiners, padding.
Does not: write files (tfos.keras.export).      Threads: the caller's.

    ids ─► Hashing (strings) ─► IntegerLookup: place of the id, 0 for others ─► Embedding: its row
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ps.string_ids.ids import STRING_KEYS
from tfos.errors import UnsupportedModel
from tfos.keras.embedding.layer import Embedding

Array = np.ndarray[Any, np.dtype[Any]]


def plain_copy(model: Any, limit_bytes: int) -> Any:
    """Return a built model of Keras' own layers with the same weights and rows.

    Args:
        model: built, functional or Sequential.
        limit_bytes: of one table's rows.

    Raises:
        UnsupportedModel: a layer or model that has no such copy, or more rows than `limit_bytes`;
            the text names it and the other way.
    """
    if not isinstance(model, keras.Sequential) and not _is_functional(model):
        raise UnsupportedModel(
            f"{type(model).__name__} is a model class of your own, and calls Embeddings itself; "
            'export it with tables="beside", or write it as a functional model'
        )

    def replaced(layer: Any) -> Any:
        if isinstance(layer, Embedding):
            return _PlainEmbedding(layer, limit_bytes).model()
        if isinstance(layer, keras.Model) and not _is_plain(layer):
            return plain_copy(layer, limit_bytes)
        if not _is_plain(layer):
            raise UnsupportedModel(
                f"layer {layer.name!r} ({type(layer).__name__}) has an Embedding inside; export "
                'with tables="beside", or call the Embedding outside of it'
            )
        return layer  # the same object: its weights are the model's

    copy = keras.models.clone_model(model, clone_function=replaced, recursive=False)
    copy.name = model.name
    return copy


def _is_functional(model: Any) -> bool:
    return hasattr(model, "_operations_by_depth") and type(model) in (
        keras.Model,
        keras.src.models.functional.Functional,
    )


def _is_plain(layer: Any) -> bool:
    return not any(isinstance(each, Embedding) for each in layer._flatten_layers())


class _PlainEmbedding:
    """One Embedding as a functional model; two of one table have the rows twice.

    Keras restores no layer that several nested models share.

    Args:
        layer: to be replaced.
        limit_bytes: of the table's rows.
    """

    def __init__(self, layer: Any, limit_bytes: int) -> None:
        self._layer = layer
        self._limit_bytes = limit_bytes
        self._lookup, self._rows = self._table()

    def model(self) -> Any:
        """Return the model, called as the layer is."""
        layer = self._layer
        node = layer._inbound_nodes[-1]
        given = node.arguments.keras_tensors
        if any(getattr(tensor, "ragged", False) for tensor in given):
            raise UnsupportedModel(
                f"layer {layer.name!r} takes ragged ids, which IntegerLookup does not; export "
                'with tables="beside", or pad the ids and name the padding by pad_id'
            )
        inputs = [keras.Input(batch_shape=each.shape, dtype=each.dtype) for each in given]
        ids = inputs[0]
        keys = ids
        if ids.dtype == "string":
            keys = keras.layers.Hashing(STRING_KEYS, name=f"{layer.name}_hash")(ids)
        rows = self._rows(self._lookup(keys))
        is_id = None if layer.pad_key is None else keras.ops.not_equal(keys, layer.pad_key)
        if is_id is not None:
            rows = rows * keras.ops.expand_dims(keras.ops.cast(is_id, rows.dtype), -1)
        if layer.combiner is not None:
            rows = _combined(rows, inputs[1] if len(inputs) > 1 else None, is_id, layer.combiner)
        rows = keras.ops.cast(rows, layer.compute_dtype)
        wrapped = inputs[0] if len(inputs) == 1 else inputs
        return keras.Model(wrapped, rows, name=f"{layer.name}_plain")

    def _table(self) -> tuple[Any, Any]:
        layer = self._layer
        if layer.settings.id_kind == "uint64":
            raise UnsupportedModel(
                f"table {layer.table!r} has ids of uint64, which IntegerLookup does not hold; "
                'export with tables="beside"'
            )
        if layer.mask_zero:
            raise UnsupportedModel(
                f"layer {layer.name!r} has mask_zero=True, and a plain copy would lose the mask; "
                'export with tables="beside"'
            )
        found = layer.source.dump(layer.table, self._limit_bytes)
        keys, rows = found or (np.empty(0, np.int64), np.empty((0, layer.dim), np.float32))
        first = layer.settings.unseen_row[None]
        # An empty vocabulary is refused; the row of 0 is then that of an unseen id.
        vocabulary = keys if keys.size else np.array([0])
        lookup = keras.layers.IntegerLookup(
            vocabulary=vocabulary, num_oov_indices=1, mask_token=None, name=f"{layer.name}_ids"
        )
        weights = np.concatenate([first, rows if keys.size else first])
        embedding = keras.layers.Embedding(
            len(weights), layer.dim, weights=weights, dtype="float32", name=f"{layer.name}_rows"
        )
        return lookup, embedding


def _combined(rows: Any, weights: Any, is_id: Any, combiner: str) -> Any:
    ops: Any = keras.ops
    factors = ops.ones_like(rows[..., 0]) if weights is None else ops.cast(weights, rows.dtype)
    if is_id is not None:
        factors = factors * ops.cast(is_id, rows.dtype)
    total = ops.sum(rows * ops.expand_dims(factors, -1), axis=-2)
    if combiner == "sum":
        return total
    if combiner == "mean":
        weight = ops.sum(factors, axis=-1, keepdims=True)
    else:
        weight = ops.sqrt(ops.sum(ops.square(factors), axis=-1, keepdims=True))
    return ops.divide_no_nan(total, weight)
