"""Input order: features that Keras would give to another input, or leave out without an error.

    inputs OrderedDict(user=..., price=...), features {"price": ..., "user": ...}
        Keras pairs them by position: `user` gets the prices

Covers: a dict of features for named inputs; several features for a Sequential with one input.
Does not: refuse what a model's own call or step may mean; compare labels (data.label_shapes).
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
from keras.src.models.functional import Functional

from tfos.errors import SettingsError


def check_inputs(model: Any, features: Any, step: str) -> None:
    """Refuse features that Keras would give to each other's inputs, or leave out.

    Args:
        model: any.
        features: features of one batch, nested as Keras takes them.
        step: name of the model's method that gets the batch.

    Raises:
        SettingsError: names the features and the inputs, and what to do.
    """
    if isinstance(features, Mapping):
        _check_order(model, features, step)
    elif isinstance(features, list | tuple) and len(features) > 1:
        _check_one_input(model, len(features), step)


def has_keras_step(model: Any, step: str) -> bool:
    """Whether Keras' own step compares the outputs with the labels, or predicts.

    Args:
        model: any.
        step: name of the method.
    """
    return all(
        name not in vars(model) and getattr(type(model), name) is getattr(keras.Model, name)
        for name in (step, "compute_loss")
    )


def _check_order(model: Any, features: Mapping[str, Any], step: str) -> None:
    """Keras pairs by position: an OrderedDict in its own order, a dict in that of sorted keys."""
    declared = getattr(model, "_inputs_struct", None)
    kind = type(model)
    has_own_step = getattr(kind, step) is not getattr(keras.Model, step)
    has_own = has_own_step or kind.call is not Functional.call
    if not isinstance(declared, Mapping) or has_own:
        return
    own, given = (
        [".".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(each)]
        for each in (declared, features)
    )
    if given[: len(own)] == own or not set(own) <= set(given):  # Keras refuses missing ones
        return
    if surplus := [name for name in given if name not in own]:
        raise SettingsError(
            f"the batch has {given} and the model the inputs {own}, and Keras pairs them by "
            f"position: inputs would get each other's features. Leave out {surplus}, by "
            "feature_cols= or in map_fn"
        )
    raise SettingsError(
        f"Keras takes the model's inputs in the order {own} and the batch's features in the order "
        f"{given}: inputs would get each other's features. Keras sorts the keys of a dict, and not "
        "those of an OrderedDict: make a dict of each OrderedDict, in keras.Model(inputs, outputs) "
        "and in map_fn"
    )


def _check_one_input(model: Any, num_features: int, step: str) -> None:
    """Of several features Keras gives a Sequential the first; other models refuse them."""
    if not isinstance(model, keras.Sequential):
        return
    kind = type(model)
    has_own = (  # each is given all inputs
        kind.call is not keras.Sequential.call
        or kind.compute_metrics is not keras.Model.compute_metrics
    )
    if has_own or not has_keras_step(model, step) or len(getattr(model, "inputs", None) or ()) != 1:
        return
    raise SettingsError(
        f"the batch has {num_features} inputs, as a list of columns with arrays or text makes "
        "several, and the model has one: Keras would leave out all but the first. Join numbers by "
        "map_fn=lambda x, *y: (np.column_stack(x), *y), or give the model an Input for each"
    )
