"""Non-finite steps: the error of one, which names where the NaN or infinity is.

Covers: finding the first tensor or row with such a value; the sentence.
Does not: decide whether the step is skipped (tfos.keras.step.trainer), find out that there is such
a value (tfos.keras.step.gradients.gradient_step).
Pure.
"""

from __future__ import annotations

import numpy as np

from ps.errors import NonFiniteGradient
from tfos.keras.embedding.batch_rows import BatchRows, first_bad_row
from tfos.keras.step.exchange.outgoing_push import array
from tfos.keras.step.gradients.gradient_step import StepOutput
from tfos.keras.step.tables import TableTraining
from tfos.keras.step.variables import Variables


def error_of(worst: str, *, num_rows: int, where: str) -> NonFiniteGradient:
    """Return the error of a step that is not sent.

    Args:
        worst: the result of `worst_value`.
        num_rows: rows of the step's batch.
        where: text with the worker and the step.
    """
    return NonFiniteGradient(
        f"{worst} of a batch of {num_rows} rows are NaN or infinite ({where}); nothing was sent. "
        'Lower the learning rate, clip, check that batch, or distribute with on_nonfinite="skip"'
    )


def worst_value(
    variables: Variables, output: StepOutput, tables: TableTraining, rows: BatchRows | None
) -> str:
    """Name the first tensor with non-finite values, and how many; a bad row comes first.

    Args:
        variables: the model's.
        output: output of a step that is not finite.
        tables: the model's.
        rows: rows of the step's batch; None: the model has no tables.
    """
    if rows is not None and (row := first_bad_row(rows, rows.arrays)):
        return f"{row}: the gradients"
    for group, parts in zip(variables.trainable, output.gradients, strict=True):
        bad = ~np.isfinite(np.concatenate(list(map(array, parts))))
        start = 0
        for name, size in zip(group.names, group.sizes, strict=True):
            if count := int(bad[start : start + size].sum()):
                return f"{count} of {size} gradient values of {name!r}"
            start += size
    if rows is not None:
        sums = {name: each for name, (_, each) in tables.sums(rows, output).items()}
        if row := first_bad_row(rows, sums):
            return f"the gradient of {row}: the gradients"
    return "gradient values (before clipping)"
