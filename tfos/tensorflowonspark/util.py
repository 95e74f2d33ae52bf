"""util: the few functions of TensorFlowOnSpark's util that programs call.

Covers: single_node_env, get_ip_address, find_in_path, the file of an executor's id.
Does not: cover anything that a tfos cluster needs.
Runs in: any process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rpc.endpoint import advertised_host
from tfos.errors import SettingsError
from tfos.tensorflowonspark import gpu_info

EXECUTOR_ID_FILE = "executor_id"


def single_node_env(num_gpus: int = 1, worker_index: int = -1, nodes: Sequence[str] = ()) -> None:
    """Prepare this process for stand-alone TensorFlow: no TF_CONFIG, its own GPUs.

    Args:
        num_gpus: GPUs of this process; 0: none.
        worker_index: number of this process among `nodes`, -1 if it is the only one.
        nodes: host of each process; those on one host get different GPUs.
    """
    os.environ.pop("TF_CONFIG", None)
    if num_gpus < 1 or not gpu_info.is_gpu_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    local = worker_index
    if 0 <= worker_index < len(nodes):
        local = list(nodes[:worker_index]).count(nodes[worker_index])
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu_info.get_gpus(num_gpus, local))


def get_ip_address() -> str:
    """Return the address of this host that other hosts see; 127.0.0.1 without a network."""
    return advertised_host()


def find_in_path(path: str, file: str) -> str | bool:
    """Return the first directory entry of this name in a search path; False if there is none.

    Args:
        path: directories, joined as in PATH.
        file: name of the file.
    """
    for directory in path.split(os.pathsep):
        candidate = os.path.join(directory, file)
        if os.path.isfile(candidate):
            return candidate
    return False


def write_executor_id(num: int) -> None:
    """Write a number into the file `executor_id` of this directory."""
    Path(EXECUTOR_ID_FILE).write_text(str(num))


def read_executor_id() -> int:
    """Return the number in the file `executor_id` of this directory.

    Raises:
        SettingsError: there is no such file, or no number in it.
    """
    try:
        return int(Path(EXECUTOR_ID_FILE).read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"no executor id in {Path(EXECUTOR_ID_FILE).absolute()} ({error}); tfos writes none: "
            "use ctx.executor_id or ctx.rank"
        ) from error
