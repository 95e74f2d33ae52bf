"""What a skipped step leaves as it was: metrics, and the layers' statistics.

Covers: states before a step, their return after one that is skipped, that step's logs.
Does not: decide what is skipped (tfos.keras.step.trainer).
Threads: those of the step.

Keras updates loss and metrics inside of `train_step`, and layers their statistics, before anybody
knows whether the gradient is finite. One NaN in a running mean stays there: in a metric until the
end of the epoch, in a statistic of BatchNormalization for good.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class StatesBefore:
    """Variables as they are before a step; for compiled functions.

    Args:
        variables: of Keras.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        import tensorflow as tf

        self._states = [(variable.value, tf.identity(variable.value)) for variable in variables]

    def restored_unless(self, finite: Any) -> None:
        """Take the variables back where the step's gradient is not finite.

        Args:
            finite: scalar bool tensor.
        """
        import tensorflow as tf

        for state, before in self._states:
            state.assign(tf.where(finite, state.read_value(), before))


class MetricsBefore:
    """The metrics as they are before a step; for compiled functions.

    Args:
        model: built and compiled.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        known = model.metrics_variables
        self._states = StatesBefore(known)
        self._known = {id(each) for each in known}

    def restored_unless(self, finite: Any, logs: Any) -> Any:
        """Take the metrics back where the step's gradient is not finite; return the step's logs.

        Args:
            finite: scalar bool tensor.
            logs: what `train_step` returned; values that are not the metrics' stay as they are.
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
