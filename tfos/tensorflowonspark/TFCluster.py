"""TFCluster as a module: `TFCluster.run(...)`, `TFCluster.InputMode`, and the class.

Covers: the names only; tfos.cluster does the work.
Runs in: the driver.
"""

from __future__ import annotations

from tfos.cluster import TFCluster
from tfos.config import InputMode

__all__ = ["InputMode", "TFCluster", "run"]

run = TFCluster.run
