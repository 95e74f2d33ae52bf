"""Other names: what Orca programs write that tfos.orca lacks, and what to write instead.

Covers: arguments and methods by their names in Orca; how they are refused.
Does not: know the calls that take them (tfos.orca.estimator).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfos.errors import SettingsError

_NODES = "leave it out; cluster_size= and num_ps= set the nodes of a fit and the servers among them"
_OF_DATA = "leave it out: the data's end ends an epoch; shorten it with df.limit(n) or data.take(n)"
_VERBOSE = "from_keras(verbose=False) shows nothing"
_CONFIG = "from_keras(config=...) is passed to every data function"
_OF_KERAS = "leave it out: the file is a whole Keras 3 .keras file, with the optimizer"

ARGUMENTS: dict[str, str] = {
    "auto_shard_files": "leave it out: workers take turns in the batches of a function's dataset",
    "backend": _NODES,
    "callbacks": "leave it out: only fit takes callbacks",
    "checkpoint_trigger": "leave it out: with from_keras(model_dir=...) servers save during a fit",
    "compile": "leave it out: a model is loaded as it was compiled",
    "compile_args_creator": "compile the model in model_creator",
    "cpu_binding": "leave it out: Spark's spark.task.cpus gives a node its cores",
    "custom_objects": "register each class with @keras.saving.register_keras_serializable() in a "
    "module that all nodes can import",
    "data_config": _CONFIG,
    "include_optimizer": _OF_KERAS,
    "initial_epoch": "leave it out: a second fit continues from the first, for epochs= more epochs",
    "keras_model": "model=, compiled",
    "log_to_driver": "leave it out: lines of the nodes are shown; " + _VERBOSE,
    "metrics": "compile the model with them",
    "min_partition_num": "df.repartition(n)",
    "num_steps": _OF_DATA,
    "optimizer": "compile the model with it",
    "options": _OF_KERAS,
    "overwrite": "leave it out: an older file stays until the new one is whole",
    "sample_weight": "leave it out; tfos.ml.KerasEstimator has weightCol",
    "save_format": _OF_KERAS,
    "session_config": "leave it out: it belongs to TensorFlow 1",
    "signatures": _OF_KERAS + "; get_model().export(path) writes a SavedModel",
    "steps": _OF_DATA,
    "steps_per_epoch": _OF_DATA,
    "validation_data_creator": "validation_data= also takes a function, if data is one",
    "validation_freq": "leave it out: each epoch validates",
    "validation_steps": _OF_DATA,
    "verbose": _VERBOSE,
    "workers_per_node": _NODES,
}
"""What to do, by the argument's name in Orca."""

METHODS: dict[str, str] = {
    "load_checkpoint": "load(path); with from_keras(model_dir=...) load_latest_checkpoint()",
    "load_keras_model": "load(path)",
    "load_keras_weights": "load(path) of a whole model",
    "load_latest_orca_checkpoint": "from_keras(model_dir=path), then load_latest_checkpoint()",
    "load_orca_checkpoint": "load(f'{model_dir}/model-00001.keras') takes the model of one fit",
    "load_weights": "load(path) of a whole model; or get_model().load_weights(path) and from_keras",
    "save_checkpoint": "save(path)",
    "save_keras_model": "save(path)",
    "save_keras_weights": "get_model().save_weights('name.weights.h5')",
    "save_weights": "get_model().save_weights('name.weights.h5')",
    "set_constant_gradient_clipping": "compile the optimizer with clipvalue=",
    "set_l2_norm_gradient_clipping": "compile the optimizer with clipnorm=",
    "set_tensorboard": "fit(callbacks=[keras.callbacks.TensorBoard(log_dir)])",
    "get_train_summary": "history has a value per epoch by metric",
    "get_validation_summary": "history has a value per epoch by metric, val_loss and others",
}
"""What to do, by the method's name in Orca."""


def refuse(call: str, given: Mapping[str, Any]) -> None:
    """Refuse arguments that a call does not have.

    Args:
        call: name of the method.
        given: arguments by name.

    Raises:
        SettingsError: it is an argument of Orca; the text says what to do.
        TypeError: it is unknown.
    """
    for name in given:
        if name in ARGUMENTS:
            raise SettingsError(f"{call}({name}=...) of Orca is not here: {ARGUMENTS[name]}")
        raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
