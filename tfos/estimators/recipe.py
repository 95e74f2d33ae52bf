"""Model recipe: a compiled Keras model as bytes, or the function that makes one in each worker.

Covers: the checks at the driver, building in a worker, the bytes of a trained model.
Does not: train (tfos.estimators.program).
Runs in: the driver and in workers. Keras is imported in functions only.
"""

from __future__ import annotations

import io
import json
import random
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from feeding.filesystem.temp_files import names_full_disk
from tfos.errors import NotCompiled, SettingsError, UnsupportedModel
from tfos.predict.loading import EXPORT, input_infos, input_names, output_names
from tfos.predict.signature import ModelSignature, TensorInfo

_NAMED = (
    "Custom layers need get_config(), and custom classes and functions a registered name: "
    "@keras.saving.register_keras_serializable() in a module that executors import, or "
    "custom_objects= of KerasEstimator"
)
_NO_OPTIMIZER = (
    "the model is compiled without an optimizer. That suffices for evaluate(), not for fit(). "
    'Call compile(optimizer="adam", loss=...) with the optimizer for the training'
)
_NO_SLOTS = "the saved optimizer has 2 variables"
"""Keras' words for an optimizer that has only its iterations and rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """How a worker gets its model."""

    content: bytes = field(default=b"", repr=False)
    """Bytes of a `.keras` file of a compiled model; empty: `model_fn` makes it."""
    model_fn: Callable[[], Any] | None = None
    """Function that returns a compiled model."""
    custom_objects: Mapping[str, Any] = field(default_factory=dict)
    """The user's classes and functions that the file names."""
    inputs: Mapping[str, TensorInfo] = field(default_factory=dict)
    """Inputs, in the model's own order; empty: unknown, or the model has no fixed inputs."""
    outputs: tuple[str, ...] = ()
    """Names of the outputs, in the model's own order; empty: as above."""
    has_trained: bool = False
    """Whether its optimizer has made steps, and so may have state."""

    @property
    def schedule(self) -> str:
        """Name of the learning rate's schedule; empty: there is none, or only model_fn knows it."""
        if not self.content:
            return ""
        optimizer = _compiled_with(self.content).get("optimizer")
        while isinstance(optimizer, dict):
            settings = optimizer.get("config") or {}
            rate = settings.get("learning_rate")
            if isinstance(rate, dict):
                return str(rate.get("class_name"))
            optimizer = settings.get("inner_optimizer")  # for LossScaleOptimizer
        return ""

    def check_compiled(self, *, trains: bool) -> None:
        """Refuse a file without loss and optimizer, which load() may have read.

        Args:
            trains: a fit needs an optimizer; an evaluation needs none.

        Raises:
            NotCompiled: the model has no loss, so it can neither train nor be evaluated.
            SettingsError: the bytes are not a `.keras` file.
        """
        if not self.content:
            return
        if trains and _lacks_optimizer(self.content):
            raise NotCompiled(_NO_OPTIMIZER)
        if not _compiled_with(self.content):
            raise NotCompiled(
                "the file has a model that was never compiled: it can predict, but fit() and "
                "evaluate() need a loss. Compile it before you save it. Or get it with "
                "keras_model() (Orca's estimator: get_model()), call compile(optimizer, loss) and "
                "pass it as the model of an estimator"
            )

    def build(self, *, trains: bool = True, is_distributed: bool = False) -> Any:
        """Return the compiled model.

        Args:
            trains: as in `check_compiled`.
            is_distributed: servers will train it. Their slots start fresh or come from a
                checkpoint, so the optimizer's own steps are left out.

        Raises:
            SettingsError: model_fn returned something other than a compiled Keras model.
            NotCompiled: Keras cannot compile the loaded model again.
        """
        if self.content:
            _register(self.custom_objects)
            with warnings.catch_warnings():
                # A model that has not trained has no slots yet: nothing is skipped.
                warnings.filterwarnings("ignore", f"Skipping variable loading .*{_NO_SLOTS}")
                model = model_of(self.content, self.custom_objects)
            if _lacks_optimizer(self.content):
                _check_optimizer(model, trains=trains)
                return model
            if getattr(model, "optimizer", None) is None:  # Keras calls it compiled even then
                raise NotCompiled(
                    f"a {type(model).__qualname__} is not compiled after loading from its file. "
                    "If it overrides compile(), override get_compile_config() and "
                    "compile_from_config() as well, or pass model_fn= (Orca's model_creator=)"
                )
            if is_distributed and int(model.optimizer.iterations) > 0:
                model.optimizer = _fresh(model.optimizer, self.custom_objects)
            return model
        if self.model_fn is None:
            raise SettingsError(
                "there is neither a model nor a function that makes one; pass one of them"
            )
        model = self.model_fn()
        _check(model, "model_fn (Orca's model_creator) returned")
        _check_optimizer(model, trains=trains)
        return model


def recipe_of(
    model: Any,
    model_fn: Any,
    custom_objects: Mapping[str, Any] | None = None,
    *,
    maker: str = "model_fn",
) -> ModelRecipe:
    """Return the recipe of a user's model.

    Args:
        model: a compiled Keras model, its weights included; or None.
        model_fn: a function without arguments that returns one, in each worker; or None.
        custom_objects: classes and functions that a saved model names.
        maker: what the caller calls `model_fn`, for errors.

    Raises:
        SettingsError: none or both are given, or the model is not compiled.
        UnsupportedModel: no other process could load it.
    """
    if (model is None) == (model_fn is None):
        raise SettingsError(
            f"pass either model=, a compiled Keras model, or {maker}=, a function that returns one"
        )
    custom = dict(custom_objects or {})
    if model is None:
        if not callable(model_fn):
            raise SettingsError(
                f"{maker} must be a function that returns a compiled Keras model, got {model_fn!r}"
            )
        return ModelRecipe(model_fn=model_fn, custom_objects=custom)
    _check(model, "model= is")
    from tfos.keras.built import has_built_layers

    # Keras' build makes no weights of an own class; a model of Rescaling alone is to have none.
    if not (model.built and (model.weights or has_built_layers(model))):
        raise SettingsError(
            "the model has no weights yet. Add keras.Input(shape), call the model once, "
            f"model(x[:1]), or pass {maker}="
        )
    content = content_of(model)
    if _has_unnamed_function(content):
        raise UnsupportedModel(
            "the model has a function without a name, such as keras.layers.Lambda(lambda x: ...). "
            f"Keras saves its code but refuses to load it. {_NAMED}"
        )
    warn_of_predictions(model)
    inputs, outputs = tensors_of(model)
    return ModelRecipe(
        content=content,
        custom_objects=_with_registered_names(custom),
        inputs=input_infos(model) if inputs else {},
        outputs=outputs,
        has_trained=model.optimizer is not None and int(model.optimizer.iterations) > 0,
    )


def _with_registered_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects also by their registered names, which the model's file has for them."""
    import keras

    registered = keras.saving.get_custom_objects().items()
    own = {id(each) for each in given.values()}
    return {**given, **{name: each for name, each in registered if id(each) in own}}


def _register(custom_objects: Mapping[str, Any]) -> None:
    """Register what the driver has registered: a worker gets a script's object undecorated.

    Else the trained model's file would have another name for it than custom_objects.
    """
    import keras

    for name, each in custom_objects.items():
        package, is_registered, own_name = name.partition(">")
        if is_registered:
            keras.saving.register_keras_serializable(package, own_name)(each)


def warn_of_predictions(model: Any) -> None:
    """Warn if a model can be trained, but its file does not tell its inputs.

    Args:
        model: the Keras model.
    """
    if tensors_of(model)[0]:
        return
    warnings.warn(
        f"the model is a {type(model).__name__} without fixed inputs: fit trains it, but transform "
        "and predict will refuse the trained model, as its columns are unknown. Take it from "
        f"keras_model() (Orca's estimator: get_model()); {EXPORT}. Or build the model from "
        "keras.Input and layers",
        stacklevel=4,
    )


def check_saved(model: Any, custom_objects: Mapping[str, Any]) -> None:
    """Save a built model and load it again, as happens to a trained model.

    Args:
        model: the compiled model.
        custom_objects: the user's classes and functions that its file names.

    Raises:
        UnsupportedModel: the trained model would be lost.
    """
    if not model.built:
        return
    state = random.getstate()  # initializers of the copy draw their seeds from it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are shown for the file after the fit
            # A loss without a name breaks an evaluation, not a fit.
            model_of(content_of(model), custom_objects, is_compiled=False)
    except Exception as error:
        raise UnsupportedModel(
            f"this model cannot be saved and loaded again, so its training would be lost: {error}. "
            f"{_NAMED}"
        ) from error
    finally:
        random.setstate(state)


def _fresh(optimizer: Any, custom_objects: Mapping[str, Any]) -> Any:
    """Return an optimizer with the same settings that has made no steps."""
    import keras

    with keras.saving.custom_object_scope(dict(custom_objects)):
        return type(optimizer).from_config(optimizer.get_config())


def described(recipe: ModelRecipe, signature: ModelSignature) -> ModelRecipe:
    """Return the recipe of a model's bytes with the names and dtypes that a task has read.

    Args:
        recipe: the recipe; has bytes.
        signature: the signature of these bytes.
    """
    return replace(recipe, inputs=signature.inputs, outputs=tuple(signature.outputs))


def check_file(content: bytes, path: str) -> None:
    """Refuse bytes that are not a model's file.

    Args:
        content: bytes of the file.
        path: path of the file.

    Raises:
        SettingsError: it is not a `.keras` file.
    """
    try:
        _config_of(content)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


def _config_of(content: bytes) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.read("config.json")
    except (zipfile.BadZipFile, KeyError) as error:
        raise SettingsError(
            f"the model's {len(content)} bytes are not a .keras file: {error}. Keras 3's "
            "model.save('name.keras') writes one"
        ) from error


def _compiled_with(content: bytes) -> dict[str, Any]:
    """Return loss, optimizer and metrics as the file of a model names them; empty: it has none."""
    return json.loads(_config_of(content)).get("compile_config") or {}


def _lacks_optimizer(content: bytes) -> bool:
    """Whether the file's model was compiled with only loss and metrics."""
    config = _compiled_with(content)
    return bool(config) and "optimizer" in config and config["optimizer"] is None


def _has_unnamed_function(content: bytes) -> bool:
    return b'"class_name": "__lambda__"' in _config_of(content)


def content_of(model: Any) -> bytes:
    """Return the bytes of a model's `.keras` file."""
    with tempfile.TemporaryDirectory(prefix="tfos-model-") as directory:
        file = Path(directory, "model.keras")
        with names_full_disk(file):
            model.save(file)
        return file.read_bytes()


def model_of(
    content: bytes, custom_objects: Mapping[str, Any] | None = None, *, is_compiled: bool = True
) -> Any:
    """Return the model of a `.keras` file's bytes.

    Args:
        content: bytes of the file.
        custom_objects: classes and functions that it names.
        is_compiled: whether it gets its loss and optimizer.
    """
    from tfos.keras import load_model  # this way a model with tables trains in any worker

    with tempfile.TemporaryDirectory(prefix="tfos-model-") as directory:
        file = Path(directory, "model.keras")
        with names_full_disk(file):
            file.write_bytes(content)
        if not is_compiled or not _lacks_optimizer(content):
            return load_model(file, custom_objects=custom_objects, compile=is_compiled)
        model = load_model(file, custom_objects=custom_objects, compile=False)
    import keras

    with keras.saving.custom_object_scope(dict(custom_objects or {})):  # Keras fails without one
        model.compile(**keras.saving.deserialize_keras_object(_compiled_with(content)))
    return model


def _check(model: Any, what: str) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise SettingsError(f"{what} {type(model).__qualname__}; it must be a Keras model")
    if not model.compiled:
        raise NotCompiled(
            f"{what} a model that is not compiled; call model.compile(optimizer, loss)"
        )


def _check_optimizer(model: Any, *, trains: bool) -> None:
    if trains and model.optimizer is None:
        raise NotCompiled(_NO_OPTIMIZER)


def tensors_of(model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the inputs and outputs of a model; empty if they are not fixed."""
    if not getattr(model, "inputs", None):
        return (), ()
    return tuple(input_names(model)), tuple(output_names(model))
