"""Compiled call: runs a concrete function whose arguments are known to fit.

Covers: tensors in the order of the function's inputs.
Does not: trace, or choose the function of a batch (tfos.keras.step.gradients.traces).
Threads: any, one at a time.

TensorFlow binds, checks and casts each argument of a call, which takes longer than a small function
runs. A caller that has chosen the function by the kind of the batch has checked all of that.
"""

from __future__ import annotations

import operator
from typing import Any


class CompiledCall:
    """A concrete function of nested tensors.

    Args:
        concrete: TensorFlow's concrete function, traced for arguments by position.
    """

    def __init__(self, concrete: Any) -> None:
        self._concrete = concrete
        self._takes_leaves: bool | None = None
        """Whether its inputs are the leaves of its arguments; None: it was never called."""

    def __call__(self, *data: Any) -> Any:
        """Return the function's result for arguments of the kind that it was traced for."""
        leaves = leaves_of(data)
        if self._takes_leaves is None:
            self._takes_leaves = self._is_in_order(data, leaves)
        if not self._takes_leaves:
            return self._concrete(*data)
        return self._concrete._call_flat(leaves, self._concrete.captured_inputs)

    def _is_in_order(self, data: tuple[Any, ...], leaves: list[Any]) -> bool:
        """Compare the leaves with what TensorFlow makes of the arguments."""
        kind = self._concrete.function_type
        expected = kind.unpack_inputs(kind.bind(*data))
        return len(expected) == len(leaves) and all(map(operator.is_, expected, leaves))


def leaves_of(data: Any) -> list[Any]:
    """Return the tensors of nested ones, in the order in which functions take them, without None.

    Args:
        data: arguments of a function, or a batch.
    """
    import tensorflow as tf

    return [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]
