"""Fitted inputs: casts a fit's features to the inputs' dtypes and shapes, as in a prediction.

Covers: what ctx.dataset leaves to the model: several columns of one input, lists that are images,
floats for integers.
Does not: select columns (columns) or know what fits (tfos.predict.fitting).
Runs in: workers.      Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feeding.columnar.batch import Ragged
from feeding.columnar.ops import row_of
from tfos.errors import SettingsError
from tfos.estimators.recipe import tensors_of
from tfos.feed import dataframe_columns
from tfos.feed.dataframe_columns import Leaf
from tfos.predict.fitting import Misfit, check_columns, fitted, in_order, in_shape, side_by_side
from tfos.predict.loading import input_infos
from tfos.predict.signature import TensorInfo


@dataclass(frozen=True, slots=True)
class FittedInputs:
    """Dtypes and shapes of a model's inputs; the map_fn of ctx.dataset."""

    inputs: tuple[tuple[str, TensorInfo], ...]
    num_outputs: int
    features: tuple[str, ...] = ()
    """The columns: one per input, in order, or all columns of the only input. Used in errors."""
    has_named_outputs: bool = False
    """Whether the outputs are a dict. Other names may be there twice: Keras goes by position."""

    def __call__(self, x: Any, *rest: Any) -> tuple[Any, ...]:
        """Return x, y and weight, x and y as the model takes them.

        Args:
            x: array [rows, ...]; several of them by the inputs' names, or by the columns' names
                where they fill the only input.
            rest: y and weight, if there are any.

        Raises:
            SettingsError: a value does not fit its input, or one of several columns has
                lists of several lengths.
        """
        y, weight = rest[:1], rest[1:]
        if self.num_outputs == 1:
            y = tuple(map(_joined, y))
        elif not self.has_named_outputs:
            y = tuple(tuple(each.values()) if isinstance(each, Mapping) else each for each in y)
        infos = dict(self.inputs)
        if len(infos) == 1:
            x = self._only(x, *self.inputs[0])
        elif isinstance(x, Mapping):
            x = {name: self._fitted(each, name, infos[name]) for name, each in x.items()}
        return x, *y, *weight

    def check_times(self, times: Sequence[Leaf]) -> None:
        """Refuse timestamps that an input of floats would round.

        Args:
            times: the columns of timestamps.

        Raises:
            SettingsError: an input takes one of them as floats.
        """
        for name, info in self.inputs:
            for leaf in times:
                if leaf.name in self._of_input(name):
                    dataframe_columns.check_times(leaf, info.dtype)

    def _only(self, x: Any, name: str, info: TensorInfo) -> Any:
        """Return the only input; each of several columns is checked before they are joined."""
        if isinstance(x, Mapping):
            _refuse_lists(x.values())
            parts = [self._cast(each, name, info, column=column) for column, each in x.items()]
            x = side_by_side(parts)
        return self._fitted(x, name, info)

    def _fitted(self, part: Any, name: str, info: TensorInfo) -> Any:
        if isinstance(part, Ragged):
            return Ragged(self._cast(part.values, name, info, part.offsets), part.offsets)
        values = self._cast(part, name, info)
        found = in_shape(values, info.shape)
        return values if found is None else found

    def _cast(
        self, values: Any, name: str, info: TensorInfo, offsets: Any = None, column: str = ""
    ) -> Any:
        found = fitted(values, name, info)
        if not isinstance(found, Misfit):
            return found
        row = row_of(offsets, found.place)
        columns = (column,) if column else self._of_input(name)
        where = f"feature column {', '.join(map(repr, columns))}, row {row} of a batch"
        raise SettingsError(f"{where}: {found.text}")

    def _of_input(self, name: str) -> tuple[str, ...]:
        names = [each for each, _ in self.inputs]
        return self.features if len(names) == 1 else self.features[names.index(name) :][:1]


def map_fn_of(model: Any, features: tuple[str, ...]) -> FittedInputs | None:
    """Return the map_fn that fits features to a model's inputs; None: the inputs are not fixed.

    Args:
        model: the Keras model.
        features: the columns.

    Raises:
        SettingsError: an input of lists of any length has several columns, or a column has the
            name of another input.
    """
    inputs, outputs = tensors_of(model)
    if not inputs:
        return None
    infos = tuple(input_infos(model).items())
    if len(infos) == 1:
        name, info = infos[0]
        check_columns(f"input {name!r}, {info}", len(features), is_ragged=info.is_ragged)
    has_named_outputs = isinstance(getattr(model, "output", None), dict)
    columns = in_order("features", features, "input", inputs)
    return FittedInputs(infos, len(outputs), columns, has_named_outputs)


def _joined(part: Any) -> Any:
    if not isinstance(part, tuple):
        return part
    _refuse_lists(part)
    return side_by_side(part)


def _refuse_lists(parts: Iterable[Any]) -> None:
    if any(isinstance(each, Ragged) for each in parts):
        raise SettingsError(
            "lists of several lengths cannot be put side by side. Pad them, or name one column per "
            "input of the model"
        )
