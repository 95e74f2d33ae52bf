"""Errors of lookups inside TensorFlow, which raises only its own: they are kept and raised later.

Covers: keeping an error, finding it by the number in TensorFlow's error.
Does not: look up (tfos.keras.embedding.sources).
Threads: any, several at a time: a number belongs to one lookup.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ps.errors import PSError

_MARK = re.compile(r"failed lookup (\d+): ")
_MOST = 256
"""Number of errors kept, as many as lookups may fail at the same time."""

_numbers = itertools.count(1)
_kept: deque[tuple[int, PSError]] = deque(maxlen=_MOST)
_lock = threading.Lock()


def keep(error: PSError) -> str:
    """Keep an error; return the sentence that TensorFlow's own error has to contain."""
    with _lock:
        number = next(_numbers)
        _kept.append((number, error.again()))
    return f"failed lookup {number}: {type(error).__name__}: {error.message}"


def _found(text: str) -> PSError | None:
    numbers = {int(number) for number in _MARK.findall(text)}
    with _lock:
        return next((error for number, error in _kept if number in numbers), None)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise what a lookup inside TensorFlow raised, instead of TensorFlow's own error.

    Raises:
        PSError: the error of the source of the rows; a PushError names the layer.
    """
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        failed = _found(str(error))
        if failed is None:
            raise
        raise failed.again() from None
