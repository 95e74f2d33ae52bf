"""Column plan: which columns of a DataFrame are features, labels and weights of a fit.

Covers: the checks at `fit`, before any node starts; the selectors of `ctx.dataset`.
Does not: look at rows (tfos.estimators.training), import pyspark: types are known by their names.
Runs in: the driver and in workers.      Pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfos.errors import SettingsError
from tfos.feed import dataframe_columns
from tfos.feed.dataframe_columns import Leaf
from tfos.predict.fitting import check_columns, in_order, in_shape
from tfos.predict.signature import TensorInfo

_TEXTS = {"string", "char", "varchar", "binary"}
_TIMES = {"date", "timestamp", "timestamp_ntz"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPlan:
    """The columns of a fit, by their role."""

    features: tuple[str, ...]
    labels: tuple[str, ...] = ()
    weight: str | None = None
    validation: str | None = None
    """Column that is true or not 0 where a row validates; it is not fed."""
    words: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The caller's argument names that differ from the Params of spark.ml; "features" and "labels":
    those by which it named a single column."""

    @property
    def fed(self) -> list[str]:
        """All columns that reach workers, each once."""
        names = [*self.features, *self.labels, *([self.weight] if self.weight else ())]
        return list(dict.fromkeys(names))

    @property
    def used(self) -> list[str]:
        """All columns that a fit looks at, each once."""
        return list(dict.fromkeys([*self.fed, *([self.validation] if self.validation else ())]))

    def check(self, fields: Sequence[tuple[str, Any]]) -> None:
        """Refuse columns that a fit cannot use.

        Args:
            fields: name and type of the DataFrame's columns.

        Raises:
            SettingsError: a column is missing, named twice, or of an unsupported type; names
                column, type and remedy.
        """
        names = [name for name, _ in fields]
        for role, asked in self._roles():
            _check_names(role, asked, names)
        kinds = dict(fields)
        leaves = dataframe_columns.leaves([(name, kinds[name]) for name in self.fed])
        by_name = {leaf.name: leaf for leaf in leaves}
        for name in self.fed:
            dataframe_columns.check_plain(name, kinds[name])
        for name in self.labels:
            _check_number("label column", by_name[name])
        if self.weight is not None:
            _check_number("weight column", by_name[self.weight], is_list=False)
        if self.validation is not None:
            word = self._word("validationCol")
            _check_flag(f"{word} {self.validation!r}", kinds[self.validation])

    def check_model(
        self,
        fields: Sequence[tuple[str, Any]],
        inputs: Mapping[str, TensorInfo],
        outputs: Sequence[str],
    ) -> None:
        """Refuse columns that do not fit the model.

        Args:
            fields: name and type of the DataFrame's columns.
            inputs: the model's inputs, in its own order; empty: unknown.
            outputs: names, in the model's own order; empty: unknown.

        Raises:
            SettingsError: the number of columns differs from that of inputs or outputs, two columns
                have the same name, an input of numbers gets text or timestamps, an input of ids
                gets floats, an input of lists of any length gets several columns, or columns
                without lists are more or fewer than an input's values.
        """
        if len(inputs) > 1 and len(self.features) != len(inputs):
            raise SettingsError(
                f"the model has {len(inputs)} inputs, {self._word('featuresCols')} is "
                f"{list(self.features)}. Name one column per input, in the order of the inputs: "
                f"{list(inputs)}; for a dict, its sorted keys"
            )
        if len(outputs) > 1 and len(self.labels) != len(outputs):
            raise SettingsError(
                f"the model has {len(outputs)} outputs, {self._word('labelCols')} is "
                f"{list(self.labels)}. Name one column per output, in the order of the outputs: "
                f"{list(outputs)}; for a dict, its sorted keys"
            )
        features, _ = self._in_order(list(inputs), outputs)
        if len(inputs) == 1:
            (only,) = inputs.values()
            what = f"the model's input of {only.keras_dtype}"
            check_columns(what, len(self.features), is_ragged=only.is_ragged)
        kinds = dict(fields)
        infos = list(inputs.values())
        by_column = infos if len(infos) > 1 else infos * len(features)
        found = dataframe_columns.leaves([(name, kinds[name]) for name in features])
        for leaf, info in zip(found, by_column, strict=False):
            dtype = info.keras_dtype
            if (leaf.kind in _TEXTS) != (dtype == "string"):
                raise SettingsError(
                    f"feature column {leaf}: the model takes {dtype} there. StringIndexer turns "
                    "text into numbers, F.col(name).cast('string') numbers into text"
                )
            dataframe_columns.check_times(leaf, dtype)
            if info.is_id:
                dataframe_columns.check_ids(leaf, dtype)
        by_input = [found] if len(infos) == 1 else [(leaf,) for leaf in found]
        for leaves, info in zip(by_input, infos, strict=False):
            _check_count(leaves, info)

    def times(self, fields: Sequence[tuple[str, Any]]) -> tuple[Leaf, ...]:
        """Return the features that are timestamps, which only the driver knows.

        Args:
            fields: name and type of the DataFrame's columns.
        """
        kinds = dict(fields)
        found = dataframe_columns.leaves([(name, kinds[name]) for name in self.features])
        return tuple(leaf for leaf in found if leaf.kind in dataframe_columns.MICROSECONDS)

    def selectors(self, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of `ctx.dataset` that select these columns.

        Args:
            inputs: names of the model's inputs; empty: it has no fixed inputs.
            outputs: names of its outputs.

        Raises:
            SettingsError: a column has the name of another input or output.
        """
        features, labels = self._in_order(inputs, outputs)
        # Side by side, integers next to a double would be rounded before they are checked.
        tensors = features if len(inputs) == 1 < len(features) else inputs
        found: dict[str, Any] = {
            "feature_cols": _selector(features, tensors),
            "label_cols": _selector(labels, outputs),
        }
        return found if self.weight is None else {**found, "weight_col": self.weight}

    def _in_order(
        self, inputs: Sequence[str], outputs: Sequence[str]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return features and labels in the model's order."""
        return (
            in_order(self._word("featuresCols"), self.features, "input", inputs),
            in_order(self._word("labelCols"), self.labels, "output", outputs),
        )

    def _roles(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the users' names of the roles, with the columns."""
        one = [("weightCol", self.weight), ("validationCol", self.validation)]
        roles = [
            (self.words.get("features") or self._word("featuresCols"), self.features),
            (self.words.get("labels") or self._word("labelCols"), self.labels),
        ]
        return roles + [(self._word(role), (name,)) for role, name in one if name is not None]

    def _word(self, name: str) -> str:
        return self.words.get(name, name)


def _check_names(role: str, asked: tuple[str, ...], names: list[str]) -> None:
    if not asked:
        raise SettingsError(f"{role} names no column; the DataFrame has {names}")
    if len(set(asked)) != len(asked):
        raise SettingsError(f"{role}={list(asked)} has a column twice; name each once")
    dataframe_columns.positions_of(names, asked, role)


def _selector(columns: tuple[str, ...], tensors: Sequence[str]) -> str | list[str] | dict[str, str]:
    """One column: itself; one per tensor: by the tensors' names; else side by side."""
    if len(columns) == 1:
        return columns[0]
    if len(columns) == len(tensors):
        return dict(zip(tensors, columns, strict=True))
    return list(columns)


def _check_number(what: str, leaf: Leaf, *, is_list: bool = True) -> None:
    if leaf.kind in _TEXTS | _TIMES or (leaf.is_list and not is_list):
        raise SettingsError(
            f"{what} {leaf}; it must be numbers"
            + ("" if is_list else ", one per row")
            + ": StringIndexer turns text into numbers, F.col(name).cast('double') other types"
        )


def _check_count(columns: Sequence[Leaf], info: TensorInfo) -> None:
    """Refuse columns of one value each that are more or fewer than the input's values."""
    if info.is_ragged or not info.has_rank or any(leaf.is_list for leaf in columns):
        return
    row = np.empty((1, len(columns)) if len(columns) > 1 else 1)
    if in_shape(row, info.shape) is None:
        raise SettingsError(
            f"feature columns {', '.join(map(str, columns))}: {len(columns)} values per row, but "
            f"the model's input is {info}: name a column of arrays, such as F.array(a, b), or make "
            "the input as large as these"
        )


def _check_flag(what: str, kind: Any) -> None:
    if kind.typeName() not in ("boolean", "byte", "short", "integer", "long"):
        raise SettingsError(
            f"{what} is {kind.simpleString()}; it must be boolean, or an integer "
            "that is not 0 where a row validates"
        )


def named(what: str, columns: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names that a user gave as one or several.

    Args:
        what: name of the argument, for the error.
        columns: a name, names, or None.

    Raises:
        SettingsError: something else.
    """
    if columns is None:
        return ()
    if isinstance(columns, str):
        return (columns,)
    names: tuple[Any, ...] = (None,)
    if not isinstance(columns, Mapping):
        with contextlib.suppress(TypeError):  # a Spark Column looks iterable
            names = tuple(columns)
    if not all(isinstance(each, str) for each in names):
        raise SettingsError(f"{what} must be a name or a list of names, got {columns!r}")
    return names
