"""Batch reader: chunks of a feed to full batches of numpy columns.

Covers: BatchReader, Cursor (reads slices of chunks, so that batches cross chunk borders), which
chunks can be joined, which rows a batch holds.
Does not: select or cast columns (tfos.keras.data.columns), rebuild Python rows (columnar.rows,
data_feed), know TensorFlow.
Threads: one consumer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from feeding.columnar.batch import Batch, BatchColumn, EpochEnd, FeedEnd, Ragged, check_batch_size
from feeding.columnar.builder import offsets_of
from feeding.columnar.chunk import Array, Chunk
from feeding.columnar.ranges import unheld
from feeding.columnar.rows import column_values
from feeding.columnar.schema import ColumnSpec, Schema
from feeding.errors import SchemaError
from feeding.receiver.channel import FeedChannel
from feeding.receiver.epoch_rows import INFERENCE, Receipt, RowSpan

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Rows `start` to `stop`, `stop` excluded, of a chunk."""

    chunk: Chunk
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Rows in this slice."""
        return self.stop - self.start

    @property
    def ends_partition(self) -> bool:
        """Whether the slice has the partition's last row."""
        return self.chunk.meta.last_in_partition and self.stop == self.chunk.num_rows


def receipt_of(slices: Iterable[ChunkRows]) -> Receipt:
    """Return which rows a batch of these slices holds; adjacent rows become one span."""
    pieces: list[RowSpan] = []
    for part in slices:
        meta, place = part.chunk.meta, part.chunk.position
        epoch = meta.epoch if meta.mode == "train" else INFERENCE
        piece = RowSpan(epoch, place + part.start, place + part.stop)
        if pieces and (pieces[-1].epoch, pieces[-1].stop) == (epoch, piece.start):
            piece = RowSpan(epoch, pieces.pop().start, piece.stop)
        pieces.append(piece)
    return tuple(pieces)


class Cursor:
    """Read position in one feed; counts the rows that it returns as taken.

    Args:
        channel: the worker's end of all feeds.
        feed: name of the feed.
    """

    def __init__(self, channel: FeedChannel, feed: str) -> None:
        self._channel = channel
        self._feed = feed
        self._chunk: Chunk | None = None
        self._at = 0

    def next(self, most_rows: int, *, session: int = 0) -> ChunkRows | EpochEnd | FeedEnd:
        """Return the next rows of one chunk; none if the chunk only ends a partition.

        Args:
            most_rows: at most.
            session: only rows of this inference session, to fill up a batch of it; 0: any rows.
        """
        if self._chunk is None:
            item = self._channel.take(self._feed, session=session)
            if not isinstance(item, Chunk):
                return item
            self._chunk, self._at = item, 0
        chunk, start = self._chunk, self._at
        stop = min(chunk.num_rows, start + most_rows)
        self._at = stop
        if stop == chunk.num_rows:
            self._chunk = None
        self._channel.count_taken(chunk, start, stop)
        return ChunkRows(chunk, start, stop)

    def discard(self) -> None:
        """Drop the rest of the current chunk."""
        self._chunk = None


class BatchReader:
    """Reads one feed in batches of exactly `batch_size` rows; only an epoch's last is shorter.

    Its rows are trained: those of an inference are dropped, and their feeder fails.

    Args:
        channel: channel of the worker.
        feed: name of the feed.
    """

    def __init__(self, channel: FeedChannel, feed: str = "input") -> None:
        self._channel = channel
        self._feed = feed
        self._number = next(_numbers)
        self.reads_ahead = False
        """Set it if the next batch is read before the last one is trained; the trainer then reports
        batches by `hand` and `settle`."""
        self._cursor = Cursor(channel, feed)
        self._end: EpochEnd | FeedEnd | None = None
        self._source: Schema | None = None
        """Schema of the first chunk."""
        self._schema: Schema | None = None
        """Schema of the batches: columns whose rows differ in length are ragged."""

    def next_batch(self, batch_size: int) -> Batch | EpochEnd | FeedEnd:
        """Return the next batch, or EpochEnd once after each epoch, or FeedEnd for ever.

        Args:
            batch_size: rows; only an epoch's last batch has fewer, none has 0.

        Raises:
            SchemaError: rows do not fit the rows before them.
            FeedTimeout, FeedClosed: as FeedChannel.take.
        """
        slices: list[ChunkRows] = []
        missing = check_batch_size(batch_size)
        if not self.reads_ahead:
            self.settle()
        while missing and self._end is None:
            item = self._next(missing)
            if not isinstance(item, ChunkRows):
                self._end = item
            elif item.num_rows:
                slices.append(item)
                missing -= item.num_rows
        if slices:
            batch = self.assemble(slices)
            if not self.reads_ahead:
                self.hand(batch.receipt)
            return batch
        end = self._end
        if isinstance(end, FeedEnd):
            return end
        self._end = None
        if end is None:
            return FeedEnd()
        if not self.reads_ahead:
            self.settle(ended=end)
        return end

    def _next(self, most_rows: int) -> ChunkRows | EpochEnd | FeedEnd:
        item = self._cursor.next(most_rows)
        if isinstance(item, ChunkRows) and item.chunk.meta.mode == "inference":
            self._channel.refuse_inference(self._feed, item.num_rows)
            return ChunkRows(item.chunk, item.stop, item.stop)
        return item

    def begin(self) -> int:
        """Begin or go on to read; return the rows that another reader of the feed has read ahead.

        They are not in the batches of this reader: the other one's trainer gets them, or they are
        dropped when this reader has read the end of their epoch.
        """
        return self._channel.begin_reading(self._feed, self._number)

    def hand(self, receipt: Receipt, *, with_last: bool = False) -> None:
        """Note that the trainer has the batch of this receipt; see FeedChannel.hand."""
        self._channel.hand(self._feed, receipt, with_last=with_last)

    def settle(self, keep: int = 0, *, ended: EpochEnd | None = None) -> None:
        """Note that the trainer has finished its batches.

        Args:
            keep: number of last batches that are not finished; see FeedChannel.settle.
            ended: the epoch's end, if the trainer has seen it.
        """
        self._channel.settle(self._feed, keep, ended=None if ended is None else ended.epoch)

    def assemble(self, slices: list[ChunkRows]) -> Batch:
        """Return at least one slice as one batch.

        Raises:
            SchemaError: as `next_batch`.
        """
        slices = list(slices)
        if self._source is None or self._schema is None:
            self._source = self._schema = slices[0].chunk.meta.schema
        for place, part in enumerate(slices):
            found = part.chunk.meta.schema
            if found is not self._source and found != self._source:
                slices[place] = _in_order(part, self._source)
                found = slices[place].chunk.meta.schema
                self._schema = _joined(self._schema, self._source, found, self._feed)
        arrays = tuple(
            _column(slices, index, spec, self._feed)
            for index, spec in enumerate(self._schema.columns)
        )
        num_rows = sum(part.num_rows for part in slices)
        return Batch(num_rows, self._schema, arrays, receipt=receipt_of(slices))


def _in_order(part: ChunkRows, first: Schema) -> ChunkRows:
    """Order a slice's columns as the first chunk's: dicts may differ in the order of keys."""
    found = part.chunk.meta.schema
    if found.names == first.names:
        return part
    places = {name: place for place, name in enumerate(found.names)}
    if len(places) < len(found.names) or places.keys() != set(first.names):
        return part
    order = [places[name] for name in first.names]
    schema = Schema(tuple(found.columns[place] for place in order), first.layout)
    meta = msgspec.structs.replace(part.chunk.meta, schema=schema)
    columns = tuple(part.chunk.columns[place] for place in order)
    return ChunkRows(Chunk(meta, columns, part.chunk.position), part.start, part.stop)


def _joined(schema: Schema, first: Schema, found: Schema, feed: str) -> Schema:
    """Return the schema of batches that hold rows of another chunk too.

    Args:
        schema: schema of the batches so far.
        first: schema of the first chunk.
        found: schema of the other chunk, its columns in the order of the first.
        feed: its name, for errors.

    Raises:
        SchemaError: the rows of both cannot be joined.
    """
    if found.names != first.names:
        raise SchemaError(
            f"feed {feed!r} had rows of {first}, then got {found}; feed rows of one "
            "form, or name another feed in queues= for the others"
        )
    columns = list(schema.columns)
    for place, (spec, before) in enumerate(zip(found.columns, first.columns, strict=True)):
        if _form(spec) != _form(before):
            if not (_is_row_of_items(spec) and _is_row_of_items(before)):
                raise SchemaError(
                    f"feed {feed!r}: column {before.name!r} had rows of {before}, "
                    f"then got rows of {spec}; give all rows one form before they are fed"
                )
            columns[place] = ColumnSpec(before.name, "ragged", before.value, before.dtype)
        _check_cast(spec, before.dtype, feed)
    return Schema(tuple(columns), schema.layout)


def _form(spec: ColumnSpec) -> tuple[Any, ...]:
    return spec.kind, spec.shape, spec.value == "texts"


def _is_row_of_items(spec: ColumnSpec) -> bool:
    return spec.kind == "ragged" or (spec.kind == "tensor" and len(spec.shape) == 1)


def _check_cast(spec: ColumnSpec, dtype: str, feed: str) -> None:
    """Refuse a dtype that changes numbers; whether values fit is checked per batch."""
    if not dtype:  # texts
        return
    source, target = np.dtype(spec.dtype), np.dtype(dtype)
    both_ints = source.kind in "biu" and target.kind in "iu"
    if not both_ints and not np.can_cast(source, target, "same_kind"):
        raise SchemaError(
            f"feed {feed!r}: column {spec.name!r} had {dtype}, then got {spec.dtype}, which "
            f"cannot become {dtype}; cast the column to one type before it is fed"
        )


def _column(slices: list[ChunkRows], index: int, spec: ColumnSpec, feed: str) -> BatchColumn:
    if spec.kind == "tensor":
        return _tensor(slices, index, spec, feed)
    if spec.kind == "ragged":
        return _ragged(slices, index, spec, feed)
    values = [
        value
        for part in slices
        for value in column_values(part.chunk, index, part.start, part.stop)
    ]
    if spec.value == "texts":
        return Ragged(_objects([text for row in values for text in row]), offsets_of(values))
    if spec.value == "bytearray":  # of Spark 4.0's BinaryType; numpy takes it for numbers
        values = list(map(bytes, values))
    return _objects(values)


def _objects(values: list[Any]) -> Array:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _tensor(slices: list[ChunkRows], index: int, spec: ColumnSpec, feed: str) -> Array:
    dtype = np.dtype(spec.dtype)
    parts = [part.chunk.columns[index].values[part.start : part.stop] for part in slices]
    for part in parts:
        _check_range(part, dtype, spec.name, feed)
    if len(parts) == 1:
        return parts[0].astype(dtype, copy=False)
    out = np.empty((sum(len(part) for part in parts), *spec.shape), dtype)
    at = 0
    for part in parts:
        out[at : at + len(part)] = part
        at += len(part)
    return out


def _ragged(slices: list[ChunkRows], index: int, spec: ColumnSpec, feed: str) -> Ragged:
    dtype = np.dtype(spec.dtype)
    rows: list[Array] = []
    for part in slices:
        column = part.chunk.columns[index]
        if column.offsets is None:
            rows.extend(column.values[part.start : part.stop])
            continue
        bounds = column.offsets[part.start : part.stop + 1]
        flat = column.values[bounds[0] : bounds[-1]]
        rows.extend(np.split(flat, bounds[1:-1] - bounds[0]))
    for row in rows:
        _check_range(row, dtype, spec.name, feed)
    # Checked above; numpy would join int64 and uint64 as floats.
    values = np.concatenate(rows, dtype=dtype, casting="unsafe") if rows else np.empty(0, dtype)
    return Ragged(values, offsets_of(rows))


def _check_range(values: Array, dtype: np.dtype[Any], name: str, feed: str) -> None:
    """Refuse numbers that the dtype of the rows before them does not hold."""
    if (found := unheld(values, dtype)) is not None:
        raise SchemaError(
            f"feed {feed!r}: column {name!r} had {dtype}, then got {found[0]}..{found[1]}, which "
            "it cannot hold; cast the column to one type before it is fed"
        )
