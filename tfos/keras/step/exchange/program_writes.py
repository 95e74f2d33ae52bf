"""Whether the program has assigned weights that no step assigns, told without reading a value.

Covers: `assign`, `assign_add`, `assign_sub` of Keras' variables, and what calls these, such as
`set_weights` of a layer.
Does not: compare values (tfos.keras.step.exchange.replica): the same values may have come back. See
what TensorFlow's own variables or compiled functions assign.
Threads: any.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Iterable
from typing import Any

import keras


class ProgramWrites:
    """Notes assignments to variables, from now on.

    Args:
        variables: trained and frozen ones. Of several models that share one, the newest is told.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        self.were_made = False
        for variable in variables:
            if isinstance(variable, keras.Variable):
                kind: Any = type(variable)
                variable.__class__ = _noting(kind)
                variable._tfos_writes = self


class _Noted:
    """A variable that tells of its assignments; its copies and pickles do not."""

    _tfos_writes: ProgramWrites

    def assign(self, value: Any) -> Any:
        self._tfos_writes.were_made = True
        return super().assign(value)  # type: ignore[misc]  # that of the variable's own class

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {key: value for key, value in vars(self).items() if key != "_tfos_writes"}
        kind = type(self).__mro__[2]  # behind the class of `_noting` and this one
        return copyreg._reconstructor, (kind, object, None), state  # type: ignore[attr-defined]


@functools.cache
def _noting(kind: type) -> type:
    return kind if issubclass(kind, _Noted) else type(kind.__name__, (_Noted, kind), {})
