"""Ids of strings and bytes: by TensorFlow's own hash, which an exported graph computes too.

Covers: what counts as strings, the hash.
Does not: check integers (ps.tables.ids).      Imports TensorFlow for strings only.
Threads: any.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tfos.keras.embedding.keys import hashed

Array = np.ndarray[Any, Any]


def with_hashed_strings(ids: Any) -> Any:
    """Return ids with strings and bytes replaced by their hashes; integers as they are.

    The hash of a string is that of a layer: tfos.keras.embedding.keys.hashed.

    Args:
        ids: integers, strings or bytes of any shape. Arrays of bytes with a fixed length (`S8`)
            lose zero bytes at their end in numpy itself.
    """
    try:
        array = np.asarray(ids)
        if array.dtype.kind in "SU" and not isinstance(ids, np.ndarray):
            array = np.array(ids, object)  # else numpy cuts zero bytes off, and makes 1 a "1"
    except ValueError:  # of no one shape: refused with the integers
        return ids
    if array.dtype.kind not in "SUO":
        return ids
    flat = array.reshape(-1).tolist()
    if not all(isinstance(value, str | bytes) for value in flat):
        return ids
    import tensorflow as tf

    strings = tf.constant(flat, tf.string, shape=array.shape)
    return hashed(strings).numpy()
