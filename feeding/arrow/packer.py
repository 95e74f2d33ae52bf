"""Arrow packer: record batches of a partition to chunks of about `chunk_bytes`.

Covers: slicing batches into chunks, joining the ends of small batches.
Does not: read columns (encoder), decide what Spark sends (tfos.feed.dataframe).
Threads: one per packer; pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import pyarrow as pa

from feeding.arrow.encoder import ArrowEncoder
from feeding.columnar.chunk import MAX_ROWS, Chunk
from feeding.config import FeedConfig
from feeding.encode.packer import Packer, PackerOptions

_SHARE = 4
"""A chunk holds at most a quarter of the rows before it. So the chunks of a small partition, too,
reach all workers; those of a large one soon reach `chunk_bytes`."""


class ArrowPacker(Packer):
    """A Packer for record batches instead of rows; chunks are views of the batches' memory.

    Args:
        config: as for Packer.
        names: as for ArrowEncoder.
        fills: as for ArrowEncoder.
        options: as for Packer.
    """

    def __init__(
        self,
        config: FeedConfig,
        names: tuple[str, ...] | None = None,
        fills: Mapping[str, Any] | None = None,
        **options: Unpack[PackerOptions],
    ) -> None:
        super().__init__(config, **options)
        self._encoder = ArrowEncoder(names, fills)
        self._row_bytes = 0

    def skip(self, rows: Iterator[Any]) -> int:
        """Read batches to their end and return how many rows they hold."""
        return sum(batch.num_rows for batch in rows)

    def _convert(self, rows: Iterator[Any]) -> Iterator[Chunk]:
        held: list[pa.RecordBatch] = []
        num_held = held_bytes = 0
        for batch in filter(len, rows):
            self.rows_read += batch.num_rows
            self._row_bytes = self._row_bytes or self._pack(batch.slice(0, 1)).num_bytes
            most, rest = self._most_rows(), batch
            row_bytes = max(1, batch.nbytes // batch.num_rows)  # its rows may be far wider
            missing = min(most - num_held, (self._config.chunk_bytes - held_bytes) // row_bytes)
            if held and batch.num_rows > missing:
                # Joining copies rows, so join only as many as fill one chunk. Wider rows since then
                # may have lowered `most` below what is held.
                missing = max(0, missing)
                yield from self._joined([*held, batch.slice(0, missing)])
                held, num_held, held_bytes, rest = [], 0, 0, batch.slice(missing)
            held.append(rest)
            num_held += rest.num_rows
            held_bytes += rest.nbytes
            if 2 * num_held >= most or held_bytes >= self._config.chunk_bytes:
                yield from self._joined(held)
                held, num_held, held_bytes = [], 0, 0
        if num_held:
            yield from self._joined(held)

    def _joined(self, batches: list[pa.RecordBatch]) -> Iterator[Chunk]:
        """Pack batches as one, or as few: a column of text has at most 2 GiB."""
        if len(batches) > 1:
            batches = pa.Table.from_batches(batches).combine_chunks().to_batches()
        for batch in batches:
            yield from self._sliced(batch)

    def _sliced(self, batch: pa.RecordBatch) -> Iterator[Chunk]:
        """Split a batch into chunks of about equal numbers of rows."""
        while batch.num_rows:
            num_chunks = max(1, round(batch.num_rows / self._most_rows()))
            num_rows = -(-batch.num_rows // num_chunks)
            for chunk in self._split(batch.slice(0, num_rows)):
                self._row_bytes = chunk.num_bytes // chunk.num_rows
                yield chunk
            batch = batch.slice(num_rows)

    def _most_rows(self) -> int:
        most = min(MAX_ROWS, self._config.chunk_bytes // max(1, self._row_bytes))
        return max(1, min(most, max(self._config.chunk_rows, self._row // _SHARE)))

    def _pack(self, rows: Any) -> Chunk:
        out = self._collector()
        return self._finish(out, self._encoder.encode(out, rows), rows.num_rows)
