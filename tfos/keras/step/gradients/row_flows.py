"""Row flows: where a step's calls of Embeddings get their rows.

Covers: rows of a prepared batch, rows looked up inside the step.
Does not: prepare a batch (tfos.keras.step.tables), record its calls
(tfos.keras.embedding.ids_ahead).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfos.errors import UnsupportedModel
from tfos.keras.embedding.batch_rows import frozen_tables
from tfos.keras.embedding.ids_ahead import LayerCall
from tfos.keras.embedding.sources import looked_up


class InsideRows:
    """The flow of a step that is not compiled: each call looks its rows up.

    Args:
        layers: the model's Embeddings.

    Attributes:
        called: the layer of each call so far.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._frozen = frozen_tables(layers)
        self.called: list[Any] = []

    def rows(self, layer: Any, keys: Any) -> tuple[Any, Any]:
        """Return the rows of a call; see RowFlow."""
        self.called.append(layer)
        return looked_up(layer, keys, training=layer.table not in self._frozen), keys


class GivenRows:
    """The flow of a compiled step: rows of a prepared batch, in the order of its calls.

    Args:
        rows: rows by table, [distinct + 1 or more, dim].
        positions: positions of each call that is ahead, [n] int32.
        calls: calls of the batch's kind.
        layers: the model's Embeddings.

    Attributes:
        called: the layer of each call.
    """

    def __init__(
        self,
        rows: dict[str, Any],
        positions: Sequence[Any],
        calls: Sequence[LayerCall],
        layers: Sequence[Any],
    ) -> None:
        self._inside = InsideRows(layers)
        self._rows = rows
        self._positions = iter(positions)
        self._calls = iter(calls)
        self.called = [call.layer for call in calls]

    def rows(self, layer: Any, keys: Any) -> tuple[Any, Any]:
        """Return the rows of the next call; see RowFlow."""
        import tensorflow as tf

        call = next(self._calls, None)
        if call is None or call.layer is not layer:
            raise UnsupportedModel(
                f"train_step calls the layer {layer.name!r} in another order than when its ids "
                "were recorded; let it make the same calls in the same order each time it is traced"
            )
        if not call.is_ahead:
            return self._inside.rows(layer, keys)
        positions = next(self._positions)
        return tf.gather(self._rows[layer.table], positions), positions
