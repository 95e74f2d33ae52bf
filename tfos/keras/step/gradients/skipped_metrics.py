"""Metrics of a step that is skipped: its batch is in none of them.

Covers: the states of the model's metrics before a step, and the logs after one that is skipped.
Does not: decide what is skipped (tfos.keras.step.trainer).
Threads: those of the step.

Keras updates loss and metrics inside of `train_step`, before anybody knows whether the gradient is
finite. One NaN in a running mean stays there until the end of the epoch.
"""

from __future__ import annotations

from typing import Any


class MetricsBefore:
    """The metrics as they are before a step; for compiled functions.

    Args:
        model: built and compiled.
    """

    def __init__(self, model: Any) -> None:
        import tensorflow as tf

        self._model = model
        self._states = [
            (variable.value, tf.identity(variable.value)) for variable in model.metrics_variables
        ]

    def restored_unless(self, finite: Any, logs: Any) -> Any:
        """Take the metrics back where the step's gradient is not finite; return the step's logs.

        Args:
            finite: scalar bool tensor.
            logs: what `train_step` returned; values that are not the metrics' stay as they are.
        """
        import tensorflow as tf

        for state, before in self._states:
            state.assign(tf.where(finite, state.read_value(), before))
        found = self._model.get_metrics_result()
        if isinstance(logs, dict) and logs.keys() == found.keys():
            return found
        return logs
