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
        rows: rows, [n, dim], one per key.
        keys: keys of the lists.
        weights: floats of the lists' shape; those of ragged ids may be dense, of one length.
            None: all 1.
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
    return _sums_of_lists(values, keys.source)


def _sums_of_lists(values: Any, source: Any) -> Any:
    """Return the sums of the innermost lists in the shape of the axes above them."""
    import tensorflow as tf

    if isinstance(source.values, tf.RaggedTensor):
        return source.with_values(_sums_of_lists(values, source.values))
    sums = tf.math.unsorted_segment_sum(values, source.value_rowids(), source.nrows())
    sums.set_shape([None, values.shape[1]])
    return sums


def _flat(weights: Any, keys: Keys, dtype: Any) -> Any:
    """Return the weights as [n], one per key."""
    import tensorflow as tf

    is_dense = not isinstance(weights, tf.RaggedTensor)
    if keys.is_ragged and is_dense and keys.source.shape.rank == weights.shape.rank == 2:
        # A feed makes lists of strings ragged, but numbers a matrix while all have one length.
        weights = tf.RaggedTensor.from_tensor(weights)
    if keys.is_ragged != isinstance(weights, tf.RaggedTensor):
        kinds = ("ragged", "dense") if keys.is_ragged else ("dense", "ragged")
        raise UnsupportedModel(
            f"the ids are {kinds[0]} and their weights {kinds[1]}; give both in the same shape"
        )
    same = _has_shape_of(weights, keys.source)
    flat = weights.flat_values if keys.is_ragged else tf.convert_to_tensor(weights)
    flat = tf.reshape(tf.cast(flat, dtype), [-1])
    stopped = tf.debugging.Assert(same, [_OTHER_LISTS])
    with tf.control_dependencies([] if stopped is None else [stopped]):
        # XLA leaves assertions out: there NaN, which no training takes, stops the step.
        return tf.where(same, flat, tf.constant(float("nan"), flat.dtype))


_OTHER_LISTS = (
    "an Embedding got weights whose shape or list lengths differ from those of the ids; "
    "give one weight to each id: weights [[0.5, 1.0], [1.0]] for ids [[7, 8], [9]]"
)


def _has_shape_of(weights: Any, ids: Any) -> Any:
    """Return whether two inputs of one kind have one shape, as a tensor: of ragged, list by list.

    Raises:
        UnsupportedModel: the one has lists in lists, the other has not.
    """
    import tensorflow as tf

    if not isinstance(ids, tf.RaggedTensor):
        return _are_equal(tf.shape(weights), tf.shape(ids))
    if weights.ragged_rank != ids.ragged_rank:
        raise UnsupportedModel(
            f"the ids are lists of ragged_rank {ids.ragged_rank} and their weights of ragged_rank "
            f"{weights.ragged_rank}; give one weight to each id"
        )
    found = _are_equal(tf.shape(weights.flat_values), tf.shape(ids.flat_values))
    for own, other in zip(weights.nested_row_splits, ids.nested_row_splits, strict=True):
        if own is not other:
            found &= _are_equal(tf.cast(own, other.dtype), other)
    return found


def _are_equal(one: Any, other: Any) -> Any:
    """Return whether two vectors have equal lengths and numbers, as a tensor."""
    import tensorflow as tf

    if not one.shape.is_compatible_with(other.shape):
        return tf.constant(False)
    # The raw operation returns False for other lengths, where tf.equal fails with its own text.
    return tf.reduce_all(tf.raw_ops.Equal(x=one, y=other, incompatible_shape_error=False))


def check_weights(ids_shape: Any, weights_shape: Any, name: str) -> None:
    """Refuse weights whose shape cannot be that of the ids, before anything runs.

    Args:
        ids_shape: shape of the ids; None for a size that is not known yet.
        weights_shape: shape of the weights.
        name: name of the layer.

    Raises:
        UnsupportedModel: holds both shapes.
    """
    ids, weights = tuple(ids_shape), tuple(weights_shape)
    pairs = zip(ids, weights, strict=False)
    if len(ids) != len(weights) or any(None not in pair and len({*pair}) > 1 for pair in pairs):
        raise UnsupportedModel(
            f"layer {name!r} got ids of shape {ids} and weights of shape {weights}; give one "
            f"weight to each id: keras.Input({ids[1:]}) for the weights, or keras.ops.repeat one "
            "weight of a list to the number of its ids"
        )
