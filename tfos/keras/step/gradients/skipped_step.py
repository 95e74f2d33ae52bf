"""What a skipped step leaves as it was: metrics, and the layers' statistics.

Covers: states before a step, restoring them after a skipped one, that step's logs.
Does not: decide what is skipped (tfos.keras.step.trainer).
Threads: those of the step.

In `train_step`, Keras updates loss and metrics, and layers update their statistics, before it is
known whether the gradient is finite. A NaN in a running mean stays there: in a metric until the end
of the epoch, in a statistic of BatchNormalization for good.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class StatesBefore:
    """Variables as they are before a step; for compiled functions.

    Args:
        variables: Keras variables.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        import tensorflow as tf

        self._states = [(variable.value, tf.identity(variable.value)) for variable in variables]

    def restored_unless(self, finite: Any) -> None:
        """Restore the variables if the step's gradient is not finite.

        Args:
            finite: scalar bool tensor.
        """
        import tensorflow as tf

        for state, before in self._states:
            state.assign(tf.where(finite, state.read_value(), before))


class MetricsBefore:
    """The metrics as they are before a step; for compiled functions.

    Args:
        model: the built and compiled model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        known = model.metrics_variables
        self._states = StatesBefore(known)
        self._known = {id(each) for each in known}

    def restored_unless(self, finite: Any, logs: Any) -> Any:
        """Restore the metrics if the step's gradient is not finite; return the step's logs.

        Args:
            finite: scalar bool tensor.
            logs: logs that `train_step` returned; values other than metrics stay as they are.
        """
        import tensorflow as tf

        self._states.restored_unless(finite)
        if tf.executing_eagerly() and not finite:  # a traced step is traced again with them
            for metric in self._model.metrics:
                if not self._known.issuperset(map(id, metric.variables)):
                    metric.reset_state()  # the step has made its variables
        found = self._model.get_metrics_result()
        if isinstance(logs, dict) and logs.keys() == found.keys():
            return found
        return logs
