"""Memory of an executor: what Spark asks for, and what that leaves for the nodes on it.

Covers: the arithmetic of Spark's settings with their defaults, and its sentences.
Does not: ask Spark or a host (tfos.spark.facts, tfos.doctor.collection). Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tfos.errors import ConfigError
from tfos.node_memory import overhead_mib
from tfos.spark.facts import is_true

_SIZE = re.compile(r"(\d+)\s*(b|[kmgtp])?(?:(?<=[kmgtp])i?b)?", re.IGNORECASE)
_MIB = {"b": 1 / 1024**2, "k": 1 / 1024, "m": 1, "g": 1024, "t": 1024**2, "p": 1024**3}
_CONTAINED = ("yarn", "k8s")


@dataclass(frozen=True, slots=True)
class ExecutorMemory:
    """What one executor is given, in MiB. The nodes' processes live beside its Java."""

    heap_mib: float
    """`spark.executor.memory`: Java's heap; of no use to a node."""
    overhead_mib: float
    """`spark.executor.memoryOverhead`, as set or by Spark's own rule."""
    off_heap_mib: float
    """`spark.memory.offHeap.size` where it is enabled; Java's too."""
    python_mib: float
    """`spark.executor.pyspark.memory`, which a container has in addition; 0: it is not set."""
    slots: int
    """Tasks, and therefore nodes, that it runs at once."""
    is_contained: bool
    """Whether a cluster manager gives a container of the sum; else only the host is a limit."""

    @property
    def container_mib(self) -> float:
        """What the cluster manager reserves for the executor."""
        return self.heap_mib + self.overhead_mib + self.off_heap_mib + self.python_mib

    @property
    def room_mib(self) -> float:
        """What a container has for the processes of nodes; 0: there is no container."""
        return self.overhead_mib + self.python_mib if self.is_contained else 0.0

    def sentence(self) -> str:
        """Return the sum that a container is asked for."""
        off_heap = f" + {self.off_heap_mib:.0f} off-heap" if self.off_heap_mib else ""
        python = f" + {self.python_mib:.0f} pyspark" if self.python_mib else ""
        return (
            f"an executor's container of {self.container_mib:.0f} MiB = {self.heap_mib:.0f} heap + "
            f"{self.overhead_mib:.0f} overhead{off_heap}{python}"
        )

    def shortage(self, nodes: int = 1) -> str:
        """Return what nodes with TensorFlow lack, and what to set; "": nothing, or no container.

        Args:
            nodes: number of nodes on this executor.
        """
        needed_mib = overhead_mib(nodes)
        if not self.is_contained or self.room_mib >= needed_mib:
            return ""
        processes = "1 node needs" if nodes == 1 else f"{nodes} nodes need"
        return (
            f"{self.sentence()}: nodes use the overhead, and {processes} {needed_mib} MiB with "
            f"TensorFlow, before any model. Set spark.executor.memoryOverhead={needed_mib}m or "
            "more"
        )


def of_settings(conf: Mapping[str, str], master: str) -> ExecutorMemory:
    """Return what each executor is given under these settings.

    Args:
        conf: Spark's settings.
        master: Spark's master.

    Raises:
        ConfigError: a size or number is invalid.
    """
    heap_mib = mib(conf.get("spark.executor.memory", "1g"))
    overhead = conf.get("spark.executor.memoryOverhead")
    if overhead is not None:
        overhead_mib = mib(overhead)
    else:
        least_mib = mib(conf.get("spark.executor.minMemoryOverhead", "384m"))
        overhead_mib = max(least_mib, math.floor(_overhead_factor(conf, master) * heap_mib))
    off_heap_mib = mib(conf.get("spark.memory.offHeap.size", "0"), bare="b")
    cores = _number(conf, "spark.executor.cores", 1)
    return ExecutorMemory(
        heap_mib=heap_mib,
        overhead_mib=overhead_mib,
        off_heap_mib=off_heap_mib if is_true(conf, "spark.memory.offHeap.enabled") else 0,
        python_mib=mib(conf.get("spark.executor.pyspark.memory", "0")),
        slots=max(1, cores // _number(conf, "spark.task.cpus", 1)),
        is_contained=is_contained(master),
    )


def is_contained(master: str) -> bool:
    """Whether executors run in containers of a cluster manager, whose memory is a limit.

    Args:
        master: Spark's master.
    """
    return master.startswith(_CONTAINED)


def mib(size: str, *, bare: str = "m") -> float:
    """Return a size of Spark's settings in MiB.

    Args:
        size: the size as Spark reads it, e.g. 2g.
        bare: unit of a number without one; it differs between settings.

    Raises:
        ConfigError: it is not a size.
    """
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ConfigError(f"{size!r} is not a size that Spark understands, e.g. 2g or 512m.")
    return int(match.group(1)) * _MIB[(match.group(2) or bare).lower()]


def _overhead_factor(conf: Mapping[str, str], master: str) -> float:
    """Return the share of the heap; Kubernetes has a larger one for programs in Python."""
    stated = conf.get("spark.executor.memoryOverheadFactor")
    if stated is None and master.startswith("k8s"):
        stated = conf.get("spark.kubernetes.memoryOverheadFactor", "0.4")
    try:
        return float(stated or "0.1")
    except ValueError:
        raise ConfigError(
            f"spark.executor.memoryOverheadFactor={stated!r} is not a number; e.g. 0.1."
        ) from None


def _number(conf: Mapping[str, str], key: str, default: int) -> int:
    text = conf.get(key, str(default))
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(f"{key}={text!r} must be an int >= 1.")
    return int(text)
