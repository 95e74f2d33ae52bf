"""Arrow inference: sends record batches to a worker and joins its results with their rows.

Covers: ArrowInferenceTask, UnansweredBatches (batches that wait for their results).
Does not: import pyspark; convert rows (arrow.encoder) or results (arrow.results), talk to workers
(inference).
Runs in: a Spark task, as an `arrow_udf` or as `df.mapInArrow(...)`.
Threads: one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from feeding.arrow.results import arrays_of
from feeding.encode.packer import Packer
from feeding.sender.task import InferenceTask


class UnansweredBatches:
    """Queue of batches that wait for their results; iterating takes batches from the source.

    Args:
        batches: the source.
        names: names of the columns of its batches in the output.

    Attributes:
        num_bytes: bytes of the waiting batches.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch], names: Sequence[str]) -> None:
        self._batches = batches
        self._names = names
        self._waiting: deque[pa.RecordBatch] = deque()
        self._results: list[pa.RecordBatch] = []
        self._missing = 0
        self.num_bytes = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        batch = next(batch for batch in self._batches if batch.num_rows)
        self._waiting.append(batch)
        self.num_bytes += batch.nbytes
        return batch

    def answered(self, results: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Take results for the oldest waiting rows; yield each batch that has all its results."""
        while results.num_rows:
            batch = self._waiting[0]
            if not self._results:
                self._missing = batch.num_rows
            part = results.slice(0, self._missing)
            self._missing -= part.num_rows
            self._results.append(part)
            results = results.slice(part.num_rows)
            if not self._missing:
                yield from self._complete()

    def _complete(self) -> list[pa.RecordBatch]:
        batch = self._waiting.popleft()
        self.num_bytes -= batch.nbytes
        parts, self._results = self._results, []
        results = pa.Table.from_batches(parts).combine_chunks()
        names = [*self._names, *results.column_names]
        # One batch, unless the texts of a column exceed the 2 GiB of an array.
        whole = pa.Table.from_arrays([*batch.columns, *results.columns], names)
        answered: list[pa.RecordBatch] = whole.to_batches()
        return answered


@dataclass(frozen=True, kw_only=True)
class ArrowInferenceTask:
    """Sends a partition's rows to one worker for inference."""

    task: InferenceTask
    fields: tuple[pa.Field, ...]
    """The result columns."""
    packer: Callable[..., Packer]
    """Makes the packer of the sent columns."""

    def results(
        self,
        partition: int,
        batches: Iterable[pa.RecordBatch],
        held_bytes: Callable[[], int] = lambda: 0,
    ) -> Generator[pa.RecordBatch]:
        """Yield results in blocks of rows, one per row, in the order of the rows.

        Args:
            partition: number of the partition.
            batches: the sent columns of its rows.
            held_bytes: see feeding.sender.inference.InferenceFeeder.

        Raises:
            ResultTypeError: a result does not fit its column.
            FeedError: see feeding.sender.inference.InferenceFeeder.run.
        """
        feeder = self.task.feeder(partition, self.packer, held_bytes)
        names = [field.name for field in self.fields]
        rows = (batch for batch in batches if batch.num_rows)
        with contextlib.closing(feeder.run(rows)) as chunks:
            for chunk in chunks:
                yield pa.RecordBatch.from_arrays(arrays_of(chunk, self.fields), names)

    def beside(
        self,
        partition: int,
        batches: Iterable[pa.RecordBatch],
        names: Sequence[str],
        places: Sequence[int],
    ) -> Iterator[pa.RecordBatch]:
        """Yield each batch with its result columns appended, once all its rows have results.

        Args:
            partition: number of the partition.
            batches: batches of the partition.
            names: of the batches' columns in the output, in place of their own names.
            places: indexes of the columns that are sent.

        Raises:
            ResultTypeError, FeedError: as `results`.
        """
        waiting = UnansweredBatches(iter(batches), names)
        sent = (batch.select(places) for batch in waiting)
        with contextlib.closing(self.results(partition, sent, lambda: waiting.num_bytes)) as found:
            for results in found:
                yield from waiting.answered(results)
