"""Keras' evaluate and predict of models with tables: without XLA, by rank, and with rows.

Covers: what Keras' own loops cannot do: compile a lookup, take inputs whose rank changes, explain a
call without rows.
Does not: run steps of a training (tfos.keras.step).
Threads: predictions and evaluations of one model may be several at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from tfos.errors import SettingsError
from tfos.keras import lookup_errors

Ranks = tuple[int | None, ...]


def making(original: Callable[..., Any], name: str, wanted: Callable[[Any], bool]) -> Any:
    """Return Keras' make_test_function or make_predict_function, for models with tables as well.

    XLA cannot compile the lookup inside a call. Training steps have their rows before they begin.

    Args:
        original: Keras' own.
        name: name of the attribute that it sets.
        wanted: whether a model has tables.
    """

    @functools.wraps(original)
    def make_function(self: Any, force: bool = False) -> Any:
        if not wanted(self):
            return original(self, force)
        if isinstance(getattr(self, name), _ByRank) and not force:
            return None

        def made() -> Callable[..., Any]:
            plain = _WithoutXla(self)
            original(plain, True)
            found: Callable[..., Any] = getattr(plain, name)
            return found

        by_rank = _ByRank(made)
        setattr(self, name, by_rank)
        return None

    return make_function


class _WithoutXla:
    """Stand-in for a model while Keras makes a function of it; it gets the function instead.

    The model itself does not change: other threads call it meanwhile.

    Args:
        model: a Keras model.
    """

    jit_compile = False

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _make_function(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._model)._make_function(self, *args, **kwargs)  # asks for jit_compile


class _ByRank:
    """A function for each combination of input ranks.

    As soon as a second rank comes, Keras' own function is traced for inputs of unknown rank, which
    a model's layers do not take.

    Args:
        make: function that returns a new one.
    """

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        self._make = make
        self._made: dict[Ranks, Callable[..., Any]] = {}

    def __call__(self, data: Any) -> Any:
        import tensorflow as tf

        if isinstance(data, Generator):  # test_on_batch gives its one batch so
            batches = list(data)
            leaves, data = tf.nest.flatten(batches), iter(batches)
        else:
            leaves = tf.nest.flatten(getattr(data, "element_spec", data))
        ranks = tuple(map(_rank, leaves))
        if ranks not in self._made:
            self._made.setdefault(ranks, self._make())  # another thread may have been first
        with lookup_errors.typed_errors():
            return self._made[ranks](data)


def _rank(leaf: Any) -> int | None:
    """Return the rank of a tensor, of a dataset's spec or of an array."""
    shape: Any = getattr(leaf, "shape", None)
    rank: int | None = shape.rank if hasattr(shape, "rank") else np.ndim(leaf)
    return rank


def predicting(predict: Callable[..., Any], wanted: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return Keras' predict, which explains the failure if a model with tables gets no rows.

    Args:
        predict: the method of keras.Model.
        wanted: whether a model has tables.
    """
    refusing = refusing_no_rows(predict)

    @functools.wraps(predict)
    def predicting_rows(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (refusing if wanted(self) else predict)(self, *args, **kwargs)

    return predicting_rows


def refusing_no_rows(predict: Callable[..., Any]) -> Callable[..., Any]:
    """Return `predict`, which explains the failure for no rows; Keras fails at its own variable."""

    @functools.wraps(predict)
    def predicting(*args: Any, **kwargs: Any) -> Any:
        try:
            return predict(*args, **kwargs)
        except UnboundLocalError as error:
            if error.name != "batch_outputs" and "'batch_outputs'" not in str(error):
                raise
            raise SettingsError(
                "predict() got 0 rows, so the shape of its result is unknown; check len(x) first, "
                "or call predict_on_batch(x), which returns no rows for none"
            ) from None

    return predicting
