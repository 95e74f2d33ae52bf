"""Columns of a batch as Keras trains on them: x, y, sample weights.

Covers: which column is what, dtypes, the user's own mapping.      Does not: read the feed. Pure.

Rows (x, y) or (x, y, weight) need no selection. Otherwise `features` and `labels` select:
    an int or a slice    of a row's values by position, or of the row itself where it is one array
    a str                a value by its name (dict, Row, DataFrame column; `struct.field`)
    a list of these      numbers side by side as one matrix; arrays and text as several inputs
    a dict of these      inputs by the names that the model's have
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from feeding.columnar.batch import Ragged
from feeding.columnar.ops import num_rows
from feeding.columnar.ranges import misfits
from tfos.errors import SettingsError

Array = np.ndarray[Any, np.dtype[Any]]
Selector = int | str | slice | Sequence[int | str] | Mapping[str, Any]
Dtypes = str | Sequence[str | None] | Mapping[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRoles:
    """Which values of a row are x, y and the sample weight, as `ctx.dataset` takes them."""

    feature_cols: Selector | None = None
    """Selects x; None with `label_cols` None: rows are (x, y) or (x, y, weight)."""
    label_cols: Selector | None = None
    weight_col: Selector | None = None
    dtypes: Dtypes = None
    """One for x, or one each for x, y and weight; None leaves a part as it is; or by the name of a
    column. Without any, float64 becomes the model's float type; text stays text."""
    map_fn: Callable[..., Any] | None = None
    """Function of the parts, arrays of a whole batch, that returns those to train on."""


AS_FED = ColumnRoles()
"""Rows are (x, y) or (x, y, weight)."""


class RowMapper:
    """Turns nested columns into the tuple that Keras takes.

    Args:
        roles: what is x, y and the sample weight, in which dtypes.
        float_dtype: the model's float type.

    Raises:
        SettingsError: a value that cannot work.
    """

    def __init__(self, roles: ColumnRoles, float_dtype: str) -> None:
        dtypes, map_fn = roles.dtypes, roles.map_fn
        self._features, self._labels = roles.feature_cols, roles.label_cols
        self._weights = roles.weight_col
        self._by_name = dict(dtypes) if isinstance(dtypes, Mapping) else {}
        by_part = () if isinstance(dtypes, Mapping) or dtypes is None else dtypes
        if not isinstance(by_part, Sequence):
            raise _no_dtypes(dtypes)
        self._dtypes = (by_part,) if isinstance(by_part, str) else tuple(by_part)
        for dtype in (*self._dtypes, *self._by_name.values()):
            _check_dtype(dtype)
        if map_fn is not None and not callable(map_fn):
            raise SettingsError(f"map_fn must be a function of numpy arrays, got {map_fn!r}")
        self._map_fn = map_fn
        self._float_dtype = float_dtype

    def __call__(self, columns: Any) -> tuple[Any, ...]:
        """Return (x,), (x, y) or (x, y, weight) for one batch of nested columns.

        Raises:
            SettingsError: the rows do not have what was selected.
        """
        if self._by_name:
            columns = self._with_dtypes(columns)
        parts = self._parts(columns)
        if self._map_fn is not None:
            mapped = self._map_fn(*parts)
            parts = mapped if isinstance(mapped, tuple) else (mapped,)
        for what, part in zip(("labels", "weights"), parts[1:], strict=False):
            _check_dense(part, what)
        cast = tuple(self._cast(part, *self._dtypes_of(place)) for place, part in enumerate(parts))
        if self._map_fn is not None:
            _check_lengths(cast)
        return cast

    def _with_dtypes(self, columns: Any) -> dict[str, Any]:
        """Return the columns in their dtypes; the unselected ones without any stay as they are."""
        if not isinstance(columns, Mapping):
            raise SettingsError(f"dtypes={self._by_name}, but the rows have values without names")
        for name in self._by_name:
            if not isinstance(_one(columns, name, "dtypes"), np.ndarray | Ragged):
                raise SettingsError(
                    f"dtypes={self._by_name}, but {name!r} is no column of one dtype"
                )
        selected = dict.fromkeys(_leaves(self._parts(_names(columns))), self._float_dtype)
        return _with_dtypes_of(columns, self._by_name, selected)

    def _dtypes_of(self, place: int) -> tuple[str | None, str | None]:
        """Return the dtype of a part, and that of its float64 values where it has none."""
        if place < len(self._dtypes):
            return self._dtypes[place], None
        return None, None if self._by_name else self._float_dtype

    def _parts(self, columns: Any) -> tuple[Any, ...]:
        if self._features is None and self._labels is None and self._weights is None:
            return _by_place(columns)
        if self._features is None:
            given = (
                f"weight_col={self._weights!r}"
                if self._labels is None
                else f"label_cols={self._labels!r}"
            )
            raise SettingsError(
                f"{given} without feature_cols; name the features as well, for example "
                "feature_cols=slice(1, None), label_cols=0"
            )
        x = _select(columns, self._features, "feature_cols")
        if self._labels is None:
            if self._weights is not None:
                raise SettingsError(
                    f"weight_col={self._weights!r} without label_cols, whose loss it weighs; name "
                    "the labels as well"
                )
            return (x,)
        y = _select(columns, self._labels, "label_cols")
        if self._weights is None:
            return x, y
        return x, y, _select(columns, self._weights, "weight_col")

    def _cast(self, part: Any, dtype: str | None, float_dtype: str | None) -> Any:
        if isinstance(part, Mapping):
            return {name: self._cast(value, dtype, float_dtype) for name, value in part.items()}
        if isinstance(part, tuple | list):
            return tuple(self._cast(value, dtype, float_dtype) for value in part)
        if isinstance(part, Ragged):
            return Ragged(self._cast(part.values, dtype, float_dtype), part.offsets)
        if getattr(part, "ragged_rank", 0) == 1:  # tf.RaggedTensor, from a map_fn
            return Ragged(
                self._cast(part.values.numpy(), dtype, float_dtype), part.row_splits.numpy()
            )
        if hasattr(part, "numpy") and not hasattr(part, "ragged_rank"):  # a tensor, from a map_fn
            part = part.numpy()
        if not isinstance(part, np.ndarray):
            raise SettingsError(
                f"the batch holds {type(part).__name__}, not an array; map_fn=... must return "
                "arrays or tensors, or feeding.Ragged or tf.RaggedTensor [batch, None] for "
                "features whose rows have differing lengths"
            )
        if dtype is None and part.dtype == np.float64:
            dtype = float_dtype
        if part.dtype == object:  # text
            return part
        return part if dtype is None else _in_dtype(part, dtype)


def _check_dense(part: Any, what: str) -> None:
    if isinstance(part, Ragged):
        lengths = np.diff(part.offsets)
        raise SettingsError(
            f"the {what} are lists of {lengths.min()} to {lengths.max()} values, but only features "
            "may have differing lengths; pad others in map_fn=..."
        )


def _check_lengths(parts: tuple[Any, ...]) -> None:
    """Refuse single arrays of different lengths, which a loss may broadcast.

    Several features may have lengths of their own, as all values of lists beside their rows do.
    """
    named = zip(("features", "labels", "weights"), parts, strict=False)
    found = [(what, num_rows((part,))) for what, part in named if has_length(part)]
    for what, rows in found[1:]:
        if rows != found[0][1]:
            raise SettingsError(
                f"map_fn=... returned {found[0][1]} rows of {found[0][0]} and {rows} of {what}; "
                "keep or leave out the same rows of each array"
            )


def has_length(part: Any) -> bool:
    """Whether what a mapper returns has rows: an array, and not a nest of them or a number."""
    return isinstance(part, Ragged) or (isinstance(part, np.ndarray) and part.ndim > 0)


def _by_place(columns: Any) -> tuple[Any, ...]:
    """Rows that are (x, y) or (x, y, weight), or x alone."""
    if not isinstance(columns, tuple | list):
        return (columns,)
    if len(columns) > 3:
        raise SettingsError(
            f"rows have {len(columns)} values; ctx.dataset takes rows of (x, y), or select them: "
            "feature_cols=slice(1, None), label_cols=0"
        )
    return tuple(columns)


def _names(columns: Mapping[str, Any], struct: str = "") -> dict[str, Any]:
    """Return each column's name, `struct.field` of a field, in its place."""
    return {
        name: _names(value, f"{struct}{name}.") if isinstance(value, Mapping) else struct + name
        for name, value in columns.items()
    }


def _leaves(parts: Any) -> list[Any]:
    if isinstance(parts, Mapping):
        parts = list(parts.values())
    if not isinstance(parts, list | tuple):
        return [parts]
    return [leaf for part in parts for leaf in _leaves(part)]


def _with_dtypes_of(
    columns: Mapping[str, Any],
    by_name: Mapping[str, str],
    of_floats: Mapping[str, str],
    struct: str = "",
) -> dict[str, Any]:
    """Return the columns in their dtypes.

    Args:
        columns: by name.
        by_name: dtypes by full name.
        of_floats: dtypes of float64 columns, by full name.
        struct: what a full name has before the name.
    """
    cast = dict(columns)
    for name, value in columns.items():
        full = f"{struct}{name}"
        if isinstance(value, Mapping):
            cast[name] = _with_dtypes_of(value, by_name, of_floats, f"{full}.")
            continue
        dtype = by_name.get(full)
        items = value.values if isinstance(value, Ragged) else value
        if dtype is None and isinstance(items, np.ndarray) and items.dtype == np.float64:
            dtype = of_floats.get(full)
        if dtype is not None:
            items = _in_dtype(items, dtype, full)
        cast[name] = Ragged(items, value.offsets) if isinstance(value, Ragged) else items
    return cast


def _select(columns: Any, selector: Any, what: str) -> Any:
    if isinstance(selector, Mapping):
        return {name: _select(columns, each, what) for name, each in selector.items()}
    if isinstance(columns, Ragged):
        raise SettingsError(
            f"{what}={selector!r}, but each row is one list with its own length; feed rows of "
            "several values: (list, label)"
        )
    if isinstance(columns, np.ndarray):
        return _select_inside(columns, selector, what)
    if isinstance(selector, slice):
        names = list(columns) if isinstance(columns, Mapping) else list(range(len(columns)))
        return _side_by_side({name: _one(columns, name, what) for name in names[selector]}, what)
    if isinstance(selector, str | int):
        return _one(columns, selector, what)
    names = list(selector)
    if len(set(names)) < len(names):
        raise SettingsError(f"{what}={names} has a column twice; name each once")
    by_place = list(columns.values()) if isinstance(columns, Mapping) else None
    return _side_by_side({each: _one(columns, each, what, by_place) for each in names}, what)


def _select_inside(row: Array, selector: Any, what: str) -> Any:
    """Rows that are one array: positions along its first dimension."""
    if isinstance(selector, str) or row.ndim < 2:
        shape = "x".join(map(str, row.shape[1:])) or "single numbers"
        raise SettingsError(
            f"{what}={selector!r}, but the rows are arrays without names ({shape}); select by "
            f"position, for example {what}=slice(1, None)"
        )
    try:
        return row[:, selector if isinstance(selector, int | slice) else list(selector)]
    except IndexError:
        raise SettingsError(
            f"{what}={selector!r}, but the rows have {row.shape[1]} values"
        ) from None


def _one(columns: Any, selector: Any, what: str, by_place: Sequence[Any] | None = None) -> Any:
    """Return one value; `by_place` has all of them in order, if the caller made that list."""
    named = isinstance(columns, Mapping)
    try:
        if isinstance(selector, int) and named:
            return (by_place or list(columns.values()))[selector]
        if named and selector not in columns and "." in selector:
            struct, field = selector.split(".", 1)
            return _one(columns[struct], field, what)
        return columns[selector]
    except (KeyError, IndexError, TypeError):
        have = list(columns) if named else f"{len(columns)} values without names"
        raise SettingsError(f"{what}={selector!r}, but the rows have {have}") from None


def _side_by_side(selected: Mapping[Any, Any], what: str) -> Any:
    """Join numbers as the columns of one matrix; keep anything else as several inputs.

    Args:
        selected: values by column name or position, each [batch, ...].
        what: the argument of ctx.dataset, for errors.
    """
    if not selected:
        raise SettingsError(f"{what} selects nothing")
    values = list(selected.values())
    numbers = [name for name, value in selected.items() if _is_number(value)]
    if len(numbers) == len(values):
        return np.stack(values, axis=1)
    texts = [name for name, value in selected.items() if _is_text(value)]
    if len(numbers) > 1 and texts:
        raise SettingsError(
            f"{what}: column {texts[0]!r} is text among numbers, which form one matrix. Leave it "
            f'out, or name the inputs of the model: {{"numbers": {numbers}, '
            f'"text": {texts[0]!r}}}'
        )
    return values[0] if len(values) == 1 else tuple(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype != object


def _is_text(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == object


def _in_dtype(values: Array, dtype: str, name: str = "") -> Array:
    """Return numbers in a dtype; integers cut off fractions, and refuse what they cannot hold.

    Floats may be rounded, but a finite number that would become infinite is refused.

    Args:
        values: numbers, or texts of numbers.
        dtype: name of the dtype.
        name: the column's, whose dtype it is, before map_fn; empty: it is a part's, behind map_fn.
    """
    wanted = np.dtype(dtype)
    whose = f" of {name}" if name else ""
    shown = ""
    if wanted.kind in "iub" and values.dtype.kind == "f" and not np.isfinite(values).all():
        shown = "NaN or infinite numbers"
    elif wanted.kind in "iu" and values.dtype.kind in "iuf":
        odd = misfits(values, wanted)
        shown = "" if odd is None else f"numbers from {odd[0]} to {odd[1]}"
    if shown:
        raise SettingsError(
            f"a batch has {shown}{whose}, which dtypes={dtype!r} cannot hold: "
            "the cast would change them. Give a dtype that holds them, or leave it out and "
            "convert them in map_fn=..."
        )
    try:
        with np.errstate(over="raise"):  # the processor flags it: no pass over the values
            cast = values.astype(wanted, copy=False)
            if wanted.name == "bfloat16":  # its cast flags nothing just above its range
                lost = values[~np.isfinite(cast)].astype(np.float64)
                if np.isfinite(lost).any():
                    raise FloatingPointError
            return cast
    except FloatingPointError:
        raise _infinite(values, wanted.name, name) from None


def _infinite(values: Array, dtype: str, name: str) -> SettingsError:
    """Return the error of finite numbers that become infinite in a dtype; `name` as above."""
    numbers = values.astype(np.float64) if values.dtype.kind in "OSU" else values
    finite = numbers[np.isfinite(numbers)]
    how = "Scale it, also in map_fn=..., or give dtypes='float64' if the model's inputs have it"
    if name:  # map_fn gets what the cast makes
        how = f"Give dtypes={{{name!r}: 'float64'}}, which holds them, and scale it in map_fn=..."
    whose = f" of {name}" if name else ""
    return SettingsError(
        f"a batch has numbers from {finite.min()} to {finite.max()}{whose}, of which some "
        f"become infinite in {dtype}. {how}"
    )


def _check_dtype(dtype: Any) -> None:
    if dtype is None:
        return
    try:
        np.dtype(dtype)
    except TypeError:
        raise _no_dtypes(dtype) from None


def _no_dtypes(given: Any) -> SettingsError:
    return SettingsError(f"dtypes must be names of numpy dtypes such as 'float32', got {given!r}")
