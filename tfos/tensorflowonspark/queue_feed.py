"""QueueFeed: DataFeed's methods over queues of this process.

Covers: batches up to the end of the feed or of a partition, results, terminate.
Does not: read a worker's rows: feeding.receiver.data_feed does.
Threads: one reader; the queues' writers are others, or the same before.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping
from typing import Any

from feeding.columnar.batch import check_batch_size, check_input_mapping
from tfos.errors import SettingsError
from tfos.tensorflowonspark.marker import EndPartition


class QueueFeed:
    """Rows of a queue; None ends the feed, an EndPartition a batch of inference.

    Args:
        rows: the queue that is read.
        results: takes the results; None: no results.
        train_mode: False: a batch ends with its partition.
        input_mapping: column name to tensor name; batches are then dicts of lists.
    """

    def __init__(
        self,
        rows: queue.Queue[Any],
        results: queue.Queue[Any] | None,
        train_mode: bool = True,
        input_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self.train_mode = train_mode
        self.done_feeding = False
        self._rows = rows
        self._results = results
        mapping = check_input_mapping(input_mapping)
        self._tensors = list(mapping.values()) if mapping else None

    def next_batch(self, batch_size: int) -> list[Any] | dict[str, list[Any]]:
        """Return up to `batch_size` rows; fewer at the end of the feed or of a partition."""
        rows: list[Any] = []
        missing = check_batch_size(batch_size)
        while len(rows) < missing and not self.done_feeding:
            item = self._rows.get()
            self._rows.task_done()
            if item is None:
                self.done_feeding = True
            elif not isinstance(item, EndPartition):
                rows.append(item)
            elif rows and not self.train_mode:
                break
        if self._tensors is None:
            return rows
        return {tensor: [row[place] for row in rows] for place, tensor in enumerate(self._tensors)}

    def should_stop(self) -> bool:
        """Return whether the end of the feed was read."""
        return self.done_feeding

    def batch_results(self, results: Iterable[Any]) -> None:
        """Put results into the queue of results, one by one.

        Raises:
            SettingsError: there is no queue of results.
        """
        if self._results is None:
            raise SettingsError(
                "this manager has no queue for results; name 'output' in TFManager.start"
            )
        for result in results:
            self._results.put(result)

    def terminate(self) -> None:
        """Drop the rows in the queue, and end the feed."""
        self.done_feeding = True
        while not self._rows.empty():
            self._rows.get()
            self._rows.task_done()
