"""compat: calls whose form differs between releases of TensorFlow.

Covers: export_saved_model with the signature names of Keras 2 and the rows of tables,
disable_auto_shard, GPUs.
Does not: choose a worker: every worker calls it, and one of them is the chief.
Runs in: the worker's process.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from feeding.filesystem.location import LOCAL, parse
from tfos.errors import UnsupportedError
from tfos.files.export_target import SAVED_MODEL, refuse_other_content
from tfos.files.paths import refuse_container
from tfos.predict.loading import in_order_of_names, output_names
from tfos.tensorflowonspark import gpu_info

_AUTOMATIC = re.compile(r"keras_tensor(_\d+)?|input_layer(_\d+)?")
"""Names that Keras 3 gives to inputs without one."""


def export_saved_model(model: Any, export_dir: str, is_chief: bool = False) -> None:
    """Write a SavedModel whose signature `serving_default` has Keras 2's names.

    An input is called as the user called it, or `<first layer>_input`; an output as its layer.

    Args:
        model: a model of Keras 3 or tf-keras, or any tf.Module.
        export_dir: path or URL of the directory.
        is_chief: if False, a model of ctx.distribute or with tables is not written. Any other model
            is written to a temporary directory and dropped: tf.distribute needs every worker in a
            save.

    Raises:
        UnsupportedError: a Keras model without fixed inputs; names the call to use.
        UnsupportedModel: a table has more rows than a SavedModel may have.
        SettingsError: a directory that YARN removes with this container, or a URL of one with
            other content, which the transfer would remove.
    """
    target = parse(os.fsdecode(export_dir))  # TensorFlow's own helper names it in bytes
    refuse_container(target, "the model", os.environ)
    if is_chief and target.scheme == LOCAL:
        _save(model, target.path)
        return
    if is_chief:
        refuse_other_content(target)
    elif _is_saved_by_one(model):
        return
    with tempfile.TemporaryDirectory(prefix="tfos-saved-model-") as staging:
        whole = Path(staging) / "model"
        _save(model, str(whole))
        if is_chief:
            from tfos.files import transfer

            transfer.upload(whole, target, last=SAVED_MODEL)


def _is_saved_by_one(model: Any) -> bool:
    """Return whether a model's state is on the servers, or in no other process."""
    import keras

    if not isinstance(model, keras.Model):
        return False
    from tfos.keras.embedding.layer import has_tables

    return "_tfos_trainer" in vars(model) or has_tables(model)


def disable_auto_shard(options: Any) -> None:
    """Tell tf.distribute not to shard a dataset, as fed datasets need.

    Args:
        options: a tf.data.Options.
    """
    import tensorflow as tf

    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF


def is_gpu_available() -> bool:
    """Return whether nvidia-smi finds a GPU on this host."""
    return gpu_info.is_gpu_available()


def _save(model: Any, directory: str) -> None:
    import keras

    if isinstance(model, keras.Model):
        _save_keras(model, directory)
    elif hasattr(model, "save"):
        model.save(directory, save_format="tf")
    else:
        import tensorflow as tf

        tf.saved_model.save(model, directory)


def _save_keras(model: Any, directory: str) -> None:
    if not getattr(model, "inputs", None):
        raise UnsupportedError(
            f"{type(model).__name__} has no fixed inputs, so its signature has no names; write "
            f"ctx.export(model, {directory!r}), or tf.saved_model.save with signatures of your own"
        )
    from tfos.keras.embedding.graph_rows import in_graph
    from tfos.keras.embedding.layer import MAX_SAVED_BYTES, embeddings_in

    trainer = vars(model).get("_tfos_trainer")
    if trainer is not None:
        trainer.pull_newest()
    with in_graph(embeddings_in(model), MAX_SAVED_BYTES):
        _write(model, directory)


def _write(model: Any, directory: str) -> None:
    import keras
    import tensorflow as tf

    from tfos.keras.embedding.graph_rows import archive_of

    tensors = list(model.inputs)
    specs = [
        tf.TensorSpec(tuple(each.shape), each.dtype, name=name)
        for each, name in zip(tensors, input_names(model), strict=True)
    ]
    outputs = output_names(model)

    def given(values: list[Any]) -> Any:
        is_sequential = isinstance(model, keras.Sequential)
        return values[0] if is_sequential else keras.tree.pack_sequence_as(model.input, values)

    def serve(*values: Any) -> dict[str, Any]:
        found = model(given(list(values)), training=False)
        flat = in_order_of_names(model, "output", keras.tree.flatten(found))
        return dict(zip(outputs, flat, strict=True))

    archive = archive_of(model)
    archive.add_endpoint("serve", serve, input_signature=specs)
    archive.write_out(directory, verbose=False)


def input_names(model: Any) -> list[str]:
    """Return the names of a Keras 3 model's inputs as in a Keras 2 signature."""
    names = [str(each.name) for each in model.inputs]
    if len(names) == 1 and _AUTOMATIC.fullmatch(names[0]) and not hasattr(model, "output_names"):
        return [f"{model.layers[0].name}_input"]
    return names
