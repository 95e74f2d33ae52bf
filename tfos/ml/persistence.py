"""Persistence of spark.ml: Params as Spark writes them, the model as `model.keras` beside them.

Covers: readers and writers of KerasEstimator and KerasModel, on every file system that Spark knows.
Does not: write code: functions are saved by module and name (tfos.estimators.functions).
Runs in: the driver. Imports pyspark, as every user of spark.ml has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter

from tfos.errors import SettingsError
from tfos.estimators.functions import function_of, reference_to
from tfos.estimators.recipe import ModelRecipe
from tfos.predict.signature import TensorInfo

_FILE = "model.keras"
_FORMAT = 1
"""Of what stands beside an estimator's Params."""
_PIECE_BYTES = 8 << 20
"""Bytes per call into the JVM."""


class ModelFileWriter(DefaultParamsWriter):  # type: ignore[misc]  # pyspark is not checked
    """Writes a KerasModel.

    Args:
        model: the KerasModel.

    Raises:
        SettingsError: custom objects that cannot be saved; before overwrite() deletes an older one.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._extra = {"history": model.history, "custom": _references(model.custom_objects)}

    def saveImpl(self, path: str) -> None:
        """Write Params, history and the model."""
        model = self.instance
        self.saveMetadata(model, path, self.sc, extraMetadata=self._extra)
        _write(self.sc, f"{path}/{_FILE}", model.content)


class ModelFileReader(DefaultParamsReader):  # type: ignore[misc]  # pyspark is not checked
    """Reads a KerasModel."""

    def load(self, path: str) -> Any:
        """Return what was saved there."""
        metadata = _checked(self.loadMetadata(path, self.sc), "history", path)
        content = _read(self.sc, f"{path}/{_FILE}")
        made = self.cls(content, _functions(metadata["custom"]), metadata["history"])
        return _with_params(made, metadata)


class EstimatorWriter(DefaultParamsWriter):  # type: ignore[misc]  # pyspark is not checked
    """Writes a KerasEstimator.

    Args:
        estimator: the KerasEstimator.

    Raises:
        SettingsError: a part of it cannot be saved; before overwrite() deletes an older one.
    """

    def __init__(self, estimator: Any) -> None:
        super().__init__(estimator)
        recipe, callbacks = estimator.recipe, estimator.callbacks
        if not callable(callbacks) and len(callbacks):
            raise SettingsError(
                f"callbacks={list(callbacks)} are objects and cannot be saved. Pass a function at "
                "top level of a module that makes them: callbacks=made"
            )
        if estimator.config is not None:
            raise SettingsError(
                "config= is of this program's cluster and cannot be saved. Set estimator.config = "
                "None before, and the config of the program that loads it behind load()"
            )
        class_weight = estimator.class_weight or {}
        self._extra = {
            "format": _FORMAT,
            "model_fn": reference_to("model_fn", recipe.model_fn),
            "callbacks": reference_to("callbacks", callbacks or None),
            "custom": _references(recipe.custom_objects),
            "class_weight": [[int(each), float(class_weight[each])] for each in class_weight],
            "inputs": [[name, asdict(info)] for name, info in recipe.inputs.items()],
            "outputs": recipe.outputs,
            "has_trained": recipe.has_trained,
        }

    def saveImpl(self, path: str) -> None:
        """Write Params, functions by their names, and the model."""
        estimator = self.instance
        self.saveMetadata(estimator, path, self.sc, extraMetadata=self._extra)
        if estimator.recipe.content:
            _write(self.sc, f"{path}/{_FILE}", estimator.recipe.content)


class EstimatorReader(DefaultParamsReader):  # type: ignore[misc]  # pyspark is not checked
    """Reads a KerasEstimator."""

    def load(self, path: str) -> Any:
        """Return what was saved there."""
        metadata = _checked(self.loadMetadata(path, self.sc), "model_fn", path)
        content = b"" if metadata["model_fn"] else _read(self.sc, f"{path}/{_FILE}")
        recipe = recipe_from(metadata, content, path)
        made = self.cls(
            model_fn=_nothing,
            callbacks=function_of(metadata["callbacks"]) or (),
            class_weight=dict(map(tuple, metadata["class_weight"])) or None,
        )
        made.recipe = recipe
        return _with_params(made, metadata)


def recipe_from(metadata: Mapping[str, Any], content: bytes, path: str) -> ModelRecipe:
    """Return the recipe of a saved estimator.

    Args:
        metadata: the metadata that EstimatorWriter wrote.
        content: bytes of the file beside it; empty: a function makes the model.
        path: path of the estimator, for the error.

    Raises:
        SettingsError: another version of tfos has written it.
    """
    if metadata.get("format") != _FORMAT:
        raise SettingsError(
            f"{path} was saved in format {metadata.get('format')} of an estimator, and this tfos "
            f"reads {_FORMAT}: load it with the version of tfos that saved it"
        )
    return ModelRecipe(
        content=content,
        model_fn=function_of(metadata["model_fn"]),
        custom_objects=_functions(metadata["custom"]),
        inputs={
            name: TensorInfo(**{**each, "shape": tuple(each["shape"])})
            for name, each in metadata["inputs"]
        },
        outputs=tuple(metadata["outputs"]),
        has_trained=metadata["has_trained"],
    )


def _checked(metadata: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    """Return the metadata, which has a key that only one kind of stage has.

    Raises:
        SettingsError: it is that of another kind.
    """
    if key not in metadata:
        kind = metadata["class"].rpartition(".")[2]
        raise SettingsError(f"{path} is a saved {kind}; load it with {kind}.load(path)")
    return metadata


def _nothing() -> None:
    """Take the place of the model, whose recipe follows."""


def _with_params(made: Any, metadata: dict[str, Any]) -> Any:
    made._resetUid(metadata["uid"])
    DefaultParamsReader.getAndSetParams(made, metadata)
    return made


def _references(custom: dict[str, Any]) -> dict[str, str]:
    return {name: reference_to(f"custom_objects[{name!r}]", each) for name, each in custom.items()}


def _functions(references: dict[str, str]) -> dict[str, Any]:
    return {name: function_of(each) for name, each in references.items()}


def _write(sc: Any, path: str, content: bytes) -> None:
    """Write a file with Hadoop's file systems, as Spark does the metadata beside it."""
    target = sc._jvm.org.apache.hadoop.fs.Path(path)
    stream = target.getFileSystem(sc._jsc.hadoopConfiguration()).create(target, True)
    try:
        for start in range(0, len(content), _PIECE_BYTES):
            stream.write(bytearray(content[start : start + _PIECE_BYTES]))
    finally:
        stream.close()


def _read(sc: Any, path: str) -> bytes:
    """Read a file that `_write` wrote, without a Spark job, whose results are limited in size."""
    source = sc._jvm.org.apache.hadoop.fs.Path(path)
    files = source.getFileSystem(sc._jsc.hadoopConfiguration())
    if not files.exists(source):
        raise SettingsError(f"{path} does not exist; write().save() puts it beside the metadata")
    stream, found = files.open(source), bytearray()
    try:
        while piece := stream.readNBytes(_PIECE_BYTES):
            found += piece
    finally:
        stream.close()
    return bytes(found)
