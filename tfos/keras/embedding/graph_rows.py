"""Rows in a graph: a SavedModel of any model, whose Embeddings find their rows without tfos.

    key ─► place among the sorted keys (searchsorted) ─► its row; of a key without one `unseen`

Covers: every model class, ragged and string ids, uint64, masks: the model's own call is traced.
Also by Keras' own `model.export`.
Does not: write `.keras` files, which name classes (plain), or put the directory in its place
(tfos.keras.export).
Threads: the caller's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import tree

from tfos.errors import UnsupportedModel
from tfos.keras.embedding.sources import LOOKUP, NoRows

Array = np.ndarray[Any, np.dtype[Any]]


class GraphRows(NoRows):
    """The rows of one table as variables of a SavedModel; a layer looks them up in the graph.

    Args:
        keys: [n] int64, ascending.
        rows: [n, dim] float32.
        unseen: [dim], of a key without a row.
    """

    def __init__(self, keys: Array, rows: Array, unseen: Array) -> None:
        import tensorflow as tf

        # Variables: a graph with its constants has 2 GiB at most.
        self._num_keys = keys.size
        self._keys = tf.Variable(keys if keys.size else np.zeros(1, np.int64), trainable=False)
        self._rows = tf.Variable(np.concatenate([rows, unseen[None]]), trainable=False)

    def looked_up(self, keys: Any, pad_key: int | None) -> Any:
        """Return the rows of keys as a tensor, [n, dim] float32; zeros for padding.

        Args:
            keys: [n] int64 tensor.
            pad_key: the key of padding; None: there is none.
        """
        import tensorflow as tf

        if self._num_keys:
            places = tf.minimum(tf.searchsorted(self._keys, keys), self._num_keys - 1)
            is_there = tf.equal(tf.gather(self._keys, places), keys)
            places = tf.where(is_there, places, self._num_keys)
        else:
            places = tf.zeros_like(keys)
        rows = tf.gather(self._rows, places)
        if pad_key is None:
            return rows
        return tf.where(tf.equal(keys, pad_key)[:, None], tf.zeros_like(rows), rows)


def exporting(
    export: Callable[..., Any], embeddings: Callable[[Any], Sequence[Any]], limit_bytes: int
) -> Callable[..., Any]:
    """Return Keras' Model.export, for models with tables as well.

    Args:
        export: Keras' own.
        embeddings: returns a model's Embeddings.
        limit_bytes: largest size of one table's rows.
    """

    @functools.wraps(export)
    def exporting_rows(
        self: Any,
        filepath: Any,
        format: str = "tf_saved_model",  # noqa: A002 - Keras' name
        verbose: bool | None = None,
        input_signature: Any = None,
        **kwargs: Any,
    ) -> Any:
        layers = embeddings(self)
        if not (layers and self.built):
            return export(self, filepath, format, verbose, input_signature, **kwargs)
        if format != "tf_saved_model":
            raise UnsupportedModel(
                f"export(format={format!r}) cannot hold the rows of the model's tables; leave "
                "format out, which writes a SavedModel"
            )
        save_with_rows(
            self,
            Path(filepath),
            layers,
            getattr(vars(self).get("_tfos_trainer"), "batch_spec", None),
            limit_bytes,
            input_signature,
        )
        return None

    return exporting_rows


def writing_out(write_out: Callable[..., Any]) -> Callable[..., Any]:
    """Return Keras' ExportArchive.write_out, which refuses what looks rows up in this process.

    Args:
        write_out: Keras' own.
    """

    @functools.wraps(write_out)
    def checked(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        for name in self._endpoint_names:
            for function in getattr(self._tf_trackable, name)._list_all_concrete_functions():
                found = _lookup_in(function.graph.as_graph_def())
                if found:
                    raise of_this_process(f"endpoint {name!r} with its operation {found!r}")
        return write_out(self, filepath, *args, **kwargs)

    return checked


def _lookup_in(graph: Any) -> str | None:
    """Return the name of an operation that calls an Embedding of this process; None: there is none.

    Args:
        graph: a GraphDef, whose functions call each other.
    """
    nodes = itertools.chain(graph.node, *(each.node_def for each in graph.library.function))
    names = (node.name for node in nodes if node.op == "PyFunc" and LOOKUP in node.name)
    return next(names, None)


def of_this_process(what: str) -> UnsupportedModel:
    """Return the error of a SavedModel that no other process could call.

    Args:
        what: looks the rows up.
    """
    return UnsupportedModel(
        f"{what} looks its rows up in this process, so no other could call this SavedModel. Write "
        "the model with its rows: ctx.export(model, path) or model.export(path), or, if they are "
        'too many, ctx.export(model, path, tables="beside")'
    )


def save_with_rows(
    model: Any,
    target: Path,
    layers: Sequence[Any],
    batch_spec: Any,
    limit_bytes: int,
    input_signature: Any = None,
) -> None:
    """Write a built model as a SavedModel with the rows of its tables.

    Args:
        model: model of any class.
        target: a directory that does not exist.
        layers: its Embeddings.
        batch_spec: specs of the (x, …) of a trained batch, for a model without keras.Input; None:
            there was none.
        limit_bytes: largest size of one table's rows.
        input_signature: specs of the call's arguments, as of keras.Model.export; None: the model's.

    Raises:
        UnsupportedModel: nobody knows the inputs' dtypes, or more rows than `limit_bytes`.
    """
    import tensorflow as tf

    if input_signature is None:
        signature = [_signature(model, batch_spec)]
    else:
        signature = tree.map_structure(_spec_of, list(input_signature))
    with in_graph(layers, limit_bytes):

        def serve(*inputs: Any) -> Any:
            return model(*inputs, training=False)

        function = tf.function(serve, input_signature=signature, autograph=False)
        function.get_concrete_function()
        archive = archive_of(model)
        archive.add_endpoint("serve", function)
        archive.write_out(str(target), verbose=False)


def archive_of(model: Any) -> Any:
    """Return an ExportArchive that holds what the model's layers have, such as lookup tables.

    Args:
        model: built.
    """
    archive = keras.export.ExportArchive()
    for layer in model._flatten_layers():
        # A model brings a signature of its own, of floats; Keras refuses layers without a call.
        if layer.built and not isinstance(layer, keras.Model):
            archive.track(layer)
    return archive


@contextmanager
def in_graph(layers: Sequence[Any], limit_bytes: int) -> Iterator[None]:
    """Let the layers look up in variables within the block.

    Args:
        layers: Embeddings; none: nothing changes.
        limit_bytes: largest size of one table's rows.

    Raises:
        UnsupportedModel: a table has more.
    """
    before = [layer.source for layer in layers]
    tables: dict[str, GraphRows] = {}
    for layer in layers:
        if layer.table not in tables:
            nothing = np.empty(0, np.int64), np.empty((0, layer.dim), np.float32)
            keys, rows = layer.source.dump(layer.table, limit_bytes) or nothing
            tables[layer.table] = GraphRows(keys, rows, layer.settings.unseen_row)
    try:
        for layer in layers:
            layer.bind(tables[layer.table])
        yield
    finally:
        for layer, source in zip(layers, before, strict=True):
            layer.bind(source)


def _signature(model: Any, batch_spec: Any) -> Any:
    """Return the specs of the model's inputs."""
    if getattr(model, "inputs", None):
        sequential = isinstance(model, keras.Sequential)
        return tree.map_structure(_spec_of, model.inputs[0] if sequential else model._inputs_struct)
    if batch_spec is None:
        raise UnsupportedModel(
            f"{type(model).__name__} is a model class of your own without keras.Input and has "
            "trained no batch here, so the dtypes of its inputs are unknown. Train one batch, "
            "name them: model.export(path, input_signature=[keras.InputSpec(shape=…, "
            "dtype='int64')]), or export it with tables=\"beside\""
        )
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch_spec)
    return x


def _spec_of(given: Any) -> Any:
    import tensorflow as tf

    shape = [None, *given.shape[1:]]
    if getattr(given, "ragged", False):
        return tf.RaggedTensorSpec(shape, given.dtype, getattr(given, "ragged_rank", None) or 1)
    return tf.TensorSpec(shape, given.dtype, name=given.name)
