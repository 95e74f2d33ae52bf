"""Memory of nodes: what one needs, and what an executor's container is to have for those on it.

Covers: the one arithmetic behind every sentence that names `spark.executor.memoryOverhead`.
Does not: read Spark's settings (tfos.spark.executor_memory) or measure (tfos.node). Pure.
"""

from __future__ import annotations

import math

NODE_MEMORY_MIB = 2048
"""Memory that a process with TensorFlow needs before any model."""
ADDRESS_SPACE_MIB = 4096
"""Address space of one: a small fit of Keras mapped 2740 MiB on 2 cores (VmPeak), and 3680 with 64
threads in each of TensorFlow's pools; 2048 MiB ended it. CUDA maps far more than a GPU's memory."""
_MORE = 1.25
"""What nodes hold grows: batches that wait, a checkpoint under way."""
_STEP_MIB = 256


def overhead_mib(nodes: int, held_mib: float = 0.0) -> int:
    """Return what to set `spark.executor.memoryOverhead` to.

    Args:
        nodes: on one executor.
        held_mib: by them now; 0: they have not begun.
    """
    return max(nodes * NODE_MEMORY_MIB, _STEP_MIB * math.ceil(held_mib * _MORE / _STEP_MIB))
