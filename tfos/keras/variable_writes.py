"""Variable writes: which of TensorFlow's operations change the variable that they are given.

Covers: all operations that write a resource variable, whole, in a slice, or by rows.
Does not: find operations (tfos.keras.step.gradients.own_writes).
Threads: any; pure.
"""

from __future__ import annotations

_BY_ROWS_OR_RULE = ("ResourceApply", "ResourceSparseApply", "ResourceScatter")


def is_write(kind: str) -> bool:
    """Return whether an operation changes its variable.

    Args:
        kind: type of the operation.
    """
    return "Assign" in kind or kind.startswith(_BY_ROWS_OR_RULE)
