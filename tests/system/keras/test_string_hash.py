"""Strings and bytes become the ids that TensorFlow computes."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfos.keras.embedding.string_ids import with_hashed_strings


def test_strings_have_the_hash_of_tensorflow():
    texts = [["a", ""], ["Zürich", "x" * 300]]
    expected = tf.strings.to_hash_bucket_fast(tf.constant(texts), 2**63 - 1).numpy()
    assert (with_hashed_strings(texts) == expected).all()
    encoded = np.array([[each.encode() for each in row] for row in texts], object)
    assert (with_hashed_strings(encoded) == expected).all()
    assert with_hashed_strings(b"\xff\x00") == with_hashed_strings(np.array(b"\xff\x00", object))
