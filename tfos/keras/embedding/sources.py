"""Sources of rows for calls outside of a prepared step: evaluation, inference, a plain `model(x)`.

Covers: the interface, the source of a layer that has none, the lookup inside a graph.
Does not: train (tfos.keras.step.tables).
Threads: TensorFlow calls a source from its own threads, several at a time.

A graph that contains such a lookup runs in this process only; exports replace the layers
(plain), or put the rows into the graph (graph_rows).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ps.errors import ClosedError, PSError, PushError
from ps.tables.ids import as_bits, from_bits
from tfos.errors import UnsupportedModel
from tfos.keras import lookup_errors
from tfos.keras.embedding.table_settings import TableSettings

Array = np.ndarray[Any, np.dtype[Any]]


class RowSource(Protocol):
    """Rows by table and key."""

    def rows(self, table: str, keys: Array, *, training: bool = False) -> Array | None:
        """Return the rows of keys: [n, dim] of the table's dtype; None: the table is not there.

        Args:
            table: its name.
            keys: [n] int64.
            training: an id without a row has the values that its row would start with; otherwise
                the table's `unseen`.
        """

    def dump(self, table: str, limit_bytes: int) -> tuple[Array, Array] | None:
        """Return all rows of a table, ascending by key: [n] int64 and [n, dim]; None: it has none.

        Args:
            table: its name.
            limit_bytes: largest size of the rows.

        Raises:
            UnsupportedModel: they are more.
        """


class NoRows:
    """The source of a layer whose table does not exist yet, or is in a graph."""

    def rows(self, table: str, keys: Array, *, training: bool = False) -> Array | None:  # noqa: ARG002
        """Return None; see RowSource."""
        return None

    def dump(self, table: str, limit_bytes: int) -> tuple[Array, Array] | None:  # noqa: ARG002
        """Return None; see RowSource."""
        return None


class LoadedRows:
    """Rows that a file held; they do not change.

    Args:
        keys: [n] int64, ascending.
        rows: [n, dim] float32.
        settings: settings of the table: the ids that it takes, and the vector of one without a row.
    """

    def __init__(self, keys: Array, rows: Array, settings: TableSettings) -> None:
        self._keys = keys
        self._rows = np.concatenate([rows, settings.unseen_row[None]])
        self._spec = settings.spec(None)

    def rows(self, table: str, keys: Array, *, training: bool = False) -> Array:  # noqa: ARG002
        """Return the rows of keys, [n, dim]; see RowSource.

        Raises:
            IdError: a key is no id of the table, as on a server.
        """
        as_bits(self._spec, from_bits(self._spec, keys))
        places = np.searchsorted(self._keys, keys)
        places[places == self._keys.size] = 0
        if self._keys.size:
            places[self._keys[places] != keys] = self._keys.size
        return self._rows[places]

    def dump(self, table: str, limit_bytes: int) -> tuple[Array, Array]:
        """Return all rows; see RowSource."""
        rows = self._rows[:-1]
        check_size(table, rows.nbytes, limit_bytes)
        return self._keys, rows


def check_size(table: str, num_bytes: int, limit_bytes: int) -> None:
    """Refuse rows that are too many for one file.

    Args:
        table: for the message.
        num_bytes: size of its rows.
        limit_bytes: largest size of the file.

    Raises:
        UnsupportedModel: the rows are too many; the text has both numbers and alternatives.
    """
    if num_bytes > limit_bytes:
        raise UnsupportedModel(
            f"table {table!r} has {num_bytes} bytes of rows or more, but the limit of one file is "
            f"{limit_bytes}. Write them beside the model: ctx.export(model, directory, "
            'tables="beside"), or keep checkpoints: reserve(config=ClusterConfig(checkpoints=…))'
        )


NO_ROWS: RowSource = NoRows()
LOOKUP = "tfos_rows"
"""Name of the operation that looks rows up in this process."""


def rows_for(layer: Any, keys: Array, *, training: bool) -> Array:
    """Return the rows of one call, [n, dim] float32; zeros for padding.

    Args:
        layer: the Embedding.
        keys: [n] int64.
        training: as RowSource.rows.

    Raises:
        PSError: as the source; a PushError, such as an IdError, names the layer.
    """
    rows = np.zeros((keys.size, layer.dim), np.float32)
    kept = slice(None) if layer.pad_key is None else keys != layer.pad_key
    try:
        found = layer.source.rows(layer.table, keys[kept], training=training) if keys.size else None
        if found is None:
            spec = layer.settings.spec(None)
            as_bits(spec, from_bits(spec, keys[kept]))  # as a table would refuse them
            found = layer.settings.unseen_row
    except PushError as error:
        raise of_layers(error, [layer.name]) from None
    rows[kept] = found
    return rows


def of_layers(error: PushError, names: Sequence[str]) -> PushError:
    """Return an error of a table's rows, of the same class, that names the layers as well.

    Args:
        error: error of the server, or of the ids.
        names: names of the layers that have the table.
    """
    return type(error)(
        f"{error.message}. The rows are those of the layers {[*names]}; their settings are "
        "arguments of tfos.keras.Embedding",
        error.details,
    )


def looked_up(layer: Any, keys: Any, *, training: bool) -> Any:
    """Return the rows of one call as a tensor [n, dim], looked up when the step runs.

    Args:
        layer: the Embedding.
        keys: [n] int64 tensor.
        training: as RowSource.rows.

    Raises:
        PSError: as `rows_for`, where nothing is traced. In a graph TensorFlow's own error stands
            for it: see lookup_errors.
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        return tf.constant(rows_for(layer, keys.numpy(), training=training))

    dim, name = layer.dim, layer.name
    held = weakref.ref(layer)  # TensorFlow keeps look_up until the process ends

    def look_up(flat: Array) -> tuple[Array, bytes]:
        try:
            if (found := held()) is None:
                raise ClosedError(
                    f"the Embedding {name!r} that this function looks rows up with is gone; keep "
                    "its model as long as the function"
                )
            return rows_for(found, flat, training=training), b""
        except PSError as error:
            # Returned: TensorFlow logs the frames of what is raised, a hundred lines.
            return np.zeros((flat.size, dim), np.float32), lookup_errors.keep(error).encode()

    # Stateful: another call with the same ids may find other rows.
    rows, failed = tf.numpy_function(
        look_up, [keys], (tf.float32, tf.string), stateful=True, name=LOOKUP
    )
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(failed, ""), [failed])]):
        return tf.identity(rows)
