"""A checkpoint's tables as plain arrays, sorted by id.

Covers: joining what a chain of deltas holds of one table.
Does not: write files (ps.checkpoint.inspect), import numba.
Threads: none; every function stands alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ps.checkpoint.format import Checkpoint
from ps.checkpoint.reader import Root
from ps.checkpoint.table_reader import read_rows
from ps.manifest.table_spec import TableSpec
from ps.optim.row_rules import row_parts, row_width
from ps.tables.rows import Batch, Dropped

Array = np.ndarray[Any, Any]


def table_arrays(
    root: Root, checkpoint: Checkpoint, *, slots: bool = False
) -> Iterator[tuple[str, Array]]:
    """Yield `tables/NAME/ids` and `tables/NAME/values` of each table; one is in memory at a time.

    Args:
        root: the checkpoint directory.
        checkpoint: one that `read_manifest` returned.
        slots: also `tables/NAME/values:SLOT` of each slot of the rule, [rows, 1] for what a row
            has once.

    Raises:
        CheckpointError: a file is damaged.
    """
    for at, spec in enumerate(checkpoint.manifest.tables):
        ids, rows = _joined(root, checkpoint, at, spec)
        yield f"tables/{spec.name}/ids", ids
        for name, place in row_parts(spec).items() if slots else [("", slice(spec.dim))]:
            suffix = name and f":{name}"
            yield f"tables/{spec.name}/values{suffix}", np.ascontiguousarray(rows[:, place])


def _joined(root: Root, checkpoint: Checkpoint, at: int, spec: TableSpec) -> tuple[Array, Array]:
    """Return ids, ascending, and rows; of an id that comes several times the first is right."""
    ids: list[Array] = [np.empty(0, np.int64)]
    rows: list[Array] = [np.empty((0, row_width(spec)), spec.dtype)]
    places: list[Array] = [np.empty(0, np.int64)]  # of an id's row in `rows`; -1: it is gone
    num_rows = 0
    for saved, piece in read_rows(root, checkpoint):
        if saved.record.table != at or not isinstance(piece, Batch | Dropped):
            continue
        ids.append(piece.ids)
        if isinstance(piece, Batch):
            rows.append(piece.rows)
            places.append(np.arange(num_rows, num_rows + piece.ids.size))
            num_rows += piece.ids.size
        else:
            places.append(np.full(piece.ids.size, -1))
    kind = np.uint64 if spec.id_kind == "uint64" else np.int64
    found, first = np.unique(np.concatenate(ids).view(kind), return_index=True)
    place = np.concatenate(places)[first]
    return found[place >= 0], np.concatenate(rows)[place[place >= 0]]
