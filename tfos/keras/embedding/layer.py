"""Layer `tfos.keras.Embedding`: an embedding without a vocabulary, whose rows live in a table.

Covers: the layer's arguments, its call (rows, masks, combiners), shapes, config.
Does not: hold rows or look them up (row_flow, sources), train them (tfos.keras.step.tables).
Threads: as every Keras layer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np

from ps.manifest.table_spec import Admission
from tfos.errors import SettingsError, UnsupportedModel
from tfos.keras import keras_loops
from tfos.keras.embedding import cast_ids, row_flow
from tfos.keras.embedding.combine import COMBINERS, Combiner, check_weights, combined
from tfos.keras.embedding.graph_rows import (
    GraphRows,
    exporting,
    of_this_process,
    writing_out,
)
from tfos.keras.embedding.keys import Keys, as_text, is_text, keys_of, pad_given, pad_key
from tfos.keras.embedding.sources import NO_ROWS, LoadedRows, RowSource, looked_up
from tfos.keras.embedding.table_settings import (
    TableSettings,
    admission_given,
    initializer_given,
    refuse_arguments_of_keras,
    rule_given,
    seed_given,
    unseen_given,
)

MAX_SAVED_BYTES = 2 << 30
"""Largest size of one table's rows in a `.keras` file, in bytes."""
_WARNED_SHARE = 0.8
"""Share of it above which a save warns: the table of a training grows."""
logger = logging.getLogger(__name__)


@keras.saving.register_keras_serializable(package="tfos")
class Embedding(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Vectors by id, for ids without a vocabulary; replaces `keras.layers.Embedding`.

    The rows live in a table: under `ctx.distribute` on the parameter servers, otherwise in this
    process. A row exists from the first training step with its id. Its first values depend on
    the table's `seed` and the id alone.

    Ids are integers of any dtype, from 0, or strings and bytes, whose key is
    `tf.strings.to_hash_bucket_fast(id, 2**63 - 1)`. They have any shape; tf.RaggedTensor is one.
    Without a combiner the result is [*shape of the ids, dim]. With one, the last axis of the ids is
    reduced: [batch, n] gives [batch, dim], and a list without ids gives zeros.

    Call: `layer(ids)`, or with a combiner `layer(ids, weights)` or `layer([ids, weights])`, where
    weights are floats of the ids' shape.

    Args:
        dim: elements of a row.
        table: name of the table; layers of one name share their rows. None: the layer's name.
        combiner: None, "sum", "mean" (the sum through the sum of the weights) or "sqrtn" (through
            the root of the sum of their squares).
        initializer: first values of a row: "uniform" (±0.05), a Keras initializer that needs no
            number of rows, or one of `ps.initializers`.
        seed: seed of the initializer. None: that of a Keras initializer, else the table's own, made
            from its name. Tables with equal seeds begin with the same vectors for the same ids.
        pad_id: an id that stands for nothing: its vector is zeros, and combiners leave it out.
        mask_zero: pad_id=0, and later layers get the mask `ids != 0`.
        unseen: the vector of an id without a row, in evaluation, inference and exports: a number
            for all elements, or `dim` numbers.
        rule: update rule of `ps.rules`; None: that of the model's optimizer. It acts only on the
            rows of a batch, and each row has its own slots.
        learning_rate_multiplier: factor of the optimizer's learning rate for this table.
        row_steps: whether Adam, AdamW and Adamax count each row's own updates.
        max_rows: rows of the whole table; None: no limit.
        max_bytes: the same in bytes, with all that a row needs.
        when_full: "refuse" fails the step that needs more; "lru" drops the oldest rows.
        ttl_s: seconds after which a row is dropped that no step contained; None: never.
        admission: which unknown ids get a row (`ps.Admission`); None: all.
        id_kind: "uint64" where ids above 2^63 - 1 occur.
        max_id: largest id; None: the largest of `id_kind`.
        trainable: False only looks up; training, too, gives `unseen` for an id without a row then.
        **kwargs: `name` and `dtype`, as of every layer.

    Raises:
        SettingsError: an argument that cannot work.
    """

    __module__ = "tfos.keras"  # pickled by its public name, whose import lets models train
    takes_lists = True
    """Whether rows may differ in length, as tf.RaggedTensor; for tfos.keras.data.lists."""
    takes_text: bool | None = None
    """Whether ids are strings; None: the layer was never called."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse what `keras.layers.Embedding` takes, in a sentence; else as every layer."""
        if cls.__init__ is Embedding.__init__:
            refuse_arguments_of_keras(args, kwargs)
        return super().__new__(cls, *args, **kwargs)

    def __init__(  # noqa: PLR0913 - one keyword per setting, with defaults
        self,
        dim: int,
        *,
        table: str | None = None,
        combiner: Combiner | None = None,
        initializer: Any = "uniform",
        seed: int | None = None,
        pad_id: int | str | bytes | None = None,
        mask_zero: bool = False,
        unseen: float | Sequence[float] = 0.0,
        rule: Any = None,
        learning_rate_multiplier: float = 1.0,
        row_steps: bool = False,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        when_full: Literal["refuse", "lru"] = "refuse",
        ttl_s: float | None = None,
        admission: Admission | Mapping[str, Any] | None = None,
        id_kind: Literal["int64", "uint64"] = "int64",
        max_id: int | None = None,
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(trainable=trainable, **kwargs)
        if combiner is not None and combiner not in COMBINERS:
            raise SettingsError(f"combiner={combiner!r} must be None or one of {COMBINERS}")
        if mask_zero and pad_id not in (None, 0):
            raise SettingsError(f"mask_zero=True means pad_id=0, got pad_id={pad_id!r}")
        if mask_zero and combiner is not None:
            raise SettingsError(
                f"mask_zero=True with combiner={combiner!r}: no axis is left to mask; use pad_id=0"
            )
        self.autocast = False
        self.supports_masking = mask_zero
        self.combiner = combiner
        self.mask_zero = mask_zero
        self.pad_id = 0 if mask_zero else pad_given(pad_id)
        self._has_own_table = table is None
        self.settings = TableSettings(
            name=self.name if table is None else table,
            dim=dim,
            rule=rule_given(rule),
            learning_rate_multiplier=float(learning_rate_multiplier),
            row_steps=row_steps,
            initializer=initializer_given(initializer),
            seed=seed_given(seed, initializer),
            id_kind=id_kind,
            max_id=max_id,
            max_rows=max_rows,
            max_bytes=max_bytes,
            when_full=when_full,
            ttl_s=ttl_s,
            admission=admission_given(admission),
            unseen=unseen_given(unseen, dim),
        )
        self.settings.spec(None)  # refuses what cannot work
        self._pad_key: int | None = None
        self.source: RowSource = NO_ROWS
        self.anchor: Any = None

    @property
    def dim(self) -> int:
        """Number of elements of a row."""
        return self.settings.dim

    @property
    def table(self) -> str:
        """Name of the table."""
        return self.settings.name

    @property
    def embeddings(self) -> Any:
        """Refuse what is all rows of a `keras.layers.Embedding`, as retrieval and tied weights use.

        Raises:
            AttributeError: says what to call.
        """
        raise AttributeError(
            f"layer {self.name!r} has no matrix `embeddings`: the rows of its table {self.table!r} "
            "are looked up by id. Call the layer with the ids whose rows are needed, as those of "
            "all candidates of a retrieval, keras.ops.arange(n)"
        )

    @property
    def pad_key(self) -> int | None:
        """The key of `pad_id`; None: there is none."""
        if self.pad_id is not None and self._pad_key is None:
            self._pad_key = pad_key(self.pad_id)
        return self._pad_key

    def bind(self, source: RowSource) -> None:
        """Look rows up there from now on, outside of training steps."""
        self.source = source

    def build(self, input_shape: Any = None) -> None:  # noqa: ARG002 - Keras' signature
        """Create the anchor (row_flow); its name is that of `keras.layers.Embedding`'s weight."""
        self.anchor = self.add_weight(
            shape=(0, self.dim), initializer="zeros", dtype="float32", name="embeddings"
        )
        self.built = True

    def call(self, ids: Any, weights: Any = None, training: bool | None = None) -> Any:
        """Return the rows of the ids, combined if the layer has a combiner.

        Args:
            ids: integers or strings of any shape, dense or ragged; or [ids, weights].
            weights: floats of the same shape, for a combiner.
            training: Keras' own: whether a training step calls.
        """
        import tensorflow as tf

        ids, weights = _split(ids, weights)
        if weights is not None and self.combiner is None:
            raise UnsupportedModel(
                f"layer {self.name!r} got weights but has no combiner; give it "
                'combiner="sum", "mean" or "sqrtn"'
            )
        if cast_ids.are_guessed(ids):
            keys = keys_of(tf.cast(ids, tf.int64), self.name)
        else:
            keys = keys_of(ids, self.name)
            self._check_kind(keys.source.dtype)
        self._check_weights(keys.source, weights)
        rows = self._rows(keys, training)
        if self.combiner is not None:
            is_id = None if self.pad_key is None else keys.flat != self.pad_key
            rows = combined(rows, keys, weights, self.combiner, is_id)
        else:
            rows = keys.with_rows(rows)
        if isinstance(rows, tf.RaggedTensor):
            return rows.with_flat_values(tf.cast(rows.flat_values, self.compute_dtype))
        return tf.cast(rows, self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:  # noqa: ARG002
        """Return `ids != 0` with mask_zero, else None."""
        if not self.mask_zero:
            return None
        ids, _ = _split(inputs, None)
        return keras.ops.not_equal(ids, 0)

    def compute_output_shape(
        self,
        ids_shape: Any,
        weights_shape: Any = None,  # noqa: ARG002
    ) -> Any:
        """Return the shape of the result.

        Args:
            ids_shape: shape of the ids, or of [ids, weights].
            weights_shape: shape of the weights.

        Raises:
            UnsupportedModel: a combiner has no axis to reduce.
        """
        if ids_shape and isinstance(ids_shape[0], list | tuple):
            ids_shape = ids_shape[0]
        if self.combiner is None:
            return (*ids_shape, self.dim)
        if len(ids_shape) < 2:
            raise UnsupportedModel(
                f"layer {self.name!r} has combiner={self.combiner!r}, which reduces the last axis "
                f"of ids [batch, n], and got ids of shape {tuple(ids_shape)}; drop the combiner"
            )
        return (*ids_shape[:-1], self.dim)

    def compute_output_spec(
        self,
        ids: Any,
        weights: Any = None,
        training: Any = None,  # noqa: ARG002
    ) -> Any:
        """Return the result's shape and dtype; nothing is looked up."""
        ids, weights = _split(ids, weights)
        self._check_kind(ids.dtype)
        self._check_weights(ids, weights)
        shape = self.compute_output_shape(tuple(ids.shape))
        ragged = bool(getattr(ids, "ragged", False)) and self.combiner is None
        return keras.KerasTensor(shape, self.compute_dtype, ragged=ragged)

    def get_config(self) -> dict[str, Any]:
        """Return the layer's arguments, as JSON has them."""
        config = self.settings.config()
        name = config.pop("name")
        pad_id = self.pad_id
        return {
            **super().get_config(),
            **config,
            "table": None if self._has_own_table else name,
            "combiner": self.combiner,
            "pad_id": as_text(pad_id) if isinstance(pad_id, bytes) else pad_id,
            "mask_zero": self.mask_zero,
        }

    def save_own_variables(self, store: Any) -> None:
        """Put the table's rows into a `.keras` or `.weights.h5` file.

        Raises:
            UnsupportedModel: they are more than MAX_SAVED_BYTES.
        """
        found = self.source.dump(self.table, MAX_SAVED_BYTES) if row_flow.saves_rows() else None
        if found is not None:
            store["keys"], store["rows"] = found
            if self.takes_text is not None:  # nothing else tells it to a model of an own class
                store["takes_text"] = np.array(self.takes_text)
            if (num_bytes := found[1].nbytes) > _WARNED_SHARE * MAX_SAVED_BYTES:
                logger.warning(
                    "the rows of table %r take %d of the %d bytes that one file may have. Once it "
                    "has more, saves fail, and a ModelCheckpoint ends its fit: keep checkpoints "
                    "instead, reserve(config=ClusterConfig(checkpoints=…)), or limit the table "
                    "with max_rows",
                    self.table,
                    num_bytes,
                    MAX_SAVED_BYTES,
                )

    def load_own_variables(self, store: Any) -> None:
        """Take the rows of a file: to look them up, and for the table of a training to begin with.

        Raises:
            UnsupportedModel: the table is on servers, or an export's that is served.
        """
        if "keys" not in store:
            return
        if not (self.source is NO_ROWS or isinstance(self.source, LoadedRows)):
            raise UnsupportedModel(
                f"the rows of layer {self.name!r} are on parameter servers, or in a served export, "
                "and load_weights does not replace them. Load the file before the model is "
                "distributed or trained, so that the table begins with its rows, or resume from a "
                "checkpoint: reserve(config=ClusterConfig(checkpoints=…))"
            )
        keys, rows = (np.array(store[name]) for name in ("keys", "rows"))
        if rows.shape[1:] != (self.dim,):
            raise UnsupportedModel(
                f"layer {self.name!r} has rows of {self.dim} numbers, those of the file have "
                f"{rows.shape[1]}; make the layer with dim={rows.shape[1]}"
            )
        self.bind(LoadedRows(keys, rows, self.settings))
        if "takes_text" in store:
            self.takes_text = bool(np.array(store["takes_text"]))

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        """Return what TensorFlow saves of the layer; only a SavedModel with its rows has it."""
        if save_type == "savedmodel" and not isinstance(self.source, GraphRows):
            raise of_this_process(f"layer {self.name!r}")
        return super()._trackable_children(save_type, **kwargs)

    def _check_kind(self, dtype: Any) -> None:
        """Refuse strings instead of integers, or the reverse: equal ids would get other rows."""
        takes_text = is_text(dtype)
        kinds = ("strings", "integers") if takes_text else ("integers", "strings")
        if self.pad_id is not None and takes_text != isinstance(self.pad_id, str | bytes):
            raise UnsupportedModel(
                f"layer {self.name!r} gets {kinds[0]}, but pad_id={self.pad_id!r} is not one, "
                "so nothing would be padding; give pad_id as the batch has it, without mask_zero "
                "for strings"
            )
        if self.takes_text not in (None, takes_text):
            raise UnsupportedModel(
                f"layer {self.name!r} gets {kinds[0]}, but got {kinds[1]} before: the id 5 and the "
                "text '5' have different rows. Convert the feature to what it was in training"
            )
        self.takes_text = takes_text
        self.supports_jit = not takes_text  # XLA takes no strings

    def _check_weights(self, ids: Any, weights: Any) -> None:
        shapes = [getattr(each, "shape", None) for each in (ids, weights)]
        if all(shape is not None and getattr(shape, "rank", 0) is not None for shape in shapes):
            check_weights(shapes[0], shapes[1], self.name)

    def _rows(self, keys: Keys, training: bool | None) -> Any:
        if isinstance(self.source, GraphRows):
            return self.source.looked_up(keys.flat, self.pad_key)
        if (flow := row_flow.flow_for(self, training)) is not None:
            rows, indices = flow.rows(self, keys.flat)
        else:
            rows, indices = (
                looked_up(self, keys.flat, training=bool(training and self.trainable)),
                None,
            )
        rows.set_shape([None, self.dim])
        return row_flow.anchored(rows, indices, self.anchor) if self.trainable else rows


def _split(ids: Any, weights: Any) -> tuple[Any, Any]:
    if isinstance(ids, list | tuple):
        if len(ids) != 2 or weights is not None:
            raise UnsupportedModel(
                f"an Embedding takes ids, or [ids, weights]; got a list of {len(ids)}"
            )
        return ids[0], ids[1]
    return ids, weights


def has_tables(layer: Any) -> bool:
    """Whether a model, or what it calls, is an Embedding or has one inside."""
    return cast_ids.contains(layer, Embedding)


def embeddings_in(model: Any) -> list[Embedding]:
    """Return the model's Embeddings, nested ones included."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, Embedding)]


def takes_ids(model: Any) -> tuple[bool, ...]:
    """Whether an Embedding may get the integers of each input of a functional or Sequential."""
    return cast_ids.takes_ids(model, Embedding)


def refuse_tables(model: Any, filepath: Any) -> None:
    """Refuse to save a model with tables to an HDF5 file.

    Args:
        model: any.
        filepath: path of the file.

    Raises:
        UnsupportedModel: names the file and the tables.
    """
    if has_tables(model):
        tables = sorted({layer.table for layer in embeddings_in(model)})
        raise UnsupportedModel(
            f"{filepath} would lack the rows of the model's tables {tables}, which HDF5 files "
            "do not hold; save the model to a file whose name ends in .keras"
        )


def _refusing_tables(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return Keras' save to HDF5, which asks no layer what it saves, for models without tables."""

    @functools.wraps(save)
    def save_model_to_hdf5(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_tables(model, filepath)
        return save(model, filepath, *args, **kwargs)

    return save_model_to_hdf5


def _sharing_rows(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return Keras' load of what a file has, after which layers of one table share the file's rows.

    A layer that several nested models call is several layers of a loaded model, and Keras gives
    what the file has to the first of them alone.
    """

    @functools.wraps(load)
    def load_state(saveable: Any, *args: Any, inner_path: str, **kwargs: Any) -> None:
        is_whole = not inner_path and isinstance(saveable, keras.Model)
        before = [(each, each.source) for each in embeddings_in(saveable)] if is_whole else []
        load(saveable, *args, inner_path=inner_path, **kwargs)
        loaded = {each.table: each for each, old in before if each.source is not old}
        for layer, old in before:
            if layer.source is old and layer.table in loaded:
                layer.bind(loaded[layer.table].source)
                layer.takes_text = loaded[layer.table].takes_text

    return load_state


keras.Model.make_test_function = keras_loops.making(
    keras.Model.make_test_function, "test_function", has_tables
)
keras.Model.make_predict_function = keras_loops.making(
    keras.Model.make_predict_function, "predict_function", has_tables
)
keras.Model.predict = keras_loops.predicting(keras.Model.predict, has_tables)
_hdf5 = keras.src.legacy.saving.legacy_h5_format
_hdf5.save_model_to_hdf5 = _refusing_tables(_hdf5.save_model_to_hdf5)
_files = keras.src.saving.saving_lib  # its one way of all files, copies and pickles
_files._load_state = _sharing_rows(_files._load_state)
_Archive = type(keras.export.ExportArchive())  # that of the backend
_Archive.write_out = writing_out(_Archive.write_out)
keras.Model.export = exporting(keras.Model.export, embeddings_in, MAX_SAVED_BYTES)
_Functional = keras.src.models.functional.Functional
_Functional.call = cast_ids.checking(_Functional.call, Embedding)
keras.Sequential.__call__ = cast_ids.checking(keras.Sequential.__call__, Embedding)
