"""The servers' moving averages of the parameters (`use_ema`), in the local optimizer.

Covers: filling its averages at every pull, so that Keras's own code finds them (the end of `fit`,
the callback SwapEMAWeights, saved optimizers).
Does not: compute averages (ps.dense.ema).
Threads: the thread that trains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfos.keras.step import optimizers
from tfos.keras.step.variables import VariableGroup


class Averages:
    """The averages of one model's trainable variables.

    Args:
        model: a built model, whose optimizer has use_ema and gets its (fresh) slots.
        groups: all groups of the model.
    """

    def __init__(self, model: Any, groups: Sequence[VariableGroup]) -> None:
        optimizers.give_slots(model)
        inner = optimizers.unwrap(model.optimizer)
        averages = inner._model_variables_moving_average
        own = {id(v): a for v, a in zip(inner._trainable_variables, averages, strict=True)}
        self._received = {group.name: np.empty(sum(group.sizes), group.dtype) for group in groups}
        self._groups = [
            dataclasses.replace(group, variables=tuple(own[id(v)] for v in group.variables))
            for group in groups
            if group.trainable
        ]

    def pull(self, client: Any, timeout_s: float | None = None) -> None:
        """Assign the servers' newest averages; before the first update, the values.

        Args:
            client: client of the servers.
            timeout_s: seconds to wait for them; None: the client's timeout.
        """
        import tensorflow as tf

        client.pull(self._received, averages=True, timeout_s=timeout_s)
        for group in self._groups:
            group.assign(tf.constant(self._received[group.name]))
