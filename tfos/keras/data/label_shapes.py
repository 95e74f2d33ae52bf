"""Label shapes: labels that are wider than the model's one unit, which Keras broadcasts silently.

    labels [batch, 2], output [batch, 1], mean squared error:
        every label of a row is compared with the same unit, and the loss is their mean

Covers: several inputs of a model that has one, of which Keras takes the first; features that Keras
would give to each other's inputs; rows without labels; one array of labels for several outputs;
outputs of known shapes, and Keras' losses that compare element by element and do not refuse this
themselves.
Does not: refuse what a loss of the user's, or an own train_step or compute_loss, may mean.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
from keras.src.models.functional import Functional

from tfos.errors import SettingsError

_ELEMENTWISE = {
    keras.losses.hinge,
    keras.losses.squared_hinge,
    keras.losses.huber,
    keras.losses.log_cosh,
    keras.losses.mean_absolute_error,
    keras.losses.mean_absolute_percentage_error,
    keras.losses.mean_squared_error,
    keras.losses.mean_squared_logarithmic_error,
    keras.losses.poisson,
}


def check_one_input(model: Any, x: Any) -> None:
    """Refuse several inputs of a Sequential with one: Keras warns, and trains on the first alone.

    Other models with one input refuse them themselves.

    Args:
        model: compiled.
        x: inputs of one batch, nested as Keras takes them.

    Raises:
        SettingsError: says how columns become one input, or several.
    """
    if not isinstance(x, list | tuple) or len(x) < 2 or not isinstance(model, keras.Sequential):
        return
    kind = type(model)
    has_own = (  # each is given all inputs
        kind.call is not keras.Sequential.call
        or kind.compute_metrics is not keras.Model.compute_metrics
    )
    if has_own or not _is_kerass(model) or len(getattr(model, "inputs", None) or ()) != 1:
        return
    raise SettingsError(
        f"the batch has {len(x)} inputs, as a list of columns with arrays or text makes several, "
        "and the model has one: Keras would leave out all but the first. Join numbers by "
        "map_fn=lambda x, y: (np.column_stack(x), y), or give the model an Input for each"
    )


def check_labels(model: Any, labels: Any) -> bool:
    """Refuse labels that a loss of Keras would compare with one unit each, or with no output.

    Args:
        model: compiled.
        labels: labels of one batch, nested as Keras takes them; each has a shape.

    Returns:
        Whether the outputs' shapes are known; a Sequential without an Input has them after its
        first batch.

    Raises:
        SettingsError: names both shapes, or the outputs.
    """
    if not getattr(model, "built", False):
        return False
    outputs = getattr(model, "outputs", None)
    if not _is_kerass(model) or not outputs:
        return True
    if len(outputs) > 1 and hasattr(labels, "shape") and _compares_several(model.loss):
        raise SettingsError(
            f"the model has {len(outputs)} outputs with losses, and the batch has one array of "
            f"labels, {_text(_shape(labels))}: a list of columns is one matrix. Give each output "
            f"its own: {_each_its_own(model, len(outputs))}"
        )
    for name, output, label, loss in _matched(model, list(outputs), labels):
        wide, unit = _shape(label), _shape(output)
        compares = _resolved(loss)
        if compares in _ELEMENTWISE and _is_broadcast(wide, unit):
            raise SettingsError(
                f"the labels of output {name!r} have the shape {_text(wide)} and the output has "
                f"{_text(unit)}: {compares.__name__} would compare all {wide[-1]} labels of "
                f"a row with its one unit. Give that layer {wide[-1]} units, or name one label "
                "column; a loss of your own may compare them so"
            )
    return True


def check_inputs(model: Any, features: Any) -> None:
    """Refuse a dict of features that Keras would give to each other's inputs.

    Keras pairs them by position: an OrderedDict in its own order, a dict in that of sorted keys.

    Args:
        model: any.
        features: features of one batch, nested as Keras takes them.

    Raises:
        SettingsError: names both orders, and the remedy.
    """
    declared = getattr(model, "_inputs_struct", None)
    if not isinstance(declared, Mapping) or not isinstance(features, Mapping):
        return
    kind = type(model)
    if kind.train_step is not keras.Model.train_step or kind.call is not Functional.call:
        return  # it may order them itself
    own, given = (
        [".".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(each)]
        for each in (declared, features)
    )
    if given != own and set(given) == set(own):
        raise SettingsError(
            f"the model's inputs are an OrderedDict in the order {own}, and the batch is a dict, "
            f"whose values Keras takes in the order {given}: inputs would get each other's "
            "features. Make the model of a dict: keras.Model(dict(inputs), outputs)"
        )


def check_has_labels(model: Any, columns: Sequence[str]) -> None:
    """Refuse rows without labels for a model that compares them by a loss of Keras.

    Args:
        model: compiled.
        columns: the rows' names; empty: their values have none.

    Raises:
        SettingsError: names the columns and the argument.
    """
    if not _is_kerass(model):
        return
    losses = [_resolved(each) for each in keras.tree.flatten(model.loss)]
    if any(str(getattr(each, "__module__", "")).startswith("keras.") for each in losses):
        have = f"the rows have {list(columns)}" if columns else "the rows have values without names"
        raise SettingsError(
            f"the batch has no labels, and the model's loss {model.loss!r} compares its outputs "
            f"with them; {have}. Name them: ctx.dataset(…, feature_cols=…, label_cols='…')"
        )


def _is_kerass(model: Any) -> bool:
    """Whether Keras' own step compares the outputs with the labels."""
    return all(
        getattr(type(model), name) is getattr(keras.Model, name)
        for name in ("train_step", "compute_loss")
    )


def _compares_several(loss: Any) -> bool:
    """Whether more than one output has a loss."""
    if isinstance(loss, Mapping | list | tuple):
        return sum(each is not None for each in keras.tree.flatten(loss)) > 1
    return loss is not None


def _matched(model: Any, outputs: list[Any], labels: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield name, output, its labels and its loss."""
    names = _names(model, len(outputs))
    for at, (name, output) in enumerate(zip(names, outputs, strict=True)):
        label, loss = (_part(each, at, name, len(outputs)) for each in (labels, model.loss))
        if label is not None and loss is not None:
            yield name, output, label, loss


def _each_its_own(model: Any, count: int) -> str:
    """Return how several outputs get their labels; one layer's outputs share its name."""
    names = _names(model, count)
    if len(set(names)) < count or len(model.output) < count:
        return "a map_fn returns them nested as the outputs, x and (y[:, :1], y[:, 1:])"
    named = ", ".join(f"{name!r}: '…'" for name in names)
    return f"of columns, label_cols={{{named}}}"


def _names(model: Any, count: int) -> list[str]:
    """Return the keys of a dict of outputs, which Keras asks of losses and labels; else names.

    They are in the order of `model.outputs`, which an OrderedDict gives them.
    """
    names = getattr(model, "output_names", None)
    if names is None:  # of a Sequential
        return [model.layers[-1].name]
    by_key = model.output
    is_flat = isinstance(by_key, Mapping) and len(by_key) == count
    if not is_flat:
        return list(names)
    return [path[0] for path, _ in keras.tree.flatten_with_path(by_key)]


def _part(nested: Any, at: int, name: str, count: int) -> Any:
    """Return what belongs to one output; None: unknown."""
    if isinstance(nested, Mapping):
        return nested.get(name)
    if isinstance(nested, list | tuple):
        return nested[at] if len(nested) == count else None
    return nested if count == 1 or isinstance(nested, str) or callable(nested) else None


def _resolved(loss: Any) -> Any:
    """Return the function behind a loss."""
    found = keras.losses.get(loss) if isinstance(loss, str) else loss
    return getattr(found, "fn", found)


def _shape(tensor: Any) -> tuple[int | None, ...]:
    return tuple(getattr(tensor, "shape", None) or ())


def _is_broadcast(labels: tuple[int | None, ...], output: tuple[int | None, ...]) -> bool:
    if len(labels) != len(output) or len(labels) < 2 or output[-1] != 1:
        return False
    return labels[-1] is not None and labels[-1] > 1


def _text(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join(['batch', *map(str, shape[1:])])}]"
