"""DataFeed: rows for a training loop written for TensorFlowOnSpark.

Covers: next_batch, next_arrays, should_stop, batch_results, terminate.
Does not: make numpy batches (batch_reader), pack results (results).
Threads: one consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from feeding.columnar.batch import EpochEnd, check_batch_size, check_input_mapping
from feeding.columnar.rows import column_values, rows_of
from feeding.columnar.schema import Schema
from feeding.encode.arrays import columns_of
from feeding.errors import SchemaError
from feeding.receiver.batch_reader import BatchReader, ChunkRows, Cursor, receipt_of
from feeding.receiver.channel import FeedChannel


class DataFeed:
    """A worker's rows with the interface of TensorFlowOnSpark's DataFeed.

    As there: `next_batch` blocks, and crosses partitions in training but not in inference;
    `should_stop` is true once the end was read, so the last batch may be empty; `batch_results`
    takes one result per row, in order. Different: each epoch ends with a short batch of its own
    instead of running into the next epoch; a wrong number of results is an error at once instead of
    an endless wait; `terminate` returns at once.

    Args:
        channel: channel of the worker.
        train_mode: False: a batch ends at the end of a partition, as inference batches always do.
        qname_in: name of the feed.
        qname_out: accepted for compatibility; results go back to where their rows came from.
        input_mapping: column name to tensor name; batches are then dicts of lists. Dicts, and Rows
            that have all these names, are read by name. Other rows are read by position: their
            values are in the order of the sorted column names. Rows with one of these names at
            another place are refused, and dicts that lack one.
    """

    def __init__(
        self,
        channel: FeedChannel,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> None:
        self.train_mode = train_mode
        self.qname_in = qname_in
        self.qname_out = qname_out
        self.done_feeding = False
        self.stop_asked: Callable[[], bool] = bool
        """Whether somebody outside asks for the end of the training; asked by `should_stop`."""
        self._channel = channel
        self._cursor = Cursor(channel, qname_in)
        self._mapping = check_input_mapping(input_mapping)

    def next_batch(self, batch_size: int) -> list[Any] | dict[str, list[Any]]:
        """Return up to `batch_size` rows, fewer at the end of an epoch, a partition or the feed.

        Returns:
            Rows as they were fed; with `input_mapping` a dict from tensor name to the list of that
            column's values.

        Raises:
            ResultCountError: the batch before came from `inference` and is not answered.
            SchemaError: the rows do not have the columns of `input_mapping`.
            FeedClosed: the cluster is stopping.
        """
        slices = self._take(batch_size)
        if self._mapping is None:
            return [row for part in slices for row in rows_of(part.chunk, part.start, part.stop)]
        batch: dict[str, list[Any]] = {tensor: [] for tensor in self._mapping.values()}
        for part in slices:
            self._append_columns(batch, part)
        return batch

    def next_arrays(self, batch_size: int) -> Any:
        """Return the rows of `next_batch` as numpy arrays; None for an empty batch.

        Returns:
            Arrays [n, *shape] in the nesting of a row: one array, a tuple or a dict of arrays; with
            `input_mapping` a dict by tensor name. They may be read-only. Rows of differing lengths
            are a `feeding.columnar.batch.Ragged`.

        Raises:
            ResultCountError, FeedClosed: as `next_batch`.
            SchemaError: the rows do not fit together, or not the `input_mapping`.
        """
        slices = self._take(batch_size)
        if not slices:
            return None
        # A new reader each time: rows of another inference() may have another schema.
        batch = BatchReader(self._channel, self.qname_in).assemble(slices)
        if self._mapping is None:
            return batch.nest()
        columns = batch.columns
        if set(self._mapping) <= set(columns):
            return {tensor: columns[column] for column, tensor in self._mapping.items()}
        by_name = self._has_names(batch.schema)
        values: Iterable[Any] = batch.arrays
        if len(self._mapping) > 1 and _are_vectors(batch.schema):
            values = self._values(list(np.moveaxis(batch.nest(), 1, 0)), by_name=False)
        elif by_name or len(columns) != len(self._mapping):
            values = self._values(batch.nest(), by_name=by_name)
        return dict(zip(self._mapping.values(), values, strict=True))

    def should_stop(self) -> bool:
        """Return whether the end of the feed was read; the last batch may have been empty.

        Once the end of the training is asked for, it ends the feed as `terminate` does.
        """
        if not self.done_feeding and self.stop_asked():
            self.terminate()
        return self.done_feeding

    def batch_results(self, results: Any) -> None:
        """Return results for the rows of the last batch, one per row, in order.

        May be called several times per batch; the next `next_batch` needs all rows answered.

        Args:
            results: a sequence of results; or an array whose first dimension is the rows, or a dict
                of such arrays (numpy, or convertible to it), which need no Python code per row.

        Raises:
            ResultCountError: more results than rows: `worker:1 returned 101 results for 100 rows`.
            ResultTypeError: a dict has a value that is not an array, such as a list, or an array
                is masked.
            RowError: a result is not a number, text, bytes, array, or group of these.
        """
        columns = columns_of(results)
        if columns is not None:
            self._channel.answer(self.qname_in, columns)
            return
        rows = results if isinstance(results, list | tuple) else list(results)
        self._channel.answer(self.qname_in, rows)

    def terminate(self) -> None:
        """Stop reading: unread and later rows are dropped.

        Raises:
            ResultCountError: rows of `inference` were read and not answered.
        """
        self._cursor.discard()
        self.done_feeding = True
        self._channel.drain(self.qname_in)

    def _take(self, batch_size: int) -> list[ChunkRows]:
        """Read rows up to the end of the batch."""
        missing = check_batch_size(batch_size)
        self._channel.begin_batch(self.qname_in)
        self._channel.settle(self.qname_in)
        slices: list[ChunkRows] = []
        ended: int | None = None
        while missing and not self.done_feeding:
            session = slices[0].chunk.meta.session if slices else 0
            item = self._cursor.next(missing, session=session)
            if isinstance(item, ChunkRows):
                if item.num_rows:
                    slices.append(item)
                    missing -= item.num_rows
                if slices and self._ends_batch(item):
                    break
            elif isinstance(item, EpochEnd):
                ended = item.epoch
                if slices:
                    break
                self._channel.settle(self.qname_in, ended=ended)
            else:
                self.done_feeding = True
        self._channel.hand(self.qname_in, receipt_of(slices))
        if slices and ended is not None:
            self._channel.settle(self.qname_in, keep=1, ended=ended)
        return slices

    def _ends_batch(self, item: ChunkRows) -> bool:
        inference = item.chunk.meta.mode == "inference"
        return item.ends_partition and (inference or not self.train_mode)

    def _append_columns(self, batch: dict[str, list[Any]], part: ChunkRows) -> None:
        """Add a slice's columns: by name where the rows have names, else by position."""
        mapping, schema = self._mapping or {}, part.chunk.meta.schema
        layout, names = schema.layout, schema.names
        flat = layout is not None and all(child is None for child in layout.children)
        has_columns = set(mapping) <= set(names)  # also those inside of structs
        by_name = has_columns or self._has_names(schema)
        if has_columns or (flat and len(names) == len(mapping)):
            places = {name: place for place, name in enumerate(names)}
            for place, (column, tensor) in enumerate(mapping.items()):
                index = places[column] if by_name else place
                batch[tensor] += column_values(part.chunk, index, part.start, part.stop)
            return
        for row in rows_of(part.chunk, part.start, part.stop):
            values = self._values(row, by_name=by_name)
            for tensor, value in zip(mapping.values(), values, strict=True):
                batch[tensor].append(value)

    def _has_names(self, schema: Schema) -> bool:
        """Return whether rows are read by name; refuse those that lack a name of the mapping."""
        mapping, layout = self._mapping or {}, schema.layout
        if layout is None or layout.kind not in ("dict", "row"):
            return False
        if layout.kind == "row" and not set(mapping) <= set(layout.names):
            # As in TensorFlowOnSpark, unless a name, in any case, says that columns would swap.
            names = [name.casefold() for name in layout.names]
            wanted = [column.casefold() for column in mapping]
            if all(a == b or b not in names for a, b in zip(names, wanted, strict=False)):
                return False
        if missing := [column for column in mapping if column not in layout.names]:
            raise SchemaError(
                f"input_mapping names the columns {list(mapping)}, but a row has "
                f"{list(layout.names)}, without {missing}; use the data's names"
            )
        return True

    def _values(self, row: Any, *, by_name: bool) -> list[Any]:
        """Return the values of a row, or of a batch as nested as its rows, one per tensor."""
        mapping = self._mapping or {}
        if by_name:
            return [row[column] for column in mapping]
        if isinstance(row, dict):
            row = list(row.values())
        values = list(row) if isinstance(row, list | tuple) else [row]
        if len(values) != len(mapping):
            raise SchemaError(
                f"input_mapping names {len(mapping)} columns {list(mapping)}, a row has "
                f"{len(values)} values; select the columns before feeding"
            )
        return values


def _are_vectors(schema: Schema) -> bool:
    """Return whether rows are lists or tuples of equally many numbers, as values by position."""
    spec = schema.columns[0]
    return schema.layout is None and spec.value in ("list", "tuple") and spec.shape != ()
