"""Outgoing push: what one step gives to the servers, as arrays and numbers.

Covers: a step's tensors as arrays of its groups, the hyper-parameters that travel with them.
Does not: send, count (tfos.keras.step.exchange.exchange), compute (tfos.keras.step.gradients).
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ps.manifest.manifest import Hyper
from ps.metadata import AttachedMetadata
from tfos.keras.embedding.batch_rows import BatchRows
from tfos.keras.step.gradients.gradient_step import StepOutput
from tfos.keras.step.tables import TableArrays
from tfos.keras.step.variables import Variables

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingPush:
    """What a step sends."""

    grads: dict[str, Array | list[Array]]
    """Flat gradient, its parts, or the statistics, [num_elements], by group."""
    hyper: Hyper
    rows: int
    """Number of rows in the step's batch."""
    metadata: AttachedMetadata | None
    table_grads: TableArrays
    ahead: BatchRows | None
    """Rows of a later batch, which the answer fills."""


def arrays_by_group(variables: Variables, output: StepOutput) -> dict[str, Array | list[Array]]:
    """Return a step's gradients and statistics as OutgoingPush.grads, without a copy.

    Args:
        variables: the model's.
        output: output of a complete step.
    """
    arrays: dict[str, Array | list[Array]] = {
        group.name: list(map(array, parts))
        for group, parts in zip(variables.trainable, output.gradients, strict=True)
    }
    for group, flat in zip(variables.statistics, output.statistics, strict=True):
        arrays[group.name] = array(flat)
    return arrays


def hyper_of(variables: Variables, output: StepOutput, *, is_sync: bool) -> Hyper:
    """Return the hyper-parameters of a step.

    Args:
        variables: the model's.
        output: output of a complete step.
        is_sync: whether the step's own scalars apply. Otherwise the servers count each bucket's
            updates themselves, those of other workers included.
    """
    values = [float(value) for value in output.scalars.numpy()]
    if not is_sync or len(values) == 1:
        return Hyper(learning_rate=values[0])
    names = [group.name for group in variables.trainable]
    scalars: dict[str, tuple[float, ...]] = {
        name: (alpha,) for name, alpha in zip(names, values[1:], strict=False)
    }
    for layer in variables.embeddings:
        settings = layer.settings
        if settings.rule is None and not settings.row_steps:
            scalars[layer.table] = (values[-1],)
    return Hyper(learning_rate=values[0], scalars=scalars)


def array(tensor: Any) -> Array:
    """Return the memory of a tensor."""
    return np.asarray(memoryview(tensor))
