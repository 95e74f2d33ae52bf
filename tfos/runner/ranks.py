"""What a function can use inside `tfos.run`: its rank, and the collective calls of all ranks.

Covers: the functions that programs call.      Does not: carry arrays (tfos.collectives).
Threads: one at a time per rank; see RankGroup.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tfos.collectives.group import DEFAULT_TIMEOUT_S, Op, RankGroup
from tfos.errors import PhaseError
from tfos.runner.horovod_init import refuse_lone_init


@dataclass(frozen=True, slots=True)
class _Run:
    group: RankGroup
    local_rank: int


_running: list[_Run] = []
"""The current run, if any: a process is at most one rank."""


@contextlib.contextmanager
def entered(group: RankGroup, local_rank: int) -> Iterator[None]:
    """Make the functions below answer for this run, and Horovod's refuse.

    Args:
        group: ranks of the run.
        local_rank: number of this rank among the ranks of its host.
    """
    refuse_lone_init(group.size)
    _running.append(_Run(group, local_rank))
    try:
        yield
    finally:
        _running.pop()


def rank() -> int:
    """Return the number of this process in its run, from 0.

    Raises:
        PhaseError: outside of tfos.run.
    """
    return _current("rank()").group.rank


def size() -> int:
    """Return the number of ranks of the run.

    Raises:
        PhaseError: outside of tfos.run.
    """
    return _current("size()").group.size


def local_rank() -> int:
    """Return the number of this rank among the ranks of its host, from 0.

    Raises:
        PhaseError: outside of tfos.run.
    """
    return _current("local_rank()").local_rank


def barrier(*, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Return when every rank has made this call; see RankGroup.barrier.

    Args:
        timeout_s: seconds to wait for the slowest rank.
    """
    _current("barrier()").group.barrier(timeout_s=timeout_s)


def broadcast(value: Any = None, root: int = 0, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """Return one rank's value; see RankGroup.broadcast.

    Args:
        value: the root's value: numbers or numpy arrays, alone or in a list, tuple or dict.
        root: rank whose value is returned.
        timeout_s: seconds to wait for the slowest rank.
    """
    return _current("broadcast()").group.broadcast(value, root, timeout_s=timeout_s)


def allreduce(value: Any, op: Op, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """Return the sum, mean, minimum or maximum of all ranks' values; see RankGroup.allreduce.

    `op` has no default: Horovod's is the mean, MPI's the sum.

    Args:
        value: as for `broadcast`, with the same shapes and dtypes on all ranks.
        op: "sum", "mean" (of floats), "min" or "max".
        timeout_s: seconds to wait for the slowest rank.
    """
    return _current("allreduce()").group.allreduce(value, op, timeout_s=timeout_s)


def allgather(value: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
    """Return the values of all ranks, in rank order; see RankGroup.allgather.

    The result is a list; Horovod concatenates, like `np.concatenate(allgather(array))`.

    Args:
        value: as for `broadcast`; shapes and dtypes may differ.
        timeout_s: seconds to wait for the slowest rank.
    """
    return _current("allgather()").group.allgather(value, timeout_s=timeout_s)


def _current(call: str) -> _Run:
    if not _running:
        raise PhaseError(
            f"{call} was called outside of a run: there are ranks only in the function that "
            "tfos.run(fn, num_proc=N) or tfos.Runner(np=N).run(fn) calls"
        )
    return _running[-1]
