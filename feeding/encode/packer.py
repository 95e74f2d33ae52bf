"""Packer: rows of one partition to chunks of about `chunk_bytes`.

Covers: how many rows a chunk gets, limits of a chunk.
Does not: decide the kind of a value (values), send (sender.feeder).
Threads: one per packer; pure.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np

from feeding.columnar.builder import Collector
from feeding.columnar.chunk import MAX_ROWS, Chunk, ChunkMeta, data_items
from feeding.columnar.rows import rows_of
from feeding.columnar.schema import MAX_SCHEMA_BYTES, Node, Schema
from feeding.config import FeedConfig
from feeding.encode.refilled import is_refilled
from feeding.encode.values import encode_values
from feeding.errors import ChunkError, RowError

_PORTION = 16
"""Most rows that are taken before the width of one of them is looked at."""
_NARROWED = 8
"""A chunk may store eight bytes of a Python number as one."""
_LONG = 64
"""All values of a longer list that begins with a number are numbers."""
_NUMBERS = frozenset([int, float, bool])


class PackerOptions(TypedDict, total=False):
    """What a Packer of any kind takes beside its config; see Packer."""

    feed: str
    epoch: int
    partition: int
    mode: Literal["train", "inference"]
    session: int


class Packer:
    """Packs the rows of one partition into chunks; one instance per partition.

    The first row is measured alone. Each further chunk takes as many rows as the bytes per row of
    the chunk before it allow, so rows of any width make chunks of about `chunk_bytes`.

    Args:
        config: sizes of chunks.
        feed: name of the feed.
        epoch: epoch of the rows.
        partition: partition of the rows.
        mode: whether workers train on the rows or answer them.
        session: inference: which request the results belong to.
    """

    def __init__(
        self,
        config: FeedConfig,
        *,
        feed: str = "input",
        epoch: int = 0,
        partition: int = 0,
        mode: Literal["train", "inference"] = "train",
        session: int = 0,
    ) -> None:
        self._config = config
        self._most_bytes = min(2 * config.chunk_bytes, config.max_chunk_bytes)
        """Size limit of a chunk of several rows."""
        self._base = ChunkMeta(
            feed, epoch, partition, 0, 0, Schema(()), (), (), mode=mode, session=session
        )
        self._row = 0
        self.rows_read = 0
        """Rows taken from the partition so far; those of chunks not yet yielded included."""
        self._number_codes: dict[str, str] = {}
        self._checked: Schema | None = None

    def chunks(self, rows: Iterator[Any]) -> Iterator[Chunk]:
        """Yield chunks in row order; only the last has `last_in_partition`; none for no rows.

        Raises:
            RowError: a row does not fit; most chunks before it were already yielded.
        """
        pending: Chunk | None = None
        for chunk in self._convert(rows):
            if pending is not None:
                yield pending
            pending = chunk
        if pending is not None:
            meta = msgspec.structs.replace(pending.meta, last_in_partition=True)
            yield Chunk(meta, pending.columns)

    def pack_rows(self, rows: Sequence[Any]) -> Iterator[Chunk]:
        """Yield chunks of at most `chunk_rows` rows and about `chunk_bytes` that hold these rows.

        Raises:
            RowError: a row fits no column.
        """
        for start in range(0, len(rows), self._config.chunk_rows):
            yield from self._split(list(rows[start : start + self._config.chunk_rows]))

    def skip(self, rows: Iterator[Any]) -> int:
        """Read rows to their end and return how many they are."""
        return sum(1 for _ in rows)

    def _convert(self, rows: Iterator[Any]) -> Iterator[Chunk]:
        taken = list(itertools.islice(rows, 1))
        if not taken:
            return
        alone = self._pack(taken)
        num_rows = self._rows_per_chunk(alone)
        second = list(itertools.islice(rows, 1))
        rows = itertools.chain(second, rows)
        if any(is_refilled(taken[0], row) for row in second):
            # The first row's values are in its chunk alone.
            taken, rows = rows_of(alone), map(copy.deepcopy, rows)
        taken += self._taken(rows, num_rows - 1)
        del alone, second
        while taken:
            self.rows_read += len(taken)
            for chunk in self._split(taken):
                num_rows = self._rows_per_chunk(chunk)
                yield chunk
            taken = self._taken(rows, num_rows)

    def _taken(self, rows: Iterator[Any], most: int) -> list[Any]:
        """Take rows: fewer where they are far wider than those that `most` was reckoned with."""
        taken: list[Any] = []
        num_bytes, portion, looks = 0, 1, 0
        while len(taken) < most and num_bytes < _NARROWED * self._config.chunk_bytes:
            part = list(itertools.islice(rows, min(portion, most - len(taken))))
            if not part:
                break
            taken += part
            # Another place each time: wide rows may come by turns.
            num_bytes += len(part) * _bytes_of(part[looks % len(part)])
            portion, looks = min(2 * portion, _PORTION), looks + 1
        return taken

    def _split(self, rows: list[Any]) -> Iterator[Chunk]:
        """Pack rows, in halves if they are far wider than those before."""
        chunk = self._pack(rows)
        if len(rows) > 1 and chunk.num_bytes > self._most_bytes:
            del chunk
            middle = len(rows) // 2
            yield from self._split(rows[:middle])
            yield from self._split(rows[middle:])
            return
        self._check_bytes(chunk)
        self._row += len(rows)
        yield chunk

    def _check_bytes(self, chunk: Chunk) -> None:
        """Refuse a row that a worker would refuse."""
        if chunk.num_bytes > self._config.max_chunk_bytes:
            raise RowError(
                f"partition {self._base.partition}, row {self._row}: {chunk.num_bytes} bytes, a "
                f"row may have {self._config.max_chunk_bytes}; split it into several rows, or feed "
                "the path of a file that main_fun reads"
            )

    def _rows_per_chunk(self, last: Chunk) -> int:
        row_bytes = max(1, last.num_bytes // last.num_rows)
        most = min(self._config.chunk_rows, MAX_ROWS)
        return max(1, min(most, self._config.chunk_bytes // row_bytes))

    def _pack(self, rows: Sequence[Any]) -> Chunk:
        out = self._collector()
        return self._finish(out, encode_values(out, rows), len(rows))

    def _collector(self) -> Collector:
        return Collector(self._base.partition, self._row, self._number_codes)

    def _finish(self, out: Collector, layout: Node, num_rows: int) -> Chunk:
        schema = Schema(tuple(out.specs), layout)
        self._check(schema)
        columns = tuple(out.columns)
        meta = msgspec.structs.replace(
            self._base,
            first_row=self._row,
            num_rows=num_rows,
            schema=schema,
            stored=tuple(out.stored),
            data_items=data_items(columns),
        )
        return Chunk(meta, columns)

    def _check(self, schema: Schema) -> None:
        if schema == self._checked:
            return
        try:
            schema.check()
        except ChunkError as error:
            where = f"partition {self._base.partition}, row {self._row}"
            raise RowError(f"{where}: {error}") from None
        num_bytes = len(msgspec.msgpack.encode(schema))
        if num_bytes > MAX_SCHEMA_BYTES:
            raise RowError(
                f"partition {self._base.partition}, row {self._row}: the description of "
                f"{len(schema.columns)} columns takes {num_bytes} bytes, "
                f"at most {MAX_SCHEMA_BYTES}; use fewer columns, shorter names, or one array column"
            )
        self._checked = schema


def _bytes_of(value: Any) -> int:
    """Return about how many bytes a row, or a part of it, takes."""
    if type(value) in _NUMBERS:
        return 8
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        value = value.values()
    elif isinstance(value, list):
        if len(value) > _LONG and type(value[0]) in _NUMBERS:
            return 8 * len(value)
    elif not isinstance(value, tuple):
        # Spark's vectors; its matrices have no size, and all of one shape.
        return 8 * getattr(value, "size", 1) if hasattr(value, "toArray") else 8
    others = [part for part in value if type(part) not in _NUMBERS]
    return 8 + 8 * (len(value) - len(others)) + sum(map(_bytes_of, others))
