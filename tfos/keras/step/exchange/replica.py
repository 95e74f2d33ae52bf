"""The worker's local copy of the servers' parameters.

Covers: receive buffers that become the variables' memory, when one may be filled again.
Does not: receive (ps.client), decide when (tfos.keras.step.exchange.exchange).
Threads: a `Received` belongs to its caller; a `Replica` to the thread that trains.

    socket ──recv_into──► Received.arrays = variables ──read, kept──► tensors of anybody

A buffer is filled again only when no tensor uses its memory: TensorFlow holds a reference to the
array that it was given, as long as a tensor shares the array's memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tfos.keras.aligned_memory import aligned
from tfos.keras.compiled_call import CompiledCall
from tfos.keras.step import optimizers
from tfos.keras.step.exchange.held_weights import address, read
from tfos.keras.step.variables import VariableGroup, raw_bytes

MAX_SHARED = 4
"""Most buffers whose memory tensors may hold. Beyond it the variables get copies: a small tensor
that somebody keeps holds the memory of all parameters."""

Array = np.ndarray[Any, np.dtype[Any]]


class Received:
    """Memory for one answer of the servers: a flat array per group, of shape [elements]."""

    def __init__(self, groups: Sequence[VariableGroup]) -> None:
        self.arrays: dict[str, Array] = {
            group.name: aligned(sum(group.sizes), group.dtype) for group in groups
        }
        self._exported: list[weakref.ref[Array]] = []

    @property
    def is_shared(self) -> bool:
        """Whether somebody uses an array of `export`, or a part of it."""
        self._exported = [exported for exported in self._exported if exported() is not None]
        return bool(self._exported)

    def export(self, name: str) -> Array:
        """Return a new array over a group's memory, to be used by others."""
        array = self.arrays[name]
        # Over a memoryview, so that its parts refer to it and not to the array behind both.
        exported = np.frombuffer(array.data, array.dtype)
        self._exported.append(weakref.ref(exported))
        return exported


class GroupAssignment:
    """Gives the variables of one group their parts of a flat array, and a counter its value.

    Making a tensor from an array costs more than assigning a variable, so the array becomes one
    tensor, which a compiled function cuts. It runs in the calling thread: waking TensorFlow's
    threads costs more than the work. An assignment of the counter alone costs as much again.

    Args:
        group: the variables.
        counter: a scalar variable.
    """

    def __init__(self, group: VariableGroup, counter: Any) -> None:
        import tensorflow as tf

        self._ranges = [(v.value, tuple(v.shape), part) for v, part in group.ranges]

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def assign(flat: Any, count: Any) -> None:
            group.assign(flat)
            counter.assign(count, read_value=False)

        given = tf.TensorSpec([sum(group.sizes)], group.dtype), tf.TensorSpec([], counter.dtype)
        self._assign = CompiledCall(assign.get_concrete_function(*given), in_this_thread=True)

    def share(self, flat: Array, count: Array) -> None:
        """Let the variables share the memory of `flat` [elements] where the alignment allows it."""
        import tensorflow as tf

        # An op takes an array as it is. `tf.constant` would copy it; a tensor by DLPack needs the
        # GIL when it is released, which happens under the lock of a variable.
        self._assign(tf.raw_ops.Identity(input=flat), tf.constant(count))

    def copy(self, flat: Array) -> None:
        """Give each variable a copy of its part of `flat` [elements], in memory of its own.

        Parts of one tensor would hold the memory of all parameters, as long as any of them is kept.
        """
        for value, shape, part in self._ranges:
            own = flat[part].reshape(shape).astype(value.dtype.as_numpy_dtype)
            value.assign(own, read_value=False)


class Replica:
    """Keeps a model's variables at the servers' values.

    Args:
        groups: the variables that the servers hold.
        optimizer: the model's optimizer; its `iterations` counts the servers' updates. With
            accumulation its internal counter counts batches, unpushed ones included.
    """

    def __init__(self, groups: Sequence[VariableGroup], optimizer: Any) -> None:
        self._groups = tuple(groups)
        self._iterations = optimizers.unwrap(optimizer)._iterations.value
        self._assignments = {
            group.name: GroupAssignment(group, self._iterations) for group in groups
        }
        self._batches_per_update = optimizers.batches_per_update(optimizer)
        self._given: list[Received] = []
        self._adopted: Received | None = None
        self._statistics: Received | None = None
        """Values that the layers' statistics have; None: they have moved on."""
        self._copies: dict[int, Any] = {}
        """Tensors over the memory of variables that hold received values in memory of their own, by
        variable. Writing a variable gives it other memory while somebody holds the old one."""

    @property
    def knows_values(self) -> bool:
        """Whether the received values, with which `changed_here` compares, are still there."""
        return self._adopted is not None

    def hold_copies(self) -> None:
        """Hold the variables' values, just adopted, to compare them by their address."""
        for variable, _, own in self._outside():
            self._copies[id(variable)] = own

    def changed_here(self) -> str:
        """Return the path of a trained variable that has other values than received; empty: none.

        Call it while nothing is in flight; it compares values only where no tensor held them.
        """
        for variable, received, own in self._outside():
            held = self._copies.get(id(variable))
            if held is not None and address(held) == address(own):
                continue
            if not _are_equal(own, received):
                return str(variable.path)
            self._copies[id(variable)] = own
        return ""

    def _outside(self) -> Iterator[tuple[Any, Array, Any]]:
        """Yield variables whose memory is not the adopted buffer's, with received and own values.

        Nothing writes to the buffer, so a variable that shares its memory has what was received.
        """
        adopted = self._adopted
        for group in self._groups:
            if not group.trainable or adopted is None:
                continue
            flat = adopted.arrays[group.name]
            for variable, part in group.ranges:
                own = read(variable)
                if address(own) != flat[part].ctypes.data:
                    yield variable, flat[part], own

    def set_statistic(self) -> str:
        """Return the path of a statistic that has another value than received; empty: none.

        A layer changes its own in a step, but also when the program calls the model to train.
        """
        for group in self._groups:
            if group.trainable or self._statistics is None:
                continue
            flat = self._statistics.arrays[group.name]
            for variable, part in group.ranges:
                if not _are_equal(read(variable), flat[part]):
                    return str(variable.path)
        return ""

    def forget_statistics(self) -> None:
        """Stop comparing the statistics, which a step has changed, until the next values come."""
        self._statistics = None

    def forget_values(self) -> None:
        """Stop comparing the variables with what was received, until the next values come."""
        self._adopted = self._statistics = None
        self._copies.clear()

    def take(self) -> Received:
        """Return a buffer that nobody uses, with arbitrary content."""
        for index, received in enumerate(self._given):
            if not received.is_shared:
                if received is self._adopted:  # the variables have copies, and this changes
                    self.forget_values()
                return self._given.pop(index)
        return Received(self._groups)

    def give(self, received: Received) -> None:
        """Return a buffer that receives no more values; tensors may still use it."""
        self._given.append(received)

    def adopt(self, received: Received, iterations: int, *, statistics: bool = True) -> None:
        """Set the variables to received values; the trainable ones share the buffer's memory.

        Args:
            received: values of all groups; do not write to it before `take` returns it again.
            iterations: new value of the optimizer's `iterations`.
            statistics: whether to assign the layers' statistics as well.
        """
        self._copies.clear()  # before the variables get other memory, so that this memory is free
        is_full = sum(given.is_shared for given in self._given) >= MAX_SHARED
        count = self._count_of(iterations)
        is_counted = False
        for group in self._groups:
            if not group.trainable and not statistics:
                continue
            assignment, values = self._assignments[group.name], received.arrays[group.name]
            if group.trainable and is_full:
                assignment.copy(values)
                continue
            own = received.export(group.name) if group.trainable else values.copy()
            assignment.share(own, count)
            is_counted = True
        self._adopted = received
        self._statistics = received if statistics else None
        if not is_counted:
            self._set_count(count)

    def count(self, iterations: int) -> None:
        """Set the optimizer's counter alone."""
        self._set_count(self._count_of(iterations))

    def _count_of(self, iterations: int) -> Array:
        count = iterations * self._batches_per_update
        if self._batches_per_update > 1:
            count += int(self._iterations) % self._batches_per_update
        return np.array(count, self._iterations.dtype.as_numpy_dtype)

    def _set_count(self, count: Array) -> None:
        import tensorflow as tf

        tf.raw_ops.AssignVariableOp(resource=self._iterations.handle, value=count)


def _are_equal(own: Any, received: Array) -> bool:
    """Whether a variable's tensor has exactly the received values."""
    return np.array_equal(raw_bytes(own), raw_bytes(received, own.dtype.as_numpy_dtype))
