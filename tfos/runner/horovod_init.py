"""Horovod's init in a rank: refused if it finds no other rank.

Covers: the `init` of Horovod's modules.      Does not: import Horovod.
Runs in: a rank's process.

A program that only changes its launch line still calls `hvd.init()`. Horovod does not join
the ranks of tfos, so each would be rank 0 of 1, and train a separate model.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from tfos.errors import UnsupportedError
from tfos.native.at_import import at_import

_MODULES = (
    "horovod.keras",
    "horovod.mxnet",
    "horovod.tensorflow",
    "horovod.tensorflow.keras",
    "horovod.torch",
)


def refuse_lone_init(num_ranks: int) -> None:
    """Make Horovod's `init` fail in this process if it finds only one process.

    Args:
        num_ranks: number of ranks of the run.
    """
    if num_ranks > 1:
        for name in _MODULES:
            at_import(name, functools.partial(_check_init, num_ranks=num_ranks))


def _check_init(module: ModuleType, num_ranks: int) -> None:
    plain = getattr(module, "init", None)
    if plain is None:
        return

    @functools.wraps(plain)
    def init(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        if module.size() == 1:
            raise UnsupportedError(
                f"{module.__name__}.init() has found 1 process in a run of {num_ranks} ranks: "
                "nothing joins Horovod here, and each rank would be its rank 0 of 1. Replace its "
                "calls by those of tfos.runner, whose rank() and allreduce() need no init, and "
                "DistributedOptimizer by tfos.MirroredStrategyRunner: docs/guides/runner.md, From "
                "Horovod's programs"
            )
        return found

    module.init = init  # type: ignore[attr-defined]  # Horovod's
