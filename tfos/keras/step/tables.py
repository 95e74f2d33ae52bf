"""Tables in training: the rows of each batch before its step, and their gradients after it.

Covers: preparing the next batches, which lookups go with which push, gradients of several batches
in one push, the rows of calls outside of a step.
Does not: trace (tfos.keras.embedding.ids_ahead), send (ps.client), read batches (lookahead).
Threads: the thread that runs `fit`; `ServerRows` any.

The rows of a batch come back with the push before it. Rows of the first batch, and of one that was
not known when that push was sent, are looked up when its turn comes; so are those of tables that
are not trained, as in evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ps.tables.ids import from_bits
from tfos.errors import UnsupportedModel
from tfos.keras.embedding.batch_rows import BatchRows, RowPlanner
from tfos.keras.embedding.sources import check_size
from tfos.keras.step.gradients.gradient_step import GradientStep, StepOutput
from tfos.keras.step.lookahead import Lookahead, TrainingData

if TYPE_CHECKING:
    from ps.tables.routing import RoutedIds
    from tfos.keras.embedding.layer import Embedding

Array = np.ndarray[Any, np.dtype[Any]]
TableArrays = dict[str, tuple["RoutedIds", Array]]
"""Distinct keys, and their rows or gradients [distinct, dim], by table."""


@dataclass(frozen=True, slots=True)
class IdCounts:
    """Number of ids of one table in this worker's batches, without padding."""

    batches: int = 0
    ids: int = 0
    distinct: int = 0
    """Number of distinct ids per batch, summed over the batches."""

    def with_batch(self, ids: RoutedIds) -> IdCounts:
        """Return the counts with one more batch."""
        return IdCounts(
            self.batches + 1, self.ids + ids.inverse.size, self.distinct + ids.unique.size
        )


class TableTraining:
    """The tables of one model; without any, each call does nothing.

    Args:
        layers: the model's Embeddings.
        step: the model's compiled step.
        source: source of the rows; it has the client.
        jit_compile: whether XLA compiles the step.
        batches_per_push: batches that gradient accumulation sums for a push; 1 without it.

    Attributes:
        id_counts: counts of the batches so far, by table; each value is replaced, not changed.
    """

    def __init__(
        self,
        layers: Sequence[Embedding],
        step: GradientStep,
        source: ServerRows,
        *,
        jit_compile: bool,
        batches_per_push: int,
    ) -> None:
        self._layers = layers
        self._step = step
        self._source = source
        self._client = source.client
        self._batches_per_push = batches_per_push
        self._waiting: list[TableArrays] = []
        self._planner: RowPlanner | None = None
        self.id_counts: dict[str, IdCounts] = {}
        if layers:
            self._planner = RowPlanner(layers, self._client.tables.route, pads=jit_compile)
            for layer in layers:
                layer.bind(source)

    def rows_of(self, batch: TrainingData) -> BatchRows | None:
        """Return the rows of a batch whose turn has come; None: the model has no tables.

        Raises:
            UnsupportedModel: as for `check_rows`.
        """
        self.check_rows()
        rows = self._prepared(batch)
        if rows is not None and not rows.is_filled:
            if into := rows.into():
                self._client.tables.lookup_into(into, training=True)
            rows.is_filled = True
        if rows is not None:
            if frozen := rows.into(frozen=True):
                self._client.tables.lookup_into(frozen, training=False)
            self._source.is_in_batch = bool(rows.into())
        return rows

    def check_rows(self) -> None:
        """Refuse tables whose layers now look their rows up in another model's.

        Raises:
            UnsupportedModel: the text names a layer, and how to go on with its rows.
        """
        if (layer := self.given_away()) is not None:
            raise UnsupportedModel(
                f"another model with the layer {layer.name!r} was fit since this one's last "
                f"step, and its rows went there; the table {layer.table!r} of this model still "
                "has the rows it had before that fit. Rebuild and compile this model from the "
                "same layers: keras.Model(model.inputs, model.outputs); its fit begins with the "
                "layer's rows"
            )

    def given_away(self) -> Embedding | None:
        """Return a layer that now looks its rows up in another model's; None: there is none."""
        return next((each for each in self._layers if each.source is not self._source), None)

    def ahead(self, batches: Lookahead, place: int) -> BatchRows | None:
        """Return the rows to ask for with a push: those of a later batch, if it is already known.

        Args:
            batches: batches of the running epoch.
            place: number of batches that come before it.
        """
        if self._planner is None:
            return None
        batch = batches.peek(place)
        try:
            rows = None if batch is None else self._prepared(batch)
        except Exception:  # noqa: BLE001 - it ends that batch's step, not this one's
            return None
        return None if rows is None or rows.is_filled else rows

    def gradients(self, rows: BatchRows | None, output: StepOutput) -> TableArrays:
        """Return what a complete step pushes, with the batches that were accumulated before it.

        Args:
            rows: rows of the step's batch; None: it has none.
            output: the step's output, with the gradients of its rows.

        Returns:
            Distinct ids and their summed gradients [num_unique, dim], by table.
        """
        self.keep(rows, output)
        parts, self._waiting = self._waiting, []
        if self._planner is None or not parts:
            return {}
        if self._batches_per_push == 1:
            return parts[0]
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: self._mean(self._planner, name, parts) for name in names}

    def keep(self, rows: BatchRows | None, output: StepOutput) -> None:
        """Add a step's gradients to those of the next push. Arguments as for `gradients`."""
        if rows is not None:
            self._waiting.append(self.sums(rows, output))

    def sums(self, rows: BatchRows, output: StepOutput) -> TableArrays:
        """Return the sums of a step's gradients by distinct key. Arguments as for `gradients`."""
        if self._planner is None:
            return {}
        of_layers = zip(self._step.trained_layers, output.row_gradients, strict=True)
        return self._planner.sums(rows, list(of_layers))

    def drop(self, rows: BatchRows | None) -> None:
        """Give up the rows of a batch whose gradients will not be pushed."""
        if rows is not None:
            self._client.tables.give_up(rows.routed)

    def set_back(self, rows: BatchRows) -> None:
        """Mark the rows of a batch without a push in flight to be looked up again."""
        self.drop(rows)
        rows.is_asked_for = rows.is_filled = False

    def _mean(
        self, planner: RowPlanner, name: str, parts: Sequence[TableArrays]
    ) -> tuple[RoutedIds, Array]:
        own = [part[name] for part in parts if name in part]
        keys = np.concatenate([ids.unique for ids, _ in own])
        ids, sums = planner.merged(name, keys, np.concatenate([each for _, each in own]))
        sums /= self._batches_per_push
        return ids, sums

    def _prepared(self, batch: TrainingData) -> BatchRows | None:
        if batch.rows is None and self._planner is not None:
            import tensorflow as tf

            ids = self._step.ids_ahead(batch.values)
            try:
                keys = [_flat(each) for each in ids.keys(batch.values)]
            except tf.errors.UnimplementedError as error:  # Keras casts to the inputs' dtypes
                raise _wrong_dtypes(
                    batch.values, [call.layer.name for call in ids.calls]
                ) from error
            batch.rows = self._planner.plan(ids.calls, keys)
            for name, routed in batch.rows.routed.items():
                self.id_counts[name] = self.id_counts.get(name, IdCounts()).with_batch(routed)
        return batch.rows


def _flat(keys: Any) -> Array:
    return np.asarray(memoryview(keys)).reshape(-1).astype(np.int64, copy=False)


def _wrong_dtypes(data: Any, layers: Sequence[str]) -> UnsupportedModel:
    import tensorflow as tf

    dtypes = tf.nest.map_structure(lambda leaf: getattr(leaf.dtype, "name", leaf.dtype), data)
    return UnsupportedModel(
        f"a feature has strings where the model's input has numbers, or numbers where it has "
        f"strings, so the layers {sorted(set(layers))} have no ids. The batch (x, y, weight) has "
        f"the dtypes {dtypes}. Convert the feature, or declare its input as what it is: "
        "keras.Input(shape, dtype='string') or dtype='int64'"
    )


class ServerRows:
    """Rows of the servers' tables, for calls outside of a prepared step (a RowSource).

    Args:
        client: the process's PSClient, attached.
        owner: object whose end also ends the servers, if they are in this process.

    Attributes:
        client: the client that was given.
        is_in_batch: whether the running step has rows that were asked for ahead. In hybrid, lookups
            inside the step then belong to that batch, and take no permit of their own.
    """

    def __init__(self, client: Any, owner: Any) -> None:
        self.client = client
        self._owner = owner
        self._has_permits = client.manifest.consistency == "hybrid"
        self.is_in_batch = False
        self._specs = {spec.name: spec for spec in client.manifest.tables}

    def rows(self, table: str, keys: Array, *, training: bool = False) -> Array | None:
        """Return the rows of keys, [n, dim]; see RowSource."""
        tables = self.client.tables
        spec = self._specs[table]
        ids = tables.route({table: from_bits(spec, keys)})[table]
        if training and self._has_permits and self.is_in_batch:
            return tables.lookup({table: ids})[table]  # type: ignore[no-any-return]  # untyped
        found = np.empty((ids.unique.size, spec.dim), spec.dtype)
        tables.lookup_into({table: (ids, found)}, training=training)
        expanded: Array = ids.expand(found)
        return expanded

    def dump(self, table: str, limit_bytes: int) -> tuple[Array, Array]:
        """Return all rows of a table; see RowSource."""
        from ps.client.retry import retry_scan

        parts = retry_scan(lambda: self._scanned(table, limit_bytes))
        spec = self._specs[table]
        if not parts:
            return np.empty(0, np.int64), np.empty((0, spec.dim), spec.dtype)
        keys = np.concatenate([ids for ids, _ in parts])
        # An id may come twice if rows are evicted meanwhile: the later one is newer.
        unique, last = np.unique(keys[::-1], return_index=True)
        found = np.concatenate([rows for _, rows in parts])[::-1][last]
        return unique, np.ascontiguousarray(found)

    def _scanned(self, table: str, limit_bytes: int) -> list[tuple[Array, Array]]:
        num_bytes, parts = 0, []
        for ids, rows in self.client.tables.scan(table):
            num_bytes += rows.nbytes
            check_size(table, num_bytes, limit_bytes)
            parts.append((ids.view(np.int64), rows))
        return parts
