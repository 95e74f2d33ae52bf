"""Plain copy of a model: its Embeddings as layers of Keras alone, for where tfos is not installed.

Covers: functional and Sequential models, nested ones; all ids but ragged ones, combiners, padding.
Does not: write files (tfos.keras.export).      Threads: the caller's.

    ids ─► Hashing (strings) ─► IntegerLookup: place of the id, 0 for others ─► Embedding: its row

With mask_zero, whose ids are integers, the id 0 has place 0, others place 1, and the
Embedding has the mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from ps.string_ids.ids import STRING_KEYS
from tfos.errors import UnsupportedModel
from tfos.keras.embedding.layer import Embedding, has_tables

Array = np.ndarray[Any, np.dtype[Any]]


def plain_copy(model: Any, limit_bytes: int) -> Any:
    """Return a built model of Keras' own layers with the same weights and rows.

    Args:
        model: built, functional or Sequential.
        limit_bytes: largest size of one table's rows.

    Raises:
        UnsupportedModel: a layer or model that has no such copy, or more rows than `limit_bytes`;
            the text names it and the other way.
    """
    if not isinstance(model, keras.Sequential) and not _is_functional(model):
        raise UnsupportedModel(
            f"{type(model).__name__} is a model class of your own, and calls Embeddings itself; "
            'export it with tables="beside", or write it as a functional model'
        )

    _refuse_ragged(model)
    made: dict[int, Any] = {}  # a layer that is called at two places is one

    def replaced(layer: Any) -> Any:
        if id(layer) not in made:
            made[id(layer)] = _replaced(layer, limit_bytes)
        return made[id(layer)]

    if isinstance(model, keras.Sequential):
        given = model.inputs[0]
        first = last = keras.Input(batch_shape=given.shape, dtype=given.dtype, name=given.name)
        for layer in model.layers:
            last = replaced(layer)(last)
        copy = keras.Model(first, last, name=model.name)
    else:
        with _not_compiled(model):
            copy = keras.models.clone_model(model, clone_function=replaced, recursive=False)
        copy.name = model.name
    if model.compiled:
        _compile_like(copy, model)
    return copy


@contextlib.contextmanager
def _not_compiled(model: Any) -> Iterator[None]:
    """Keep clone_model from compiling the copy by names, as `_compile_like` says."""
    was_compiled, model.compiled = model.compiled, False
    try:
        yield
    finally:
        model.compiled = was_compiled


def _compile_like(copy: Any, model: Any) -> None:
    """Compile a copy with what its model was given: by name, Keras finds nothing of the program."""
    given = dict(model._compile_config.config)
    copy.compile(**given | {"optimizer": _fresh(given["optimizer"])})
    copy.optimizer.build(copy.trainable_variables)


def _fresh(optimizer: Any) -> Any:
    """Return an optimizer of the same settings: one has the variables of one model."""
    settings = optimizer.get_config()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = _fresh(optimizer.inner_optimizer)
        return type(optimizer)(**settings | {"inner_optimizer": inner})
    if callable(optimizer._learning_rate):  # a schedule
        settings["learning_rate"] = optimizer._learning_rate
    return type(optimizer).from_config(settings)


def _replaced(layer: Any, limit_bytes: int) -> Any:
    if isinstance(layer, Embedding):
        return _PlainEmbedding(layer, limit_bytes)
    if not has_tables(layer):
        return layer  # the same object: its weights are the model's
    if isinstance(layer, keras.Model):
        return plain_copy(layer, limit_bytes)
    raise UnsupportedModel(
        f"layer {layer.name!r} ({type(layer).__name__}) has an Embedding inside; export "
        'with tables="beside", or call the Embedding outside of it'
    )


def _is_functional(model: Any) -> bool:
    return hasattr(model, "_operations_by_depth") and type(model) in (
        keras.Model,
        keras.src.models.functional.Functional,
    )


def _refuse_ragged(model: Any) -> None:
    graph = model._functional if isinstance(model, keras.Sequential) else model
    for node in (each for nodes in graph._nodes_by_depth.values() for each in nodes):
        given = node.arguments.keras_tensors
        if isinstance(node.operation, Embedding) and any(each.ragged for each in given):
            raise UnsupportedModel(
                f"layer {node.operation.name!r} takes ragged ids, which IntegerLookup does not; "
                'export with tables="beside", or pad the ids and name the padding by pad_id'
            )


class _PlainEmbedding:
    """One Embedding as layers of Keras; two of one table have the rows twice.

    Keras restores no layer that several nested models share.

    Args:
        layer: to be replaced.
        limit_bytes: largest size of the table's rows.
    """

    def __init__(self, layer: Any, limit_bytes: int) -> None:
        self._layer = layer
        self._limit_bytes = limit_bytes
        self._lookup, self._rows = self._table()
        self._hash: Any = None

    def __call__(self, ids: Any, weights: Any = None, training: Any = None) -> Any:  # noqa: ARG002
        """Return the result of one call of the layer, with its arguments."""
        layer = self._layer
        ids, weights = ids if isinstance(ids, list | tuple) else (ids, weights)
        keys = ids
        if ids.dtype == "string":
            if self._hash is None:
                self._hash = keras.layers.Hashing(STRING_KEYS, name=f"{layer.name}_hash")
            keys = self._hash(ids)
        rows = self._rows(self._lookup(keys))
        if layer.mask_zero:
            return rows  # of the Embedding itself: operations on it would lose its mask
        is_id = None if layer.pad_key is None else keras.ops.not_equal(keys, layer.pad_key)
        if is_id is not None:
            rows = rows * keras.ops.expand_dims(keras.ops.cast(is_id, rows.dtype), -1)
        if layer.combiner is not None:
            rows = _combined(rows, weights, is_id, layer.combiner)
        return keras.ops.cast(rows, layer.compute_dtype)

    def _table(self) -> tuple[Any, Any]:
        layer = self._layer
        if layer.settings.id_kind == "uint64":
            raise UnsupportedModel(
                f"table {layer.table!r} has ids of uint64, which IntegerLookup does not hold; "
                'export with tables="beside"'
            )
        found = layer.source.dump(layer.table, self._limit_bytes)
        keys, rows = found or (np.empty(0, np.int64), np.empty((0, layer.dim), np.float32))
        first = layer.settings.unseen_row[None]
        masks = layer.mask_zero
        if masks:  # place 0 is that of the id 0, place 1 that of an unseen one
            keys, rows = keys[keys != 0], rows[keys != 0]
            first = np.concatenate([np.zeros_like(first), first])
        # An empty vocabulary is refused; the row of its one id is then that of an unseen one.
        vocabulary = keys if keys.size else np.array([int(masks)])
        lookup = keras.layers.IntegerLookup(
            vocabulary=vocabulary,
            num_oov_indices=1,
            mask_token=0 if masks else None,
            name=f"{layer.name}_ids",
        )
        weights = np.concatenate([first, rows if keys.size else first[-1:]])
        embedding = keras.layers.Embedding(
            len(weights),
            layer.dim,
            weights=weights,
            mask_zero=masks,
            dtype=layer.dtype_policy if masks else "float32",
            name=f"{layer.name}_rows",
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
        squares = ops.sum(ops.square(factors), axis=-1, keepdims=True)
        is_zero = ops.equal(squares, 0)  # there the root's gradient is infinite
        weight = ops.where(is_zero, squares, ops.sqrt(ops.where(is_zero, 1.0, squares)))
    return ops.divide_no_nan(total, weight)
