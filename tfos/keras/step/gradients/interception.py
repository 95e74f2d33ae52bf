"""Interception: a step gives its gradients to the servers instead of to the optimizer.

Covers: the optimizer's `apply` while one step runs.
Does not: compile or run a step (tfos.keras.step.gradients.gradient_step), see what a step writes
itself (tfos.keras.step.gradients.own_writes).
Threads: one at a time. While a step runs, `apply` of this one optimizer is intercepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tfos.errors import UnsupportedModel


class Captured:
    """Replacement of the optimizer's `apply` during one step.

    Args:
        optimizer: the model's optimizer.
        place: graph in which TensorFlow builds the step; `apply` must be called there.
    """

    def __init__(self, optimizer: Any, place: Any) -> None:
        self._optimizer = optimizer
        self._place = place
        self._pairs: list[tuple[Any, Any]] | None = None

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Keep the gradients instead of applying them.

        Args:
            grads: one tensor per trainable variable.
            trainable_variables: variables in the same order; required, though Keras has a default.
        """
        if self._pairs is not None:
            raise UnsupportedModel(
                "train_step applies gradients more than once in a step, but the parameter servers "
                "take one gradient per step; add the losses, or the gradients, and apply once"
            )
        if _place() is not self._place:
            raise UnsupportedModel(
                "train_step applies its gradients inside a tf.function, tf.cond or tf.while_loop "
                "inside the step; remove that wrapper, as the whole step is compiled anyway"
            )
        if trainable_variables is None:
            raise UnsupportedModel(
                "train_step calls optimizer.apply(gradients) without variables; pass them: "
                "optimizer.apply(gradients, self.trainable_variables)"
            )
        self._pairs = list(zip(list(grads), list(trainable_variables), strict=True))

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return (gradient, variable) as given to `apply`.

        Raises:
            UnsupportedModel: the step never applied any.
        """
        if self._pairs is None:
            raise UnsupportedModel(
                f"train_step did not call apply or apply_gradients of model.optimizer "
                f"({type(self._optimizer).__name__}), so nothing would reach the parameter "
                "servers; update the model through self.optimizer.apply(gradients, variables)"
            )
        return self._pairs


@contextmanager
def intercepted(optimizer: Any) -> Iterator[Captured]:
    """Make `optimizer.apply` of this one object keep its gradients while the block runs."""
    captured = Captured(optimizer, _place())
    optimizer.__dict__["apply"] = captured.apply  # not setattr: Keras would track it
    try:
        yield captured
    finally:
        del optimizer.__dict__["apply"]


def _place() -> Any:
    """Return the graph that is being built; None when running eagerly."""
    import tensorflow as tf

    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
