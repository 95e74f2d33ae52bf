"""Moving averages (use_ema) of a group's values, bucket by bucket.

Covers: the average after an update, and when it replaces the values.
Does not: hold arrays (ps.dense.shard keeps the average after the slots), lock.
Threads: none; the bucket's lock serialises all calls.

It is a separate pass over a bucket that the update has just left in the core's cache.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from ps.manifest.rule_spec import Descent, RuleConfig
from ps.optim import kernels

Array = np.ndarray[Any, Any]


class MovingAverage:
    """Exponential moving average of one group's values.

    `average = momentum * average + (1 - momentum) * v` after each update, weight decay included;
    after the first one it is v. At every `overwrite_frequency`-th update then `v = average`.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, SIAM J.
    Control Optim. 1992, with exponential weights as in keras.optimizers. Departure: updates are
    those of a bucket, as the t of ps.optim.formulas.adam.

    Args:
        momentum: weight of the old average, in [0, 1].
        overwrite_frequency: updates between two replacements of the values; None: never.
        dtype: dtype of the values and the average.
    """

    def __init__(
        self, momentum: float, overwrite_frequency: int | None, dtype: np.dtype[Any]
    ) -> None:
        self._frequency = overwrite_frequency
        kept = dtype.type(momentum)
        self._weights: Array = np.array((kept, dtype.type(1) - kept), dtype)
        kernels.warm([("blend", dtype.name)])

    @classmethod
    def if_kept(cls, config: RuleConfig, dtype: np.dtype[Any]) -> Self | None:
        """Return the average for a rule's settings, or None without `ema_momentum`.

        Args:
            config: the group's rule.
            dtype: dtype of the group.
        """
        if not isinstance(config, Descent) or config.ema_momentum is None:
            return None
        return cls(config.ema_momentum, config.ema_overwrite_frequency, dtype)

    def follow(self, values: Array, average: Array, step: int) -> None:
        """Update `average`, and `values` where the average replaces them.

        Args:
            values: [num_elements] of the group's dtype, after the update.
            average: like `values`; changed in place.
            step: number of the update, from 1.
        """
        if step == 1:
            np.copyto(average, values)
        else:
            kernels.blend(values, average, self._weights)
        if self._frequency is not None and step % self._frequency == 0:
            np.copyto(values, average)
