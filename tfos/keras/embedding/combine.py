"""Combiners: one vector per list of ids, from the vectors of its ids.

Covers: sum, mean, sqrtn; weights; padding; dense and ragged lists.      Pure functions of tensors.

With weights w (1 each if none are given) and rows v of a list's ids, padding left out:
    sum    Σ w v          mean   Σ w v / Σ w          sqrtn   Σ w v / √(Σ w²)
A list without ids, or whose weights add up to 0, gives zeros.
Source: tf.nn.embedding_lookup_sparse.
"""

from __future__ import annotations

from typing import Any, Literal

from tfos.errors import UnsupportedModel
from tfos.keras.embedding.keys import Keys

Combiner = Literal["sum", "mean", "sqrtn"]
COMBINERS: tuple[Combiner, ...] = ("sum", "mean", "sqrtn")


def combined(rows: Any, keys: Keys, weights: Any, combiner: Combiner, is_id: Any) -> Any:
    """Return one vector per list of ids.

    Args:
        rows: [n, dim], one per key.
        keys: of the lists.
        weights: floats of the lists' shape, dense or ragged as they are; None: all 1.
        combiner: how to combine.
        is_id: [n] bool, False for padding; None: there is none.

    Returns:
        [*shape of the ids without the last axis, dim].
    """
    import tensorflow as tf

    factors = None if weights is None else _flat(weights, keys, rows.dtype)
    if is_id is not None:
        kept = tf.cast(is_id, rows.dtype)
        factors = kept if factors is None else factors * kept
    if factors is not None:
        rows = rows * factors[:, None]
    total = _reduced(rows, keys)
    if combiner == "sum":
        return total
    if factors is None:
        factors = tf.ones_like(keys.flat, rows.dtype)
    weight = _reduced((factors if combiner == "mean" else factors * factors)[:, None], keys)
    return tf.math.divide_no_nan(total, weight if combiner == "mean" else _root(weight))


def _root(squares: Any) -> Any:
    """Return the root, whose gradient at 0 is 0 instead of infinite."""
    import tensorflow as tf

    if isinstance(squares, tf.RaggedTensor):
        return squares.with_flat_values(_root(squares.flat_values))
    is_zero = squares == 0
    return tf.where(is_zero, squares, tf.sqrt(tf.where(is_zero, tf.ones_like(squares), squares)))


def _reduced(values: Any, keys: Keys) -> Any:
    import tensorflow as tf

    if not keys.is_ragged:
        return tf.reduce_sum(keys.with_rows(values), -2)
    inner = keys.source
    while isinstance(inner.values, tf.RaggedTensor):
        inner = inner.values
    sums = tf.math.unsorted_segment_sum(values, inner.value_rowids(), inner.nrows())
    sums.set_shape([None, values.shape[1]])
    return sums if inner is keys.source else _outer(keys.source, sums)


def _outer(source: Any, sums: Any) -> Any:
    """Return the sums of the innermost lists in the shape of the axes above them."""
    import tensorflow as tf

    if isinstance(source.values.values, tf.RaggedTensor):
        return source.with_values(_outer(source.values, sums))
    return source.with_values(sums)


def _flat(weights: Any, keys: Keys, dtype: Any) -> Any:
    """Return the weights as [n], one per key."""
    import tensorflow as tf

    if keys.is_ragged != isinstance(weights, tf.RaggedTensor):
        kinds = ("ragged", "dense") if keys.is_ragged else ("dense", "ragged")
        raise UnsupportedModel(
            f"the ids are {kinds[0]} and their weights {kinds[1]}; give both in the same shape"
        )
    flat = weights.flat_values if keys.is_ragged else tf.convert_to_tensor(weights)
    flat = tf.reshape(tf.cast(flat, dtype), [-1])
    same = tf.debugging.assert_equal(
        tf.size(flat), tf.size(keys.flat), "an Embedding got another number of weights than ids"
    )
    with tf.control_dependencies([] if same is None else [same]):
        return tf.identity(flat)
