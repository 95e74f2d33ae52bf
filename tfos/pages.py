"""Where the pages of a cluster are: TensorBoard and the metrics for Prometheus.

Covers: TFCluster's calls that name them.      Does not: serve them (node.tensorboard, metrics).
Runs in: the driver.
"""

from __future__ import annotations

from tfos.control.state import ClusterState
from tfos.driver.reservation import Reservation
from tfos.phases import ClusterPhase
from tfos.spark.interruptible import Errand

_TENSORBOARD_S = 15.0
"""TensorBoard answers within this time after the start, or its reason is known."""


class PageCalls:
    """What TFCluster offers about its pages."""

    _reserved: Reservation

    def tensorboard_url(self) -> str | None:
        """Return where TensorBoard answers, or None. Waits up to 15 s after the start."""
        if not self._reserved.settings.tensorboard:
            return None

        def known(state: ClusterState) -> bool:
            return state.tensorboard is not None or state.phase is not ClusterPhase.RUNNING

        coordinator = self._reserved.coordinator
        Errand("tfos-tensorboard_url()", lambda: coordinator.wait(known, _TENSORBOARD_S)).result()
        up = coordinator.read(lambda state: state.tensorboard)
        return up.url or None if up is not None else None

    def metrics_url(self) -> str | None:
        """Return where Prometheus finds the cluster's metrics, or None without `metrics_port`."""
        page = self._reserved.metrics
        return page.url if page is not None else None

    def metrics_token(self) -> str | None:
        """Return what readers of `metrics_url()` send as `Authorization: Bearer`; None: nothing.

        It is written nowhere else: not into logs, Spark's configuration or the environment.
        """
        page = self._reserved.metrics
        return page.token or None if page is not None else None
