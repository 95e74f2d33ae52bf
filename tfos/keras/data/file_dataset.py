"""`ctx.read.….dataset(batch_size)`: rows of files for `model.fit` or as a tf.data.Dataset.

Covers: the position in the files that each push carries; numpy columns as tf.data elements.
Does not: read ahead or hand out batches (tfos.keras.data.dataset), read files (feeding.reading),
push (tfos.keras.step.exchange).
Threads: the thread that runs `fit`; tf.data's own for its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from feeding.columnar.batch import BatchColumn, EpochEnd, Ragged
from feeding.columnar.schema import ColumnSpec, Schema
from feeding.reading.partitions import partition_columns
from feeding.reading.positions import Position
from feeding.reading.reader import DirectReader
from tfos.keras.data import tensors
from tfos.keras.data.columns import AS_FED, ColumnRoles
from tfos.keras.data.dataset import BatchDataset, Ready
from tfos.keras.protocols import RowsContext


class FileDataset(BatchDataset):
    """One worker's share of some files, for `model.fit`; made by `FileRows.dataset`.

    Args:
        reader: source of the batches.
        batch_size: rows per batch; the last batch of an epoch may be smaller.
        columns: which values of a row are x, y and the sample weight.
        position_name: name of the position that is kept with the parameters; empty: none is kept.
        first_metadata: further metadata that the chief keeps, by name.
        ctx: as for BatchDataset.
    """

    def __init__(
        self,
        reader: DirectReader,
        batch_size: int,
        columns: ColumnRoles = AS_FED,
        *,
        position_name: str = "",
        first_metadata: dict[str, Any] | None = None,
        ctx: RowsContext | None = None,
    ) -> None:
        super().__init__(reader, batch_size, columns, ctx=ctx)
        self._reader = reader
        self._position_name = position_name
        self._first_metadata = first_metadata or {}
        self._position: Position = reader.position
        self.files = reader.files
        self.first_epoch = self._position.place.epoch

    def begin_at(self, epoch: int) -> None:
        """Go on with the beginning of an epoch, unless the rows are already at or past it.

        Args:
            epoch: epoch of the files, from 0.
        """
        if epoch > self.next_epoch:
            self.first_epoch = epoch
            self._restart(epoch)

    def place(self) -> tuple[str, Any] | None:
        """Return name and value of the position after the last batch that was handed out."""
        return (self._position_name, self._position) if self._position_name else None

    def first_metadata(self) -> dict[str, Any]:
        """Return the metadata that the chief sets before the first push."""
        return self._first_metadata

    def _mixing(self) -> str:
        if self._position.seed is None:
            return "mix them: ctx.read.….shuffled(seed=1).dataset(…)"
        return (
            "mix them better: shuffled(seed, window_rows=…, interleave=…) with larger numbers, or "
            "write more, smaller files or row groups"
        )

    def _sorted_by(self) -> str:
        if self._position.seed is not None:
            return ""
        keys = partition_columns(self.files).values()
        return ", ".join(key.name for key in keys if len(set(key.texts.values())) > 1)

    def _loop_ended(self) -> None:
        """Make each validation and evaluation with fewer steps than batches read the same rows."""
        if self._trains or self.over:
            return
        self._restart(self.next_epoch)

    def _restart(self, epoch: int) -> None:
        self._prefetcher.restart()
        self._heads.clear()
        self._looked_at = None
        self._reader.begin(epoch)
        self._position = self._reader.position

    def _hand(self, ready: Ready) -> None:
        if ready.position is not None:
            self._position = ready.position

    def _came_back(self, end: EpochEnd | None = None) -> None:
        if end is not None:
            self._position = (
                self._reader.position
            )  # no reader continues before the next epoch begins


def tf_dataset(epoch: Callable[[], Iterator[dict[str, BatchColumn]]], schema: Schema) -> Any:
    """Return a dataset whose every iteration takes one epoch's batches.

    Args:
        epoch: starts the next epoch's batches: per column [rows, ...].
        schema: names, dtypes and shapes of the columns.
    """
    import tensorflow as tf

    def batches() -> Iterator[dict[str, Any]]:
        for columns in epoch():
            yield {name: _tensor(column) for name, column in columns.items()}

    signature = {spec.name: _spec(spec) for spec in schema.columns}
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def _tensor(column: BatchColumn) -> Any:
    return tensors.ragged(column) if isinstance(column, Ragged) else column


def _spec(spec: ColumnSpec) -> Any:
    import tensorflow as tf

    dtype = tf.string if spec.kind in ("bytes", "str") else tf.as_dtype(spec.dtype)
    if spec.kind == "ragged" or spec.value == "texts":
        return tf.RaggedTensorSpec((None, None), dtype, ragged_rank=1, row_splits_dtype=tf.int64)
    return tf.TensorSpec((None, *spec.shape), dtype)
