"""Strings and bytes become the ids that TensorFlow computes."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ps.string_ids.ids import with_hashed_strings


def test_strings_have_the_hash_of_tensorflow():
    texts = [["a", ""], ["Zürich", "x" * 300]]
    expected = tf.strings.to_hash_bucket_fast(tf.constant(texts), 2**63 - 1).numpy()
    assert (with_hashed_strings(texts) == expected).all()
    encoded = np.array([[each.encode() for each in row] for row in texts], object)
    assert (with_hashed_strings(encoded) == expected).all()
    assert with_hashed_strings(b"\xff\x00") == with_hashed_strings(np.array(b"\xff\x00", object))


def test_random_bytes_of_any_length_have_the_hash_of_tensorflow():
    """Most are no UTF-8; also zeros, and one as long as no id."""
    random = np.random.default_rng(0)
    texts = [random.bytes(length) for length in range(301) for _ in range(10)]
    texts += [b"\0" * length for length in range(301)] + [random.bytes(100_000)]
    random.shuffle(texts)
    expected = tf.strings.to_hash_bucket_fast(tf.constant(texts), 2**63 - 1).numpy()
    np.testing.assert_array_equal(with_hashed_strings(texts), expected)
