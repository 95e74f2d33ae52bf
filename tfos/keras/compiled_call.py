"""Compiled call: runs a concrete function whose arguments are known to fit.

Covers: tensors in the order of the function's inputs, results in the function's nesting.
Does not: trace, or choose the function of a batch (tfos.keras.step.gradients.traces).
Threads: any, one at a time.

TensorFlow binds, checks and casts each argument of a call, looks up what it needs to run a function
and packs its results one by one. That takes longer than a small function runs. A caller that has
chosen the function by the kind of the batch has checked all of that.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import optree


class CompiledCall:
    """A concrete function of nested tensors.

    Args:
        concrete: TensorFlow's concrete function, traced for arguments by position.
        in_this_thread: whether the calling thread runs all of it: waking TensorFlow's threads costs
            more than a small function. Its errors name no operation.
    """

    def __init__(self, concrete: Any, *, in_this_thread: bool = False) -> None:
        import tensorflow as tf
        from tensorflow.python.eager import context, execute
        from tensorflow.python.eager.polymorphic_function import atomic_function

        self._concrete = concrete
        self._function = concrete._inference_function
        self._name = self._function.name.decode()
        self._captured = concrete.captured_inputs
        self._num_outputs = len(self._function.function_type.flat_outputs)
        self._context = context.context()
        self._execute = execute.execute
        self._explained = atomic_function.InterpolateRuntimeError(self._function)
        executor = "SINGLE_THREADED_EXECUTOR" if in_this_thread else ""
        with tf.experimental.function_executor_type(executor):
            options = self._context.function_call_options.as_attrs()
        self._attributes = tuple(part for option in options.items() for part in option)
        self._takes_leaves: bool | None = None
        """Whether its inputs are the leaves of its arguments; None: it was never called."""
        self._nesting: Any = None
        """Nesting of the results; None: their tensors are not the function's outputs in order."""

    def __call__(self, *data: Any) -> Any:
        """Return the function's result for arguments of the kind that it was traced for."""
        leaves = leaves_of(data)
        if self._takes_leaves is None:
            self._takes_leaves = self._is_in_order(data, leaves)
        if not self._takes_leaves:
            return self._concrete(*data)
        inputs = [*leaves, *self._captured]
        with self._explained:
            outputs = self._execute(
                self._name, self._num_outputs, inputs, self._attributes, self._context
            )
        return self._packed(outputs) if self._nesting is None else self._nesting.unflatten(outputs)

    def _is_in_order(self, data: tuple[Any, ...], leaves: list[Any]) -> bool:
        """Compare the leaves with what TensorFlow makes of the arguments."""
        if any(map(callable, self._concrete._captured_inputs)):
            return False  # further inputs, which TensorFlow asks for at each call
        kind = self._concrete.function_type
        expected = kind.unpack_inputs(kind.bind(*data))
        return len(expected) == len(leaves) and all(map(operator.is_, expected, leaves))

    def _packed(self, outputs: Sequence[Any]) -> Any:
        packed = self._function.function_type.pack_output(outputs or None)
        found, nesting = optree.tree_flatten(packed)
        if len(found) == len(outputs) and all(map(operator.is_, found, outputs)):
            self._nesting = nesting
        return packed


def leaves_of(data: Any) -> list[Any]:
    """Return the tensors of nested ones, in the order in which functions take them, without None.

    Args:
        data: arguments of a function, or a batch.
    """
    import tensorflow as tf

    return [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]
