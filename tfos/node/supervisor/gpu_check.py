"""GPU check: whether the GPUs that Spark gave to a node are there and free, as its start goes on.

Covers: further looks while other processes end, the sentence about what is wrong.
Does not: read nvidia-smi (tfos.node.gpus), end the node (tfos.node.supervisor.supervisor).
Runs in: a worker's supervisor.
Threads: `start` in the main thread; the look has a thread of its own, as nvidia-smi may need
seconds, and hands its verdict to `tell` there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tfos.node import gpus, procfs
from tfos.node.gpus import GpuToolFailed, HostGpus

SETTLE_S = 5.0
"""Processes of the cluster before, or of a lost attempt, may take this long to free a GPU."""
SPARK_SETTLE_S = 80.0
"""Spark ends a Python worker that has had no task for a minute, and looks every 10 s."""
_LOOK_AGAIN_S = 0.5

Look = Callable[[], HostGpus | None]


@dataclass(frozen=True, slots=True)
class GpuTrouble:
    """What is wrong with a node's GPUs."""

    text: str
    is_certain: bool = True
    """False: nvidia-smi gave no answer."""
    settle_s: float = 0.0
    """Seconds within which it may become right."""


def judge(
    found: HostGpus, addresses: Sequence[str], ours: Collection[int] = ()
) -> GpuTrouble | None:
    """Return what is wrong with a node's GPUs; None: nothing.

    Args:
        found: the GPUs of the host.
        addresses: addresses of the node's GPUs, as Spark gave them.
        ours: pids of this node.
    """
    if missing := found.missing(addresses):
        known = ", ".join(each.index for each in found.gpus) or "none"
        return GpuTrouble(
            f"Spark gave this node GPU {', '.join(missing)}, and nvidia-smi lists {known}: compare "
            "the discovery script (spark.*.resource.gpu.discoveryScript) with this host"
        )
    held = found.held(addresses, ours)
    texts = [
        f"GPU {gpu.index} ({gpu.name}, {gpu.used_of_total}) is held by "
        + ", ".join(map(str, holders))
        for gpu, holders in held
    ]
    if not texts:
        return None
    advice = "End these processes, or share the GPU: ClusterConfig(busy_gpus='warn')"
    is_spark = all(each.is_spark for _, holders in held for each in holders)
    settle_s = SPARK_SETTLE_S if is_spark else SETTLE_S
    return GpuTrouble(f"{'; '.join(texts)}. {advice}", settle_s=settle_s)


class GpuCheck:
    """Looks once at the start, and again for SETTLE_S or SPARK_SETTLE_S while a GPU is held.

    Args:
        addresses: addresses of the node's GPUs.
        tell: gets what is wrong, or None, once and on the check's own thread.
        look: returns the GPUs of the host.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        tell: Callable[[GpuTrouble | None], None],
        look: Look = gpus.look,
    ) -> None:
        self._addresses = addresses
        self._tell = tell
        self._look = look

    def start(self) -> None:
        """Start; it ends within half a minute, or two after Spark's own Python workers."""
        threading.Thread(target=self._run, name="tfos-gpus", daemon=True).start()

    def _run(self) -> None:
        began_s = time.monotonic()
        while told := self._trouble():
            if time.monotonic() - began_s >= told.settle_s:
                break
            time.sleep(_LOOK_AGAIN_S)
        self._tell(told)

    def _trouble(self) -> GpuTrouble | None:
        try:
            found = self._look()
        except GpuToolFailed as error:
            names = ", ".join(self._addresses)
            text = f"nobody knows whether GPU {names} is there and free: {error}"
            return GpuTrouble(text, is_certain=False)
        if found is None:  # Spark may schedule what nvidia-smi does not know
            return None
        ours = {os.getpid(), *procfs.descendants()}
        return judge(found, self._addresses, ours)
