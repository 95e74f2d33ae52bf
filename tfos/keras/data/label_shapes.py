"""Label shapes: labels that are wider than the model's one unit, which Keras broadcasts silently.

    labels [batch, 2], output [batch, 1], mean squared error:
        every label of a row is compared with the same unit, and the loss is their mean

Labels of text are refused, too: a loss of Keras ends on them in TensorFlow's words, which name
neither the output nor the way out.

Covers: rows without labels; one array of labels for several outputs; outputs of known shapes, and
Keras' losses that compare element by element and do not refuse this themselves.
Does not: refuse what a loss of the user's, or an own step or compute_loss, may mean; compare
features with inputs (tfos.keras.input_order).  Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfos.errors import SettingsError
from tfos.keras.input_order import has_keras_step

_ELEMENTWISE = (  # no set: a loss of the user's may have no hash
    keras.losses.hinge,
    keras.losses.squared_hinge,
    keras.losses.huber,
    keras.losses.log_cosh,
    keras.losses.mean_absolute_error,
    keras.losses.mean_absolute_percentage_error,
    keras.losses.mean_squared_error,
    keras.losses.mean_squared_logarithmic_error,
    keras.losses.poisson,
)


def check_labels(model: Any, labels: Any, step: str = "train_step") -> bool:
    """Refuse labels that a loss of Keras would compare with one unit each, or with no output.

    Args:
        model: compiled.
        labels: labels of one batch, nested as Keras takes them; each has a shape.
        step: name of the model's method that gets the batch.

    Returns:
        Whether the outputs' shapes are known; a Sequential without an Input has them after its
        first batch.

    Raises:
        SettingsError: names both shapes, or the outputs; or labels are text.
    """
    if not getattr(model, "built", False):
        return False
    outputs = getattr(model, "outputs", None)
    if not has_keras_step(model, step) or not outputs:
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
        if _is_text(label) and is_of_keras(loss):
            raise SettingsError(
                f"the labels of output {name!r} are text, and {_name(compares)} compares numbers. "
                "Feed numbers: df.withColumn(name, col(name).cast('float')), or for words their "
                "class, when(col(name) == 'yes', 1).otherwise(0)"
            )
        if compares in _ELEMENTWISE and _is_broadcast(wide, unit):
            raise SettingsError(
                f"the labels of output {name!r} have the shape {_text(wide)} and the output has "
                f"{_text(unit)}: {compares.__name__} would compare all {wide[-1]} labels of "
                f"a row with its one unit. Give that layer {wide[-1]} units, or name one label "
                "column; a loss of your own may compare them so"
            )
    return True


def check_has_labels(model: Any, columns: Sequence[str], step: str) -> None:
    """Refuse rows without labels for a model that compares them by a loss of Keras.

    Args:
        model: compiled.
        columns: the rows' names; empty: their values have none.
        step: name of the model's method that gets the batch.

    Raises:
        SettingsError: names the columns and the argument.
    """
    if not has_keras_step(model, step):
        return
    if any(map(is_of_keras, keras.tree.flatten(model.loss))):
        have = f"the rows have {list(columns)}" if columns else "the rows have values without names"
        raise SettingsError(
            f"the batch has no labels, and the model's loss {model.loss!r} compares its outputs "
            f"with them; {have}. Name them: ctx.dataset(…, feature_cols=…, label_cols='…')"
        )


def is_of_keras(loss: Any) -> bool:
    """Whether Keras itself compares: not a function of the user's, nor a call of a subclass."""
    return str(getattr(_resolved(loss), "__module__", "")).startswith("keras.")


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
    """Return the function behind a loss; a subclass with a call of its own may mean another."""
    found = keras.losses.get(loss) if isinstance(loss, str) else loss
    has_own = any(
        getattr(type(found), name, None) is not getattr(keras.losses.MeanSquaredError, name)
        for name in ("call", "__call__")
    )
    return found if has_own else getattr(found, "fn", found)


def _name(loss: Any) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))


def _is_text(labels: Any) -> bool:
    dtype = getattr(labels, "dtype", None)
    if isinstance(dtype, np.dtype):
        objects = labels if dtype.kind == "O" else ()  # of numpy or pandas
        return dtype.kind in "SU" or isinstance(next(iter(np.ravel(objects)), 0), str | bytes)
    return bool(dtype == "string")  # TensorFlow's compares equal to its name


def _shape(tensor: Any) -> tuple[int | None, ...]:
    return tuple(getattr(tensor, "shape", None) or ())


def _is_broadcast(labels: tuple[int | None, ...], output: tuple[int | None, ...]) -> bool:
    if len(labels) != len(output) or len(labels) < 2 or output[-1] != 1:
        return False
    return labels[-1] is not None and labels[-1] > 1


def _text(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join(['batch', *map(str, shape[1:])])}]"
