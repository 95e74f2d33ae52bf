"""Memory of nodes: what one needs, and how much an executor's container needs for its nodes.

Covers: the one arithmetic behind every sentence that names `spark.executor.memoryOverhead`.
Does not: read Spark's settings (tfos.spark.executor_memory) or measure (tfos.node). Pure.
"""

from __future__ import annotations

import math

NODE_MEMORY_MIB = 2048
"""Memory that a process with TensorFlow needs before any model."""
ADDRESS_SPACE_MIB = 4096
"""Address space of such a process: a small fit of Keras mapped 2740 MiB on 2 cores (VmPeak), and
3680 with 64 threads in each of TensorFlow's pools; 2048 MiB ended it. CUDA maps far more."""
_MORE = 1.25
"""What nodes hold grows: waiting batches, a checkpoint in progress."""
_STEP_MIB = 256


def overhead_mib(nodes: int, held_mib: float = 0.0) -> int:
    """Return what to set `spark.executor.memoryOverhead` to.

    Args:
        nodes: number of nodes on one executor.
        held_mib: memory that they hold now; 0: they have not started.
    """
    return max(nodes * NODE_MEMORY_MIB, _STEP_MIB * math.ceil(held_mib * _MORE / _STEP_MIB))
