"""The worker's local copy of the servers' parameters, and of their moving averages (`use_ema`).

Covers: receive buffers that become the variables' memory, when one may be filled again, the
compiled assign; the local optimizer's averages, filled at every pull, so that Keras's own code
finds them (the end of `fit`, the callback SwapEMAWeights, saved optimizers).
Does not: receive (ps.client), decide when (trainer), compute averages (ps.dense.ema).
Threads: a `Received` belongs to its caller; a `Replica` to the thread that trains.

    socket ──recv_into──► Received.arrays = variables ──read, kept──► tensors of anybody

A buffer is filled again only when no tensor uses its memory: TensorFlow holds a reference to the
exported array for as long as it does.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfos.keras.step import optimizers
from tfos.keras.step.variables import VariableGroup

ALIGNMENT = 64
"""Alignment in bytes that TensorFlow's kernels require."""

MAX_SHARED = 4
"""Buffers whose memory TensorFlow may hold. Beyond it the variables get copies: a small tensor that
somebody keeps holds the memory of all parameters."""

Array = np.ndarray[Any, np.dtype[Any]]


class Received:
    """Memory for one answer of the servers: a flat array per group, of shape [elements]."""

    def __init__(self, groups: Sequence[VariableGroup]) -> None:
        self.arrays: dict[str, Array] = {
            group.name: _aligned(sum(group.sizes), group.dtype) for group in groups
        }
        self._exported: list[weakref.ref[Array]] = []

    @property
    def is_shared(self) -> bool:
        """Whether a tensor uses this memory, a variable's included."""
        self._exported = [exported for exported in self._exported if exported() is not None]
        return bool(self._exported)

    def tensors(self, groups: Sequence[VariableGroup]) -> list[Any]:
        """Return new tensors that share the memory of these groups."""
        import tensorflow as tf

        found = []
        for group in groups:
            # Of its own, so that it lives exactly as long as TensorFlow uses the memory.
            exported = self.arrays[group.name].view()
            self._exported.append(weakref.ref(exported))
            found.append(tf.experimental.dlpack.from_dlpack(exported.__dlpack__()))
        return found


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
        self._given: list[Received] = []
        self._adopted: list[Any] = []
        self._assign = {
            (statistics, copies): self._compile_assign(groups, copies=copies)
            for statistics, groups in ((True, self._groups), (False, self._trainable))
            for copies in (False, True)
        }

    def take(self) -> Received:
        """Return a buffer that nobody uses, with arbitrary content."""
        for index, received in enumerate(self._given):
            if not received.is_shared:
                return self._given.pop(index)
        return Received(self._groups)

    def give(self, received: Received) -> None:
        """Return a buffer that receives no more values; tensors may still use it."""
        self._given.append(received)

    def adopt(self, received: Received, iterations: int, *, statistics: bool = True) -> None:
        """Let the variables have received values; they share memory with the buffer.

        Args:
            received: values of all groups; not to be written before `take` returns it again.
            iterations: new value of the optimizer's `iterations`.
            statistics: whether to assign the layers' statistics as well.
        """
        import tensorflow as tf

        groups = self._groups if statistics else self._trainable
        copies = sum(given.is_shared for given in self._given) >= MAX_SHARED
        flats = received.tensors(groups)
        assign = self._assign[statistics, copies]
        assign(tf.constant(iterations, tf.int64), *flats)
        # Held until the next ones are assigned. So TensorFlow writes no variable in place, and the
        # memory that they leave is released here, not under a variable's lock, where releasing it
        # could wait for a thread that has the GIL and waits for the variable.
        self._adopted = [] if copies else flats

    def count(self, iterations: int) -> None:
        """Set the optimizer's counter alone."""
        self._set_iterations(iterations)

    def _set_iterations(self, iterations: Any) -> None:
        import tensorflow as tf

        waiting = tf.math.floormod(self._iterations, self._batches_per_update)
        count = tf.cast(iterations, self._iterations.dtype) * self._batches_per_update
        self._iterations.assign(count + waiting)

    def _compile_assign(self, groups: Sequence[VariableGroup], *, copies: bool) -> Any:
        import tensorflow as tf

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def assign(count: Any, *flats: Any) -> None:
            for group, flat in zip(groups, flats, strict=True):
                # Layers update statistics themselves.
                is_shared = group.trainable and not copies
                group.assign(flat if is_shared else tf.raw_ops.DeepCopy(x=flat))
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
