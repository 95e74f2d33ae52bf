"""Containers that YARN has given to an application.

Covers: one bounded request to the ResourceManager, with the client that Spark includes.
Does not: judge the answer (tfos.slots.offer), or see what happens in a container: YARN reports a
container that is being localised as running.
Threads: one at a time.
"""

from __future__ import annotations

import logging
import time
from typing import Any

_logger = logging.getLogger(__name__)

_FRESH_S = 2.0
"""Seconds for which an answer is reused: each costs the ResourceManager a request."""
_PATIENCE_MS = 3000


class YarnContainers:
    """Counts the containers of an application's executors.

    Args:
        sc: the SparkContext; without YARN as its master, there are no containers.
    """

    def __init__(self, sc: Any) -> None:
        self._sc = sc
        self._is_asked = sc.master == "yarn"
        self._asked_s = 0.0
        self._count: int | None = None

    def count(self) -> int | None:
        """Return the number of the executors' containers now; None: unknown."""
        now_s = time.monotonic()
        if self._is_asked and (self._count is None or now_s - self._asked_s >= _FRESH_S):
            try:
                self._count = max(0, self._used() - 1)  # one belongs to the ApplicationMaster
            except Exception as error:  # noqa: BLE001 - py4j's, whose kinds need pyspark; a detail
                _logger.info("YARN does not tell its containers: %s", error)
                self._is_asked, self._count = False, None
            self._asked_s = time.monotonic()
        return self._count

    def _used(self) -> int:
        api = self._sc._jvm.org.apache.hadoop
        conf = api.conf.Configuration(self._sc._jsc.hadoopConfiguration())
        # By default a silent ResourceManager would be asked for 15 minutes.
        conf.setInt("yarn.resourcemanager.connect.max-wait.ms", _PATIENCE_MS)
        conf.setInt("yarn.resourcemanager.connect.retry-interval.ms", _PATIENCE_MS // 3)
        conf.setInt("ipc.client.rpc-timeout.ms", _PATIENCE_MS)
        client = api.yarn.client.api.YarnClient.createYarnClient()
        client.init(conf)
        client.start()
        try:
            app = api.yarn.api.records.ApplicationId.fromString(self._sc.applicationId)
            usage = client.getApplicationReport(app).getApplicationResourceUsageReport()
            return int(usage.getNumUsedContainers())
        finally:
            client.stop()
