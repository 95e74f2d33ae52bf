"""What a task takes of an executor, in cores and GPUs.

Covers: NodeShare, how many tasks fit into one.
Does not: read it of Spark (tfos.spark.facts), place nodes (tfos.slots.placing). Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What one node's Spark task takes of an executor."""

    cores: int = 1
    gpus: float = 0.0
    """GPUs; between 0 and 1: a part of one, which other tasks share."""

    def tasks(self, task: NodeShare) -> int:
        """Return how many tasks fit into this.

        Args:
            task: what one task takes.
        """
        by_cores = self.cores // task.cores
        return min(by_cores, math.floor(self.gpus / task.gpus)) if task.gpus else by_cores

    def in_slots(self, task: NodeShare) -> int:
        """Return how many slots of such tasks this takes, at least 1."""
        by_gpus = self.gpus / task.gpus if task.gpus else 0
        return max(1, math.ceil(self.cores / task.cores), math.ceil(by_gpus))

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' if self.cores != 1 else ''}"
        gpus = f" and {self.gpus:g} GPU{'s' if self.gpus != 1 else ''}" if self.gpus else ""
        return cores + gpus


ONE_CORE = NodeShare()
"""What a task takes by Spark's own defaults."""
