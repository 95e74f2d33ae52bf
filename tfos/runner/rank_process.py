"""One rank: calls the user's function, and hands over its value as bytes.

Covers: the main_fun of every rank on Spark.
Does not: start processes, unpickle (tfos.runner.spark_run).
Runs in: a worker's process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tfos.runner import ranks
from tfos.spark.pickling import pickle_value

if TYPE_CHECKING:
    from tfos.worker.context import NodeContext


class RankWork(NamedTuple):
    """What every rank calls."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self) -> Any:
        """Call it."""
        return self.function(*self.args, **self.kwargs)


def run_rank(work: RankWork, ctx: NodeContext) -> None:
    """Call the function as one rank.

    Args:
        work: the function and its arguments.
        ctx: context of this worker.

    Raises:
        NotPicklable: the return value cannot be pickled.
    """
    group = ctx.rank_group()
    with ranks.entered(group, ctx.local_rank):
        value = work()
    ctx.hand_over(pickle_value(value, f"rank {group.rank}"))
