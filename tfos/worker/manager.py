"""WorkerManager: what programs written for TensorFlowOnSpark know as `ctx.mgr`.

Covers: the state that a program reads and sets; opening a DataFeed, for `TFNode.DataFeed(ctx.mgr)`.
Does not: hold queues: rows arrive in chunks (feeding.receiver), not one by one.
Runs in: the worker's process.      Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfos.errors import UnsupportedError

if TYPE_CHECKING:
    from feeding.receiver.data_feed import DataFeed

OpenFeed = Callable[[bool, str, str, Mapping[str, str] | None], "DataFeed"]


class ManagerValues:
    """Values that programs keep in a manager, by name."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {"state": "running"}

    def get(self, name: str) -> Any:
        """Return a value, or None if it was never set; `state` is "running" at first."""
        return self._values.get(name)

    def set(self, name: str, value: Any) -> None:
        """Keep a value in this process.

        Args:
            name: name of the value.
            value: any object.
        """
        self._values[name] = value


class WorkerManager(ManagerValues):
    """Manager of one worker's feeds under TensorFlowOnSpark's names.

    Args:
        data_feed: `ctx.get_data_feed`.
    """

    def __init__(self, data_feed: OpenFeed) -> None:
        super().__init__()
        self.data_feed = data_feed

    def get_queue(self, name: str) -> Any:
        """Refuse: there is no queue of single rows.

        Raises:
            UnsupportedError: always; the text names the call to use.
        """
        raise UnsupportedError(
            f"ctx.mgr.get_queue({name!r}): rows arrive in chunks, not in a queue. Read them with "
            "feed = ctx.get_data_feed() and feed.next_batch(n), and return results with "
            "feed.batch_results(results)"
        )
