"""One rank: calls the user's function, and hands its value over as bytes.

Covers: the main_fun of every rank on Spark, the pickling of what the function returned.
Does not: start processes, unpickle (tfos.runner.spark_run).
Runs in: a worker's process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from tfos.errors import NotPicklable
from tfos.runner import ranks

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
        work: what to call.
        ctx: of this worker.

    Raises:
        NotPicklable: it returned what cannot travel.
    """
    group = ctx.rank_group()
    with ranks.entered(group, ctx.local_rank):
        value = work()
    ctx.hand_over(pickled(value, group.rank))


def pickled(value: Any, rank: int) -> bytes:
    """Return a rank's value as bytes.

    Args:
        value: what the function returned.
        rank: whose.

    Raises:
        NotPicklable: names the rank and the type.
    """
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise NotPicklable(
            f"rank {rank} returned a {type(value).__qualname__} that cannot be pickled: "
            f"{first_line}. Return plain data, such as model.get_weights()"
        ) from error
    return data
