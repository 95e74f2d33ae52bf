"""Calls of TFCluster for its web pages: TensorBoard, the job's page, metrics.

Covers: their URLs and tokens.      Does not: serve (tfos.node.supervisor, tfos.watch).
Runs in: the driver.      Threads: any.
"""

from __future__ import annotations

from tfos.control.state.cluster_view import ClusterView
from tfos.driver.reservation import Reservation
from tfos.phases import ClusterPhase
from tfos.spark.interruptible import InterruptibleCall

_TENSORBOARD_S = 15.0
"""Seconds after the start within which TensorBoard serves, or the reason is known."""


class PageCalls:
    """Methods of TFCluster for its web pages."""

    _reserved: Reservation

    def tensorboard_url(self) -> str | None:
        """Return where TensorBoard answers, or None. Waits up to 15 s after the start."""
        if not self._reserved.settings.tensorboard.is_wanted:
            return None

        def known(state: ClusterView) -> bool:
            return state.tensorboard is not None or state.phase is not ClusterPhase.RUNNING

        coordinator = self._reserved.coordinator
        InterruptibleCall(
            "tfos-tensorboard_url()", lambda: coordinator.wait(known, _TENSORBOARD_S)
        ).result()
        up = coordinator.read(lambda state: state.tensorboard)
        return up.url or None if up is not None else None

    def page_url(self) -> str | None:
        """Return the job's page with its token, or None without `page_port`.

        The token lets its reader save and stop the training: the URL is written nowhere but into
        the user's own ticket, which `tfos page` reads.
        """
        page = self._reserved.page
        return page.url if page is not None else None

    def metrics_url(self) -> str | None:
        """Return where Prometheus finds the cluster's metrics, or None without `metrics_port`."""
        page = self._reserved.metrics
        return page.url if page is not None else None

    def metrics_token(self) -> str | None:
        """Return the token that readers send as `Authorization: Bearer`, or None.

        It is written nowhere else: not into logs, Spark's configuration or the environment.
        """
        page = self._reserved.metrics
        return page.token or None if page is not None else None
