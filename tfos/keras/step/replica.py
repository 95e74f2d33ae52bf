"""The worker's local copy of the servers' parameters, and of their moving averages (`use_ema`).

Covers: receive buffers that TensorFlow reads without a copy, the compiled assign; the local
optimizer's averages, filled at every pull, so that Keras's own code finds them (the end of `fit`,
the callback SwapEMAWeights, saved optimizers).
Does not: receive (ps.client), decide when (trainer), compute averages (ps.dense.ema).
Threads: a `Received` belongs to its caller; `adopt` to the thread that trains.

    socket ──recv_into──► Received.arrays = Received.tensors ──one copy──► variables

The variables never share memory with a buffer, so the next values may overwrite it at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfos.keras.step import optimizers
from tfos.keras.step.variables import VariableGroup

ALIGNMENT = 64
"""Alignment in bytes that TensorFlow's kernels require."""

Array = np.ndarray[Any, np.dtype[Any]]


class Received:
    """One flat array per group, and the same memory as tensors."""

    def __init__(self, groups: Sequence[VariableGroup]) -> None:
        import tensorflow as tf

        self.arrays: dict[str, Array] = {
            group.name: _aligned(sum(group.sizes), group.dtype) for group in groups
        }
        self.tensors: dict[str, Any] = {
            name: tf.experimental.dlpack.from_dlpack(array.__dlpack__())
            for name, array in self.arrays.items()
        }


class Replica:
    """Keeps a model's variables at the values of the servers.

    Args:
        groups: the variables that the servers hold.
        optimizer: the model's optimizer; its `iterations` counts the servers' updates. With
            accumulation its internal counter counts batches, unpushed ones included.
    """

    def __init__(self, groups: Sequence[VariableGroup], optimizer: Any) -> None:
        self._groups = tuple(groups)
        self._trainable = tuple(group for group in groups if group.trainable)
        self._iterations = optimizers.unwrap(optimizer)._iterations.value
        self._batches_per_update = optimizers.batches_per_update(optimizer)
        self._free: list[Received] = []
        self._assign_all = self._compile_assign(self._groups)
        self._assign_trainable = self._compile_assign(self._trainable)

    def take(self) -> Received:
        """Return an unused buffer with arbitrary content."""
        return self._free.pop() if self._free else Received(self._groups)

    def give(self, received: Received) -> None:
        """Return a buffer that receives no more values."""
        self._free.append(received)

    def adopt(self, received: Received, iterations: int, *, statistics: bool = True) -> None:
        """Assign received values to the variables.

        Args:
            received: values of all groups, one array of shape [elements] per group.
            iterations: new value of the optimizer's `iterations`.
            statistics: whether to assign the layers' statistics as well.
        """
        import tensorflow as tf

        groups = self._groups if statistics else self._trainable
        assign = self._assign_all if statistics else self._assign_trainable
        count = tf.constant(iterations, tf.int64)
        assign(count, *(received.tensors[group.name] for group in groups))

    def count(self, iterations: int) -> None:
        """Set the optimizer's counter alone."""
        self._set_iterations(iterations)

    def _set_iterations(self, iterations: Any) -> None:
        import tensorflow as tf

        waiting = tf.math.floormod(self._iterations, self._batches_per_update)
        count = tf.cast(iterations, self._iterations.dtype) * self._batches_per_update
        self._iterations.assign(count + waiting)

    def _compile_assign(self, groups: Sequence[VariableGroup]) -> Any:
        import tensorflow as tf

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def assign(count: Any, *flats: Any) -> None:
            for group, flat in zip(groups, flats, strict=True):
                group.assign(flat)
            self._set_iterations(count)

        return assign


def _aligned(num_elements: int, dtype: str) -> Array:
    num_bytes = num_elements * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype)


class Averages:
    """The averages of one model's trainable variables.

    Args:
        model: built, with an optimizer that has use_ema; its optimizer gets its (fresh) slots.
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

    def pull(self, client: Any) -> None:
        """Assign the servers' newest averages; before the first update, the values."""
        import tensorflow as tf

        client.pull(self._received, averages=True)
        for group in self._groups:
            group.assign(tf.constant(self._received[group.name]))
