"""Set statistics: whether the program has given a layer's statistic a value between steps.

Covers: the warning that servers without a barrier mix such a value with the previous ones.
Does not: compare what steps have written: that is what statistics are for; mix (ps.optim.formulas).
Threads: the thread that trains.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tfos.keras.step.exchange.held_weights import HeldWeights
from tfos.keras.step.variables import VariableGroup

logger = logging.getLogger(__name__)


class SetStatistics:
    """The statistics of one model since the servers' values came.

    Args:
        groups: the statistics.
        is_mixed: whether the servers take each worker's values into a running mean.
    """

    def __init__(self, groups: Sequence[VariableGroup], *, is_mixed: bool) -> None:
        self._groups = groups if is_mixed else ()
        self._held: HeldWeights | None = None

    def hold(self) -> None:
        """Hold the present values, which are the servers', until the next step."""
        if self._groups:
            self._held = HeldWeights(self._groups)

    def let_go(self) -> None:
        """Allow the program's own values, which reach the servers whole."""
        self._held = None

    def tell_changed(self) -> None:
        """Warn once if the values are other ones; before a step, which may change them."""
        held, self._held = self._held, None
        if held is None or not (path := held.changed()):
            return
        self._groups = ()
        logger.warning(
            "%r, which is not trained, was assigned between two steps. The servers keep a running "
            "mean of what the workers have in such weights, so this value is mixed with the "
            "previous ones and may never be reached. For a value that callbacks set on every "
            "worker (an annealed weight of a loss), use a tf.Variable, which stays in its process, "
            'or consistency="sync"',
            path,
        )
