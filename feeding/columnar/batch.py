"""Batches: the columns that a reader passes to training, and the ends of epochs and feeds.

Covers: Batch, Ragged, EpochEnd, FeedEnd, the checks of a batch size and of an input mapping.
Does not: make batches (receiver.batch_reader, reading.reader).
Threads: any; pure data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from feeding.columnar.chunk import Array
from feeding.columnar.schema import Schema
from feeding.errors import FeedSettingsError
from rpc.field_texts import with_field_texts


def check_batch_size(value: object, name: str = "batch_size") -> int:
    """Return a batch size as an int.

    Args:
        value: as the user gave it.
        name: name of the argument, for the error.

    Raises:
        FeedSettingsError: it is no int >= 1.
    """
    if not isinstance(value, bool) and isinstance(value, int | np.integer) and value >= 1:
        return int(value)
    raise FeedSettingsError(f"{name} must be an int >= 1, got {value!r} ({type(value).__name__})")


def check_input_mapping(value: object) -> dict[str, str] | None:
    """Return a mapping from column to tensor name, sorted by column; None for an empty one.

    `df.select(sorted(columns))` orders the values of a row like that.

    Args:
        value: as the user gave it.

    Raises:
        FeedSettingsError: it is no mapping, or two columns share a tensor, whose lists would mix.
    """
    if not value:
        return None
    if not hasattr(value, "items"):  # what has them, as a config's section, need not be a Mapping
        raise FeedSettingsError(
            "input_mapping must be a dict from column to tensor name, got "
            f"{value!r} ({type(value).__name__})"
        )
    mapping: dict[str, str] = dict(sorted(value.items()))
    columns: dict[str, list[str]] = {}
    for column, tensor in mapping.items():
        columns.setdefault(tensor, []).append(column)
    for tensor, shared in columns.items():
        if len(shared) > 1:
            raise FeedSettingsError(
                f"input_mapping has the columns {shared} under one name, {tensor!r}; "
                "give each a tensor name of its own"
            )
    return mapping


@with_field_texts
@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of differing lengths: row i is `values[offsets[i]:offsets[i + 1]]`.

    Args:
        values: [items], all rows joined.
        offsets: int64[n + 1], in items.
    """

    values: Array
    offsets: Array


BatchColumn = Array | Ragged


@with_field_texts
@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive rows as columns. Arrays may be read-only views; copy before changing them.

    Args:
        num_rows: n.
        schema: names, dtypes and shapes of the columns, and how they nest.
        arrays: one per column: [n, *shape], object[n] for text and bytes, or Ragged.
    """

    num_rows: int
    schema: Schema
    arrays: tuple[BatchColumn, ...]
    position: Any = None
    """Position of a file reader after this batch; opaque, belongs to the reader."""
    receipt: Any = ()
    """Which rows of a feed the batch holds; opaque, belongs to the feed's queue."""

    @property
    def columns(self) -> dict[str, BatchColumn]:
        """Arrays by column name."""
        return dict(zip(self.schema.names, self.arrays, strict=True))

    def nest(self) -> Any:
        """Return the arrays in the nesting of a row: an array, or a tuple or dict of arrays."""
        return self.schema.nest(self.arrays)


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """All rows of this epoch were read."""

    epoch: int


@dataclass(frozen=True, slots=True)
class FeedEnd:
    """The feed has ended; no more rows come."""
