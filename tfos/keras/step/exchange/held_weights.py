"""Values of the weights that nothing trains, held to tell whether the program has changed them.

Covers: the comparison, which reads no value where nothing was written.
Does not: compare trained weights, whose values may be in several places
(tfos.keras.step.exchange.replica); refuse a change.
Threads: the thread that trains.

A held tensor shares the memory of its variable. Writing a variable gives it other memory while
somebody holds the old one, so an equal address means equal values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfos.keras.step.variables import VariableGroup, raw_bytes

_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_Pointers = ctypes.POINTER(ctypes.c_void_p)


class HeldWeights:
    """The values of frozen variables as they were.

    Args:
        groups: the variables, with the values to compare with.
    """

    def __init__(self, groups: Sequence[VariableGroup]) -> None:
        self._held = [(each, read(each)) for group in groups for each in group.variables]

    def changed(self) -> str:
        """Return the path of a variable whose values have changed; empty: there is none."""
        for place, (variable, held) in enumerate(self._held):
            now = read(variable)
            if address(now) == address(held):
                continue
            if not np.array_equal(raw_bytes(now), raw_bytes(held)):
                return str(variable.path)
            self._held[place] = variable, now  # written with its old values
        return ""


def read(variable: Any) -> Any:
    """Return a variable's values as a tensor that shares its memory."""
    import tensorflow as tf

    value = variable.value
    return tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype)  # no copy


def address(tensor: Any) -> int | None:
    """Return the address of a tensor's values, on any device; None: it has none."""
    import tensorflow as tf

    described = tf.experimental.dlpack.to_dlpack(tensor)
    managed = ctypes.cast(_capsule_pointer(described, b"dltensor"), _Pointers)
    found: int | None = managed[0]  # the first field of the structure
    return found
