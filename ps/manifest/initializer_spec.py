"""Initializers of a table's rows, as the manifest names them.

Covers: the initializers that a TableSpec names.      Does not: draw (ps.tables.initializers).
"""

from __future__ import annotations

import msgspec

from ps.errors import PSSettingsError
from ps.manifest.field_types import check_types
from ps.manifest.limits import MAX_SCALAR


def _check_settings(initializer: msgspec.Struct) -> None:
    name = type(initializer).__name__
    check_types(initializer, name)
    for setting in initializer.__struct_fields__:
        value = getattr(initializer, setting)
        if not abs(value) <= MAX_SCALAR:  # also true for NaN
            raise PSSettingsError(f"{name}: {setting} must be finite in float32, got {value!r}")


class Constant(msgspec.Struct, frozen=True, tag_field="initializer", tag="constant"):
    """Every number is `value`; Keras's Constant, and Zeros and Ones with 0 and 1."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _check_settings(self)


class RandomUniform(msgspec.Struct, frozen=True, tag_field="initializer", tag="uniform"):
    """Uniform in [minval, maxval); the default of Keras's Embedding."""

    minval: float = -0.05
    maxval: float = 0.05

    def __post_init__(self) -> None:
        _check_settings(self)
        if self.minval > self.maxval:
            raise PSSettingsError(
                f"RandomUniform: minval {self.minval} is above maxval {self.maxval}"
            )


class RandomNormal(msgspec.Struct, frozen=True, tag_field="initializer", tag="normal"):
    """Normal with this mean and standard deviation."""

    mean: float = 0.0
    stddev: float = 0.05

    def __post_init__(self) -> None:
        _check_normal(self)


class TruncatedNormal(msgspec.Struct, frozen=True, tag_field="initializer", tag="truncated"):
    """Normal distribution, truncated at two standard deviations from the mean."""

    mean: float = 0.0
    stddev: float = 0.05

    def __post_init__(self) -> None:
        _check_normal(self)


def _check_normal(initializer: RandomNormal | TruncatedNormal) -> None:
    _check_settings(initializer)
    if initializer.stddev < 0:
        name = type(initializer).__name__
        raise PSSettingsError(f"{name}: stddev must be >= 0, got {initializer.stddev!r}")


Initializer = Constant | RandomUniform | RandomNormal | TruncatedNormal
