"""Input shapes: features of a fit as a prediction has them: side by side, in the inputs' shapes.

Covers: what ctx.dataset leaves to the model: several columns of one input, lists that are images.
Does not: select columns (columns) or convert Arrow (tfos.predict.tensors, which has the shapes).
Runs in: workers.      Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from feeding.columnar.batch import Ragged
from tfos.errors import SettingsError
from tfos.estimators.recipe import tensors_of
from tfos.predict.tensors import in_shape, side_by_side


@dataclass(frozen=True, slots=True)
class InputShapes:
    """Shapes of a model's inputs; the map_fn of ctx.dataset."""

    inputs: tuple[tuple[str, tuple[int | None, ...]], ...]
    """Name and shape, without the rows."""
    num_outputs: int

    def __call__(self, x: Any, *rest: Any) -> tuple[Any, ...]:
        """Return x, y and weight, x and y as the model takes them.

        Args:
            x: array [rows, ...], a tuple of several columns, or by the inputs' names.
            rest: y and weight, where there are any.

        Raises:
            SettingsError: lists of several lengths in one of several columns.
        """
        y, weight = rest[:1], rest[1:]
        if self.num_outputs == 1:
            y = tuple(map(_joined, y))
        if isinstance(x, Mapping):
            shapes = dict(self.inputs)
            return {name: _shaped(each, shapes[name]) for name, each in x.items()}, *y, *weight
        if len(self.inputs) == 1:
            x = _shaped(_joined(x), self.inputs[0][1])
        return x, *y, *weight


def map_fn_of(model: Any) -> InputShapes | None:
    """Return the shapes of a model's inputs; None: they are not fixed.

    Args:
        model: of Keras.
    """
    inputs, outputs = tensors_of(model)
    if not inputs:
        return None
    shapes = [tuple(each.shape[1:]) for each in model.inputs]
    return InputShapes(tuple(zip(inputs, shapes, strict=True)), len(outputs))


def _joined(part: Any) -> Any:
    if not isinstance(part, tuple):
        return part
    if any(isinstance(each, Ragged) for each in part):
        raise SettingsError(
            "lists of several lengths cannot be put side by side: pad them, or name one column per "
            "input of the model"
        )
    return side_by_side(part)


def _shaped(part: Any, shape: tuple[int | None, ...]) -> Any:
    if isinstance(part, Ragged):
        return part
    found = in_shape(part, shape)
    return part if found is None else found
