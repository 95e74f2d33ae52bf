"""TFManager: queues in this process, for a DataFeed without a cluster.

Covers: start, the manager's values and queues, the feed over them.
Does not: serve other processes: workers of a cluster receive chunks on authenticated sockets.
Runs in: any process, mostly a test of a user's map_fun.      Threads: any.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from tfos.errors import SettingsError, UnsupportedError
from tfos.tensorflowonspark.queue_feed import QueueFeed
from tfos.worker.manager import ManagerValues

MODES = ("local", "remote")


class QueueManager(ManagerValues):
    """Queues and values by name.

    Args:
        queues: names of the queues.
    """

    def __init__(self, queues: Iterable[str]) -> None:
        super().__init__()
        self._queues: dict[str, queue.Queue[Any]] = {name: queue.Queue() for name in queues}

    def get_queue(self, name: str) -> queue.Queue[Any] | None:
        """Return the queue of this name, None if there is none."""
        return self._queues.get(name)

    def data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> QueueFeed:
        """Return a feed over two of the queues.

        Args:
            train_mode: False: a batch ends with its partition.
            qname_in: queue of the rows.
            qname_out: queue of the results.
            input_mapping: column name to tensor name; batches are then dicts of lists.

        Raises:
            SettingsError: there is no such queue.
        """
        rows, results = self._queues.get(qname_in), self._queues.get(qname_out)
        if rows is None:
            raise SettingsError(
                f"{qname_in!r} is no queue of this manager: {list(self._queues)}; name it in "
                "TFManager.start(authkey, queues)"
            )
        return QueueFeed(rows, results, train_mode, input_mapping)


def start(authkey: bytes, queues: Iterable[str], mode: str = "local") -> QueueManager:
    """Return a manager with these queues, in this process.

    Args:
        authkey: without effect: nothing listens.
        queues: names of the queues.
        mode: "local" or "remote", without effect.

    Raises:
        SettingsError: an unknown mode.
    """
    del authkey
    if mode not in MODES:
        raise SettingsError(f"mode must be one of {MODES}, got {mode!r}")
    return QueueManager(queues)


def connect(address: Any, authkey: bytes) -> NoReturn:
    """Refuse: no manager listens.

    Args:
        address: address of a manager.
        authkey: key of a manager.

    Raises:
        UnsupportedError: always; names what to use.
    """
    del authkey
    raise UnsupportedError(
        f"TFManager.connect({address!r}): workers have no manager that other processes reach. Feed "
        "rows by cluster.train(rdd) or cluster.inference(rdd), and read them by ctx.get_data_feed()"
    )
