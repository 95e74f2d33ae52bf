"""Sorting of any number of rows by their ids' hashes, each id once, in bounded memory.

Rows come in any order and an id may come several times. They are kept in memory up to a bound;
beyond it they go to 256 files by the first byte of the hash. A file that does not fit into memory
is divided again by the next byte.

Covers: collecting, spilling to a directory, which entry of an id counts.
Does not: choose the directory.      Threads: the caller's.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ps.sorted_rows.order import BATCH_BYTES, Array, SortedBatch, batch_rows, hashed

DEFAULT_MEMORY_BYTES = 128 << 20
"""Rows that wait in memory; sorting takes about as much again."""
_PARTS = 256
_FIRST_SHIFT = 56


class RowSorter:
    """Sorts rows of one table. A context manager: leaving it removes its files.

    Args:
        dim: numbers of a row.
        dtype: float32 or float64.
        directory: where a temporary directory is made once memory is full; an OSError of a write
            names it.
        is_newest_first: if an id comes several times, the first entry counts; else the last.
        memory_bytes: rows kept in memory.
    """

    def __init__(
        self,
        dim: int,
        dtype: str,
        directory: str | Path,
        *,
        is_newest_first: bool,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        self._record = np.dtype([("id", "<i8"), ("removed", "?"), ("row", dtype, (dim,))])
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._winner = np.minimum if is_newest_first else np.maximum
        self._waiting: list[Array] = []
        self._waiting_bytes = 0
        self._spill: Path | None = None

    def __enter__(self) -> RowSorter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, ids: Array, rows: Array) -> None:
        """Take rows.

        Args:
            ids: [n] int64.
            rows: [n, dim].
        """
        records = np.zeros(ids.size, self._record)
        records["id"], records["row"] = ids, rows
        self._keep(records)

    def remove(self, ids: Array) -> None:
        """Take ids, [n] int64, that have no row."""
        records = np.zeros(ids.size, self._record)
        records["id"], records["removed"] = ids, True
        self._keep(records)

    def batches(self) -> Iterator[SortedBatch]:
        """Yield everything in order, each id once; to be called once, after the last row."""
        if self._spill is None:
            yield from self._sorted(self._taken())
            return
        self._flush()
        yield from self._sorted_parts(self._spill, _FIRST_SHIFT)

    def close(self) -> None:
        """Release memory and files. Idempotent."""
        self._waiting = []
        if self._spill is not None:
            shutil.rmtree(self._spill, ignore_errors=True)

    def _keep(self, records: Array) -> None:
        self._waiting.append(records)
        self._waiting_bytes += records.nbytes
        if self._waiting_bytes >= self._memory_bytes:
            self._flush()

    def _taken(self) -> Array:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return np.concatenate([np.empty(0, self._record), *waiting])

    def _flush(self) -> None:
        """Append what waits in memory to the files of its parts, in the order in which it came."""
        if self._spill is None:
            self._spill = Path(tempfile.mkdtemp(prefix="tfos-sort-", dir=self._directory))
        self._divide(self._taken(), self._spill, _FIRST_SHIFT)

    def _sorted_parts(self, directory: Path, shift: int) -> Iterator[SortedBatch]:
        """Yield what is in the files of a directory, and remove them."""
        most_bytes = max(self._memory_bytes, BATCH_BYTES)
        for part in range(_PARTS):
            path = directory / str(part)
            if not path.exists():
                continue
            if path.stat().st_size <= most_bytes or not shift:  # at shift 0 it is one id
                records = np.fromfile(path, self._record)
                path.unlink()
                yield from self._sorted(records)
                continue
            finer = directory / f"{part}-divided"
            finer.mkdir()
            count = max(1, most_bytes // self._record.itemsize)
            with path.open("rb") as file:
                while (records := np.fromfile(file, self._record, count)).size:
                    self._divide(records, finer, shift - 8)
            path.unlink()
            yield from self._sorted_parts(finer, shift - 8)
            finer.rmdir()

    def _divide(self, records: Array, directory: Path, shift: int) -> None:
        """Append records, in their order, to files by the byte of their hashes at `shift`."""
        parts = (hashed(records["id"]) >> np.uint64(shift)).astype(np.uint8)
        order = np.argsort(parts, kind="stable")
        ends = np.cumsum(np.bincount(parts, minlength=_PARTS))
        for part, stop in enumerate(ends):
            start = ends[part - 1] if part else 0
            if stop > start:
                try:
                    with (directory / str(part)).open("ab") as file:
                        file.write(records[order[start:stop]].tobytes())
                except OSError as error:
                    error.filename = str(self._directory)  # a write's own error names no file
                    raise

    def _sorted(self, records: Array) -> Iterator[SortedBatch]:
        hashes = hashed(records["id"])
        order = np.argsort(hashes)
        (firsts,) = np.nonzero(np.diff(hashes[order], prepend=~hashes[order[:1]]))
        if firsts.size < order.size:
            order = self._winner.reduceat(order, firsts)
        count = batch_rows(self._record["row"].itemsize)
        for start in range(0, order.size, count):
            chosen = records[order[start : start + count]]
            yield SortedBatch(
                chosen["id"].copy(), np.ascontiguousarray(chosen["row"]), chosen["removed"].copy()
            )
