"""Datasets of these tests run without TensorFlow's tuning of them.

An iterator that is freed waits for the thread that tunes it, and that thread may miss the
cancellation: it looks at `IsCancelled()`, which TensorFlow sets only after it has woken it. It then
sleeps for the rest of its period, which grows with the iterator's age to 60 s. Rows of
`ctx.dataset` and `ctx.read` reach `fit` without such an iterator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf


@pytest.fixture(autouse=True, scope="session")
def untuned_datasets() -> Iterator[None]:
    iterate = tf.data.Dataset.__iter__

    def untuned(dataset: Any) -> Any:
        options = tf.data.Options()
        options.autotune.enabled = False
        return iterate(dataset.with_options(options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.data.Dataset, "__iter__", untuned)
        yield


@pytest.fixture(scope="module")
def deterministic() -> Iterator[None]:
    """Operations give the same bits again, in all tests of the module."""
    tf.config.experimental.enable_op_determinism()
    yield
    # No public way back: another module of the same process would otherwise inherit it.
    from tensorflow.python.framework import config

    config.disable_op_determinism()
