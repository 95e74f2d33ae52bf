"""Keys: what a layer's input names in its table, as one flat int64 tensor.

Covers: integers of any width, strings and bytes by a hash, dense and ragged shapes, padding.
Does not: look anything up (row_flow), combine rows (combine).      Pure functions of tensors.

A string's key is `tf.strings.to_hash_bucket_fast(text, STRING_KEYS)`. It is the same on every
machine and in an exported graph; ps.string_ids computes it without TensorFlow.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from ps.string_ids.ids import STRING_KEYS
from tfos.errors import SettingsError, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one call of a layer."""

    flat: Any
    """[n] int64: the ids; those of uint64 as bits."""
    source: Any
    """The dense or ragged input that they come from."""

    @property
    def is_ragged(self) -> bool:
        """Whether the rows of the input have different lengths."""
        import tensorflow as tf

        return isinstance(self.source, tf.RaggedTensor)

    def with_rows(self, rows: Any) -> Any:
        """Return `rows` [n, dim] in the input's shape: [*shape, dim], or ragged."""
        import tensorflow as tf

        if self.is_ragged:
            return self.source.with_flat_values(rows)
        shape = tf.concat([tf.shape(self.source), tf.shape(rows)[1:]], 0)
        shaped = tf.reshape(rows, shape)
        shaped.set_shape([*self.source.shape, rows.shape[1]])
        return shaped


def keys_of(ids: Any, name: str) -> Keys:
    """Return the keys of a layer's input.

    Args:
        ids: integers or strings, dense of any shape or ragged.
        name: name of the layer, for messages.

    Raises:
        UnsupportedModel: floats, bools, or a sparse tensor.
    """
    import tensorflow as tf

    if isinstance(ids, tf.SparseTensor):
        raise UnsupportedModel(
            f"layer {name!r} got a SparseTensor; give it a RaggedTensor "
            "(tf.RaggedTensor.from_sparse), or pad the ids and name the padding by pad_id"
        )
    if not isinstance(ids, tf.RaggedTensor):
        ids = tf.convert_to_tensor(ids)
    values = ids.flat_values if isinstance(ids, tf.RaggedTensor) else ids
    if values.dtype == tf.string:
        flat = hashed(values)
    elif values.dtype.is_integer:
        flat = (
            tf.bitcast(values, tf.int64) if values.dtype == tf.uint64 else tf.cast(values, tf.int64)
        )
    else:
        raise UnsupportedModel(
            f"layer {name!r} got ids of dtype {values.dtype.name}: it takes integers, which floats "
            "round above 2^24, or strings. Declare the input, also of a Sequential: "
            "keras.Input(shape, dtype='int64') or dtype='string'"
        )
    return Keys(tf.reshape(flat, [-1]), ids)


def hashed(texts: Any) -> Any:
    """Return the keys of strings: int64 of the same shape."""
    import tensorflow as tf

    return tf.strings.to_hash_bucket_fast(texts, STRING_KEYS)


def is_text(dtype: Any) -> bool:
    """Whether ids of a dtype are strings."""
    return bool(dtype == "string")  # of Keras; TensorFlow's compares equal to its name


def as_text(pad_id: bytes) -> str:
    """Return bytes as a string that `pad_key` takes for them, also those that are no UTF-8."""
    return pad_id.decode(errors="surrogateescape")


def pad_given(pad_id: Any) -> int | str | bytes | None:
    """Return the id that stands for nothing from what a user may give.

    Args:
        pad_id: an integer, also numpy's, a string, bytes, or None.

    Raises:
        SettingsError: something else, or no integer of 64 bits.
    """
    if pad_id is None or isinstance(pad_id, str | bytes):
        return pad_id
    try:
        found = operator.index(pad_id)
    except TypeError:
        raise SettingsError(f"pad_id={pad_id!r} must be an integer, a string or bytes") from None
    if not -(1 << 63) <= found < 1 << 64:
        raise SettingsError(f"pad_id={pad_id!r} must be from -2^63 to 2^64 - 1")
    return found


def pad_key(pad_id: int | str | bytes) -> int:
    """Return the key of the id that stands for nothing."""
    import tensorflow as tf

    if isinstance(pad_id, str):
        pad_id = pad_id.encode(errors="surrogateescape")
    if isinstance(pad_id, bytes):
        with tf.init_scope():  # a layer may ask while a step is traced
            return int(hashed(pad_id))
    return pad_id - (1 << 64) if pad_id >= 1 << 63 else pad_id  # the bits, as of ids of uint64
