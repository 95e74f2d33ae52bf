"""What a step pushes to tables: the gradients of all batches that it has accumulated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tfos.keras.step.tables import TableTraining


class Planner:
    """Takes a batch's sums for its rows, and one batch's keys for others than another's."""

    def sums(self, rows: Any, _: Any) -> Any:
        return {
            name: (SimpleNamespace(unique=np.array([*values])), np.array([*values.values()]))
            for name, values in rows.items()
        }

    def merged(self, _: str, keys: Any, values: Any) -> tuple[Any, Any]:
        return keys.tolist(), values.copy()


@pytest.mark.parametrize("first", ["user", "item"])
def test_a_push_has_the_tables_of_each_batch_that_it_sums(first):
    """A train_step may call other layers for other kinds of batches."""
    step: Any = SimpleNamespace(trained_layers=[])
    source: Any = SimpleNamespace(client=None)
    training = TableTraining([], step, source, jit_compile=False, batches_per_push=3)
    training._planner = Planner()  # type: ignore[assignment]  # what it uses of one
    output: Any = SimpleNamespace(row_gradients=[])
    batches: list[Any] = [{"user": {1: [6.0]}}, {"item": {4: [9.0]}}]
    for batch in batches if first == "user" else batches[::-1]:
        training.keep(batch, output)
    found: Any = training.gradients(batches[0], output)
    assert {name: (keys, values.tolist()) for name, (keys, values) in found.items()} == {
        "user": ([1, 1], [[2.0], [2.0]]),
        "item": ([4], [[3.0]]),
    }
    assert training._waiting == []
