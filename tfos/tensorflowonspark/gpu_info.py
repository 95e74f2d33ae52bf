"""gpu_info: which GPUs of this host are free, by nvidia-smi.

Covers: is_gpu_available, get_gpus, the choice among free GPUs.
Does not: ask nvidia-smi (tfos.node.gpus), reserve GPUs: another process may take one later.
Runs in: any process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tfos.errors import SettingsError, UnsupportedError
from tfos.node import gpus
from tfos.node.gpus import GpuToolFailed, HostGpus

MAX_RETRIES = 3
"""Number of searches for free GPUs."""
RETRY_S = 30.0
"""Seconds before the second search; the third waits twice as long."""
AS_STRING = "string"
AS_LIST = "list"
_ASK_S = 60.0


def is_gpu_available() -> bool:
    """Return whether nvidia-smi finds a GPU on this host."""
    try:
        return bool(_all_gpus().gpus)
    except UnsupportedError:
        return False


def get_gpus(
    num_gpu: int = 1,
    worker_index: int = -1,
    format: str = AS_STRING,  # noqa: A002 - its name there
) -> str | list[str]:
    """Return the indexes of free GPUs, on which no process computes.

    Args:
        num_gpu: number of GPUs, 1 or more.
        worker_index: number of this process on this host: processes with other numbers get other
            GPUs while there are enough; -1: the first free ones.
        format: "string": joined by commas, for CUDA_VISIBLE_DEVICES; "list": a list.

    Raises:
        SettingsError: an argument is invalid.
        UnsupportedError: there are too few free GPUs, after three searches.
    """
    if num_gpu < 1 or format not in (AS_STRING, AS_LIST):
        raise SettingsError(
            f"num_gpu must be >= 1 and format {AS_STRING!r} or {AS_LIST!r}, got {num_gpu} and "
            f"{format!r}"
        )
    free: list[str] = []
    for attempt in range(MAX_RETRIES):
        time.sleep(RETRY_S * attempt)
        free = _free_gpus()
        if len(free) >= num_gpu:
            chosen = choose(free, num_gpu, worker_index)
            return ",".join(chosen) if format == AS_STRING else chosen
    known = len(_all_gpus().gpus)
    raise UnsupportedError(
        f"{num_gpu} free GPU(s) asked for, and {len(free)} of {known} are free on this host; "
        "nvidia-smi shows who uses them. Lower num_gpus, or end those processes"
    )


def choose(free: Sequence[str], num_gpu: int, worker_index: int) -> list[str]:
    """Return `num_gpu` of the free GPUs: each worker gets the next ones, starting over at the end.

    Args:
        free: indexes of at least `num_gpu` GPUs.
        num_gpu: number of GPUs.
        worker_index: number of the process on its host, -1 for the first.
    """
    first = max(worker_index, 0) * num_gpu
    return [free[(first + place) % len(free)] for place in range(num_gpu)]


def _free_gpus() -> list[str]:
    found = _all_gpus()
    busy = {holder.gpu_uuid for holder in found.holders}
    return [gpu.index for gpu in found.gpus if gpu.uuid not in busy]


def _all_gpus() -> HostGpus:
    try:
        found = gpus.look(_ASK_S)
    except GpuToolFailed as error:
        raise UnsupportedError(f"the GPUs of this host are unknown: {error}") from None
    if found is None:
        raise UnsupportedError("this host has no nvidia-smi, so its GPUs are unknown")
    return found
