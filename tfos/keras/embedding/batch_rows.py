"""Rows of a batch: its distinct keys, their rows as tensors, the sums of their gradients.

Covers: one route per table and batch, positions per call, memory that TensorFlow reads without a
copy, sums over equal keys.
Does not: ask servers (tfos.keras.step.tables), trace steps (ids_ahead).
Threads: one batch belongs to one thread at a time.

    keys of all calls of a table ──route──► distinct keys ──► rows [distinct + padding, dim]
                                               └──► positions of each call's keys in those rows

The last row is zeros; the positions of padding name it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ps.errors import IdError
from ps.manifest.table_spec import TableSpec
from ps.tables.ids import from_bits
from tfos.keras.aligned_memory import aligned
from tfos.keras.embedding.ids_ahead import LayerCall

if TYPE_CHECKING:
    from ps.tables.routing import RoutedIds

Array = np.ndarray[Any, np.dtype[Any]]
Route = Callable[[Mapping[str, Array]], "dict[str, RoutedIds]"]
RowGradient = tuple[Any, Any]
"""Values [n, dim] and indices [n], as in tf.IndexedSlices."""
MARK_KEYS = 16
"""First keys of a call by which those of another one that may be equal are found."""


@dataclass(slots=True)
class BatchRows:
    """The rows of one batch, by table, and where each call finds its own."""

    calls: Sequence[LayerCall]
    routed: dict[str, RoutedIds]
    arrays: dict[str, Array]
    """Rows by table, [distinct + 1 or more, dim] float32; those from `distinct` on are zeros."""
    tensors: dict[str, Any]
    """Tensors over the same memory, by table."""
    positions: list[Any]
    """Places in the table's rows, [n] int32, of each call that is ahead."""
    frozen: frozenset[str] = frozenset()
    """Tables that are not trained: no push fetches their rows, which do not change."""
    is_asked_for: bool = False
    """Whether a push was sent whose answer fills the rows."""
    is_filled: bool = False
    """Whether the rows have arrived."""

    @property
    def are_on_their_way(self) -> bool:
        """Whether a push that is in flight fills the rows: nobody else may."""
        return self.is_asked_for and not self.is_filled

    def into(self, *, frozen: bool = False) -> dict[str, tuple[RoutedIds, Array]]:
        """Return the distinct keys and the array [distinct, dim] that their rows fill, by table.

        Args:
            frozen: whether to return the frozen tables, or the others.
        """
        return {
            name: (ids, self.arrays[name][: ids.unique.size])
            for name, ids in self.routed.items()
            if (name in self.frozen) == frozen
        }


def frozen_tables(layers: Sequence[Any]) -> frozenset[str]:
    """Return the tables that no layer trains: an id without a row there will never have one.

    Args:
        layers: the model's Embeddings.
    """
    trained = {layer.table for layer in layers if layer.trainable}
    return frozenset(layer.table for layer in layers) - trained


class RowPlanner:
    """Makes the BatchRows of one model's batches, and the sums of their gradients.

    Args:
        layers: the model's Embeddings.
        route: function that checks and deduplicates keys, like `client.tables.route`.
        pads: whether to fill rows up to a power of two, so that XLA compiles few shapes.
    """

    def __init__(self, layers: Sequence[Any], route: Route, *, pads: bool) -> None:
        self._specs: dict[str, TableSpec] = {
            layer.table: layer.settings.spec(None) for layer in layers
        }
        self._frozen = frozen_tables(layers)
        self._route = route
        self._pads = pads

    def plan(self, calls: Sequence[LayerCall], keys: Sequence[Array]) -> BatchRows:
        """Route the keys of a batch and take memory for its rows.

        Args:
            calls: calls of the batch's kind.
            keys: [n] int64 of each call that is ahead.

        Raises:
            IdError: the text names table, value, position and layer.
        """
        ahead = [call for call in calls if call.is_ahead]
        of_table: dict[str, list[int]] = {}
        for at, call in enumerate(ahead):
            of_table.setdefault(call.layer.table, []).append(at)
        positions: list[Any] = [None] * len(ahead)
        routed: dict[str, RoutedIds] = {}
        others: dict[Hashable, tuple[Array, RoutedIds]] = {}
        for name, places in of_table.items():
            own = [(keys[at], _is_id(keys[at], ahead[at].layer.pad_key)) for at in places]
            kept = [flat if mask is None else flat[mask] for flat, mask in own]
            both = kept[0] if len(kept) == 1 else np.concatenate(kept)
            try:
                ids = self._routed(name, both, others)
            except IdError as error:
                layers = [ahead[at].layer.name for at in places]
                raise _naming_layer(error, layers, [flat.size for flat in kept]) from None
            routed[name] = ids
            start = 0
            for at, (flat, mask) in zip(places, own, strict=True):
                count = flat.size if mask is None else int(np.count_nonzero(mask))
                inverse = ids.inverse
                if count < inverse.size:
                    inverse = inverse[start : start + count]
                start += count
                positions[at] = _with_padding(inverse, mask, ids.unique.size)
        return self._with_memory(calls, routed, positions)

    def sums(
        self, batch: BatchRows, gradients: Sequence[tuple[Any, RowGradient]]
    ) -> dict[str, tuple[RoutedIds, Array]]:
        """Return the distinct keys and their summed gradients [distinct, dim], by table.

        Args:
            batch: batch whose step gave the gradients.
            gradients: pairs of layer and gradient; several of one table are added.
        """
        from ps.tables import kernels

        inside = {call.layer.table for call in batch.calls if not call.is_ahead}
        found: dict[str, tuple[RoutedIds, Array]] = {}
        looked_up: dict[str, list[tuple[Array, Array]]] = {}
        for layer, (values, indices) in gradients:
            name = layer.table
            given, places = np.asarray(memoryview(values)), np.asarray(memoryview(indices))
            if name in inside:
                if (mask := _is_id(places, layer.pad_key)) is not None:
                    given, places = given[mask], places[mask]
                looked_up.setdefault(name, []).append((given, places))
                continue
            if name not in batch.routed:
                continue  # this kind of batch calls no layer of the table
            if name not in found:
                ids = batch.routed[name]
                found[name] = ids, np.zeros((ids.unique.size, given.shape[1]), given.dtype)
            kernels.sum_equal(given, places.astype(np.int32), found[name][1])
        for name, parts in looked_up.items():
            keys = np.concatenate([keys for _, keys in parts])
            found[name] = self.merged(name, keys, np.concatenate([values for values, _ in parts]))
        return found

    def merged(self, name: str, keys: Array, values: Array) -> tuple[RoutedIds, Array]:
        """Return distinct keys and the sums of their values, in the order given.

        Args:
            name: name of the table.
            keys: [n] int64.
            values: [n, dim].
        """
        ids = self._routed_alone(name, keys)
        return ids, ids.summed(values)

    def _routed(
        self, name: str, keys: Array, others: dict[Hashable, tuple[Array, RoutedIds]]
    ) -> RoutedIds:
        """Return the route of a table's keys; tables of the same ids, as of dim 16 and 1, share it.

        others: keys and routes of the batch's tables, by kind and first keys; a new one is added.
        """
        spec = self._specs[name]
        mark = (spec.id_kind, spec.max_id, keys[:MARK_KEYS].tobytes())
        known = others.get(mark)
        if known is not None and np.array_equal(keys, known[0]):
            return known[1]
        routed = self._routed_alone(name, keys)
        others[mark] = keys, routed
        return routed

    def _routed_alone(self, name: str, keys: Array) -> RoutedIds:
        return self._route({name: from_bits(self._specs[name], keys)})[name]

    def _with_memory(
        self, calls: Sequence[LayerCall], routed: dict[str, RoutedIds], positions: list[Any]
    ) -> BatchRows:
        import tensorflow as tf

        arrays, tensors = {}, {}
        for name, ids in routed.items():
            count = ids.unique.size
            size = 1 << count.bit_length() if self._pads else count + 1
            dim = self._specs[name].dim
            arrays[name] = aligned(size * dim, "float32").reshape(size, dim)
            arrays[name][count:] = 0.0
            tensors[name] = tf.experimental.dlpack.from_dlpack(arrays[name].__dlpack__())
        # Tables of equal ids have one array of positions.
        distinct = {id(at): at for at in positions}
        places = {key: _tensor_of(at) for key, at in distinct.items()}
        by_call = [places[id(at)] for at in positions]
        return BatchRows(calls, routed, arrays, tensors, by_call, self._frozen)


def _tensor_of(positions: Array) -> Any:
    """Return a tensor of [n] int32; for unaligned memory TensorFlow takes ten times as long."""
    import tensorflow as tf

    if not positions.size:
        return tf.constant(positions)
    memory = aligned(positions.size, "int32")
    memory[:] = positions
    return tf.experimental.dlpack.from_dlpack(memory.__dlpack__())


def first_bad_row(batch: BatchRows, numbers: Mapping[str, Array]) -> str:
    """Return which row has a NaN or an infinity: "the row of id 7 of table 'user' (layer 'who')".

    Args:
        batch: batch of one step.
        numbers: numbers by table, [distinct or more, dim], in the order of its distinct keys.

    Returns:
        The first bad row; empty: there is none.
    """
    for name, rows in numbers.items():
        ids = batch.routed.get(name)
        if ids is not None:
            bad = ~np.isfinite(rows[: ids.unique.size]).all(axis=1)
            if bad.any():
                layers = {call.layer.name for call in batch.calls if call.layer.table == name}
                key = ids.unique[int(bad.argmax())]
                return f"the row of id {key} of table {name!r} (layers {sorted(layers)})"
    return ""


def _naming_layer(error: IdError, layers: Sequence[str], counts: Sequence[int]) -> IdError:
    """Return the error with the layer whose input has the id.

    Args:
        error: its position counts the ids of all calls of the table.
        layers: name of each call's layer.
        counts: number of ids of each call, without padding.
    """
    ends = np.cumsum(counts)
    at = int(np.searchsorted(ends, int(error.details.get("position", 0)), side="right"))
    layer = layers[min(at, len(layers) - 1)]
    return IdError(
        f"{error.message}. The id belongs to the feature that layer {layer!r} gets. Correct it, "
        "set pad_id to an id that stands for nothing, or hash the feature (keras.layers.Hashing)",
        error.details | {"layer": layer},
    )


def _is_id(keys: Array, pad_key: int | None) -> Array | None:
    """Return [n] bool, False for padding; None if there is none."""
    if pad_key is None:
        return None
    mask = keys != pad_key
    return None if mask.all() else mask


def _with_padding(inverse: Array, mask: Array | None, padding: int) -> Array:
    if mask is None:
        return inverse
    positions = np.full(mask.size, padding, np.int32)
    positions[mask] = inverse
    return positions
