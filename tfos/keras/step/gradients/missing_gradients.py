"""Missing gradients: variables that a step does not reach.

Covers: refusing steps because of them, the warning.
Does not: find them (tfos.keras.step.gradients.gradient_step).

Keras skips a variable whose gradient is None. Here its part of the flat gradient is zero. With
fresh slots every rule then leaves value and slots unchanged, bit for bit; SGD without momentum and
Adagrad do so with any slots. Where that does not hold (weight decay, momentum from another kind of
batch), the step is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from tfos.errors import UnsupportedModel
from tfos.keras.step import optimizers
from tfos.keras.step.variables import Variables


class MissingGradients:
    """The variables of one model that get no gradient.

    Args:
        variables: the model's variables.
        optimizer: the inner optimizer, whose rule the servers have.
    """

    def __init__(self, variables: Variables, optimizer: Any) -> None:
        self._variables = variables
        self._inner = optimizer
        self._known: frozenset[int] | None = None
        """Ids of the variables without gradient in the first kind of batch."""

    def check(self, missing: Sequence[Any]) -> None:
        """Refuse a step in which a variable without gradient would move.

        Args:
            missing: the trainable variables without gradient in this kind of batch.
        """
        decaying = {
            id(v) for group in self._variables.trainable if group.decays for v in group.variables
        }
        if decayed := [v.path for v in missing if id(v) in decaying]:
            raise UnsupportedModel(
                f"{decayed} get no gradient, but the servers would apply the optimizer's "
                "weight_decay to them; set their layers' trainable=False, or call "
                "optimizer.exclude_from_weight_decay(var_list=[...]) before ctx.distribute(model)"
            )
        if missing and optimizers.moves_without_gradient(self._inner):
            raise UnsupportedModel(
                f"{[v.path for v in missing]} get no gradient, but on the servers "
                f"{type(self._inner).__name__} with these settings changes values whose gradient "
                "is zero; set their layers' trainable=False, or use another optimizer"
            )
        ids = frozenset(id(v) for v in missing)
        if self._known is None or optimizers.keeps_without_gradient(self._inner):
            if missing:
                warnings.warn(
                    f"Gradients do not exist for variables {[v.path for v in missing]} when "
                    "minimizing the loss; they stay as they are.",
                    stacklevel=2,
                )
            self._known = ids
        elif differing := ids ^ self._known:
            paths = [v.path for v in self._variables.trained if id(v) in differing]
            raise UnsupportedModel(
                f"{paths} have gradients in some kinds of batches only. In the others, "
                f"{type(self._inner).__name__} with these settings would change their values or "
                "slots on the servers, but Keras would not. Let every batch reach the same "
                "variables, or use SGD without momentum or Adagrad, without accumulation"
            )
