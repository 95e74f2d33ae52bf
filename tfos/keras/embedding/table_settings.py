"""Settings of a layer's table, before the model's optimizer is known.

Covers: the settings by which two layers share a table, their conversion from and to Keras' config,
the table's entry in the manifest.
Does not: hold rows, know layers (tfos.keras.embedding.layer).      Pure; no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import keras
import msgspec
import numpy as np

from ps.manifest.initializer_spec import (
    Constant,
    Initializer,
    RandomNormal,
    RandomUniform,
    TruncatedNormal,
)
from ps.manifest.rule_spec import Adam, RuleConfig
from ps.manifest.table_spec import Admission, TableSpec
from tfos.errors import SettingsError

_INITIALIZERS: dict[type, type[Initializer]] = {
    keras.initializers.Zeros: Constant,
    keras.initializers.Ones: Constant,
    keras.initializers.Constant: Constant,
    keras.initializers.RandomUniform: RandomUniform,
    keras.initializers.RandomNormal: RandomNormal,
    keras.initializers.TruncatedNormal: TruncatedNormal,
}

_COUNTS = ("dim", "seed", "max_rows", "max_bytes", "max_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSettings:
    """What all layers of one table have in common; the meanings are those of `ps.TableSpec`."""

    name: str
    dim: int
    rule: RuleConfig | None
    """None: the rule of the model's optimizer, for the rows of a push alone."""
    learning_rate_multiplier: float
    row_steps: bool
    initializer: Initializer
    seed: int | None
    id_kind: Literal["int64", "uint64"]
    max_id: int | None
    max_rows: int | None
    max_bytes: int | None
    when_full: Literal["refuse", "lru"]
    ttl_s: float | None
    admission: Admission
    unseen: tuple[float, ...]
    """The vector of an id without a row, in evaluation and inference; empty: zeros."""

    def __post_init__(self) -> None:
        """Make numbers of numpy Python's own, which a config and a manifest take.

        Raises:
            SettingsError: a count that is no integer.
        """
        for name in _COUNTS:
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _whole(name, given))
        if self.ttl_s is not None:
            object.__setattr__(self, "ttl_s", float(self.ttl_s))

    def spec(self, default_rule: RuleConfig | None) -> TableSpec:
        """Return the table's entry in the manifest.

        Args:
            default_rule: that of the model's optimizer; None where any rule will do.

        Raises:
            SettingsError: a setting that cannot work.
        """
        values = {name: getattr(self, name) for name in self.field_names}
        values["rule"] = self.rule or default_rule or _ANY_RULE
        return TableSpec(**values)

    @property
    def unseen_row(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The vector of an id without a row: [dim] float32."""
        return np.array(self.unseen or [0.0] * self.dim, np.float32)

    @property
    def field_names(self) -> tuple[str, ...]:
        """All settings, as `differences` takes them."""
        return tuple(field.name for field in dataclasses.fields(self))

    def config(self) -> dict[str, Any]:
        """Return the settings as JSON has them, for the layer's `get_config`."""
        values = {name: getattr(self, name) for name in self.field_names}
        values["rule"] = None if self.rule is None else msgspec.to_builtins(self.rule)
        values["initializer"] = msgspec.to_builtins(self.initializer)
        values["admission"] = msgspec.to_builtins(self.admission)
        values["unseen"] = list(self.unseen)
        return values


_ANY_RULE = Adam()
"""Placeholder for a rule that is not known yet: it causes no setting to be refused."""


def differences(ours: Any, theirs: Any, field_names: Sequence[str]) -> str:
    """Return how two settings of a table differ: "seed 1 and 2, …"; empty: not at all.

    Args:
        ours: named first.
        theirs: settings of the same kind.
        field_names: names of the fields to compare.
    """
    pairs = ((name, getattr(ours, name), getattr(theirs, name)) for name in field_names)
    return ", ".join(f"{name} {one!r} and {other!r}" for name, one, other in pairs if one != other)


_OF_KERAS = (
    "input_dim",
    "output_dim",
    "input_length",
    "embeddings_initializer",
    "embeddings_regularizer",
    "embeddings_constraint",
    "weights",
)


def refuse_arguments_of_keras(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of `keras.layers.Embedding` that a table has no use for.

    Args:
        args: arguments of the layer, by position.
        kwargs: by name.

    Raises:
        SettingsError: holds them, and what to write.
    """
    given = [name for name in _OF_KERAS if name in kwargs]
    if len(args) < 2 and not given:
        return
    shown = ", ".join([*map(repr, args), *(f"{name}={kwargs[name]!r}" for name in given)])
    width = args[1] if len(args) > 1 else kwargs.get("output_dim", args[0] if args else "dim")
    raise SettingsError(
        f"tfos.keras.Embedding({shown}) has arguments of keras.layers.Embedding. A table needs no "
        f"number of rows: write Embedding({width}, table='…'). For embeddings_initializer, use "
        "initializer; for rows to begin with, ctx.load_rows. A regularizer or a constraint of all "
        "rows is not possible"
    )


def rule_given(rule: Any) -> RuleConfig | None:
    """Return a table's own rule from what a user may give.

    Args:
        rule: None, a rule of `ps.rules`, or what `get_config` made of one.

    Raises:
        SettingsError: something else.
    """
    wanted = "a rule of ps.rules, such as rules.Adagrad()"
    found: RuleConfig | None = _converted(rule, RuleConfig, "rule", wanted)
    return found


def admission_given(admission: Any) -> Admission:
    """Return an admission policy from one, its config, or None for the default."""
    found = _converted(admission, Admission, "admission", "a ps.Admission")
    return Admission() if found is None else found


def initializer_given(initializer: Any) -> Initializer:
    """Return the table's initializer from one of `ps.initializers`, its config, or Keras' own.

    Args:
        initializer: "uniform", a Keras initializer, an initializer of `ps`, or None for the
            default.

    Raises:
        SettingsError: one that a table does not have.
    """
    if initializer is None:
        return RandomUniform()
    if isinstance(initializer, Initializer):
        return initializer
    if isinstance(initializer, Mapping) and "initializer" in initializer:
        return msgspec.convert(dict(initializer), Initializer)  # type: ignore[no-any-return]
    try:
        found = keras.initializers.get(initializer)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"initializer={initializer!r}: {error}") from error
    if type(found) not in _INITIALIZERS:
        raise SettingsError(
            f"initializer={initializer!r} depends on a number of rows, which a table does not have "
            "by itself; use one of zeros, ones, uniform, normal, truncated_normal or constant, or "
            "ps.initializers.TruncatedNormal(stddev=…) with a deviation of your own"
        )
    return _of_keras(found)


def seed_given(seed: Any, initializer: Any) -> Any:
    """Return the seed of a table: its own, or else that of a Keras initializer.

    Args:
        seed: of the table; None: not given.
        initializer: as `initializer_given` takes it.

    Raises:
        SettingsError: both are given, and differ.
    """
    if initializer is None or isinstance(initializer, Initializer):
        return seed
    if isinstance(initializer, Mapping) and "initializer" in initializer:  # as of a config
        return seed
    of_keras = keras.initializers.get(initializer)
    found = of_keras.get_config().get("seed")  # as given: None for the one that Keras has drawn
    if None not in (seed, found) and seed != found:
        raise SettingsError(
            f"seed={seed!r}, but {type(of_keras).__name__} has seed={found!r}; give one of them"
        )
    return found if seed is None else seed


def unseen_given(unseen: float | Sequence[float], dim: int) -> tuple[float, ...]:
    """Return the vector of an id without a row: empty for zeros, else `dim` numbers.

    Args:
        unseen: one number for all elements, or `dim` numbers.
        dim: elements of a row.

    Raises:
        SettingsError: another number of numbers.
    """
    each: Any = unseen
    numbers = (
        [float(each)] * _whole("dim", dim) if isinstance(unseen, Real) else list(map(float, each))
    )
    if len(numbers) not in (0, dim):
        raise SettingsError(
            f"unseen has {len(numbers)} numbers, a row has {dim}; give one number, or {dim}"
        )
    return tuple(numbers) if any(numbers) else ()


def _whole(name: str, given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise SettingsError(f"{name}={given!r} must be an integer") from None


def _of_keras(found: Any) -> Initializer:
    kind = _INITIALIZERS[type(found)]
    if kind is Constant:
        ones = isinstance(found, keras.initializers.Ones)
        return Constant(float(getattr(found, "value", 1.0 if ones else 0.0)))
    names = [field.name for field in msgspec.structs.fields(kind)]
    return kind(**{name: float(getattr(found, name)) for name in names})


def _converted(given: Any, kind: Any, name: str, wanted: str) -> Any:
    if given is None or isinstance(given, kind):
        return given
    if isinstance(given, Mapping):
        return msgspec.convert(dict(given), kind)
    raise SettingsError(f"{name}={given!r} is not {wanted}")
