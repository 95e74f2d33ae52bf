"""Models in a Spark Python worker: read once per process, kept, called as one traced function.

Covers: `.keras` files (or their bytes), SavedModels and exports with tables beside the model, from
local paths and URLs; which models are kept.
Does not: know columns (tfos.predict.tensors); call `model.predict`.
Runs in: Spark's Python workers.
Threads: one. TensorFlow and Keras are imported in functions only.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import os
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from feeding.errors import PathError
from feeding.filesystem.location import Location, parse
from feeding.filesystem.registry import filesystem_for
from feeding.filesystem.temp_files import names_full_disk
from tfos.errors import SettingsError, TFOSError, UnsupportedModel
from tfos.feed.task_process import exempt_objects
from tfos.files.transfer import on_disk
from tfos.predict.saved_arguments import order_of_arguments, ragged_arguments
from tfos.predict.signature import ModelSignature, ModelSource, ModelTensors, TensorInfo

if TYPE_CHECKING:
    from tfos.serving.export_reader import ExportFiles

EXPORT = (
    "call it on a batch of rows and export it as a SavedModel, model.export('directory'), which "
    "predict_column('directory') reads"
)
"""What to do with a model whose inputs are unknown until it has been called."""
KEPT = 4
"""Models kept per Python process; several columns of a query use it in turn."""
_KERAS = ".keras"
_MANIFEST = "export.json"

Call = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class LoadedModel(ModelTensors):
    """A model as a function of tensors. It keeps no signature, whose source may hold its bytes."""

    call: Call = field(kw_only=True)
    """Maps tensors of the inputs to tensors of the outputs, both in order."""


_loaded: dict[tuple[str, ...], LoadedModel] = {}
"""Loaded models by source and digest, the most recently used one last."""


def read_signature(source: ModelSource) -> ModelSignature:
    """Return a model's signature; the model is kept for this process's predictions.

    Raises:
        SettingsError: there is no model, or no such signature; the text has the remedy.
    """
    model = _read(source)
    _keep(source, model)
    return ModelSignature.of(source, model)


def loaded(signature: ModelSignature) -> LoadedModel:
    """Return the model of a signature, read at most once per process.

    Raises:
        SettingsError: another model is there now.
    """
    source = signature.source
    model = _loaded.get(_key(source, signature.digest)) or _read(source)
    _keep(source, model)
    if model.digest != signature.digest:
        raise _changed(source, "its names and types were read")
    return model


def _keep(source: ModelSource, model: LoadedModel) -> None:
    """Keep the model that was read or used most recently."""
    key = _key(source, model.digest)
    _loaded.pop(key, None)
    _loaded[key] = model
    if len(_loaded) > KEPT:
        while len(_loaded) > KEPT:
            del _loaded[next(iter(_loaded))]
        gc.unfreeze()  # a model is full of cycles: if frozen, it would never be freed
        exempt_objects()


def _key(source: ModelSource, digest: str) -> tuple[str, ...]:
    return source.path, source.tags, source.name, source.custom_digest, digest


def _read(source: ModelSource) -> LoadedModel:
    """Return the current model: the kept one if its files are the same."""
    with contextlib.ExitStack() as files:
        digest, read = _find(source, files)
        kept = _loaded.get(_key(source, digest))
        if kept is not None:
            return kept
        _limit_to_task()
        model = read(digest)
    exempt_objects()
    return model


def _find(
    source: ModelSource, files: contextlib.ExitStack
) -> tuple[str, Callable[[str], LoadedModel]]:
    """Return the digest of a model's files, and a function that reads them; without TensorFlow."""
    if source.content:
        directory = files.enter_context(tempfile.TemporaryDirectory(prefix="tfos-model-"))
        local = Path(directory, f"model{_KERAS}")
        with names_full_disk(local):
            local.write_bytes(source.content)
    else:
        try:
            place = parse(source.path)
            if not source.path.endswith(_KERAS) and _exists(place.child(_MANIFEST)):
                return _find_export(source)
            name = "model" + (_KERAS if place.name.endswith(_KERAS) else "")
            local = files.enter_context(on_disk(place, name))
        except PathError as error:
            raise SettingsError(f"the model: {error}") from error  # it may have a password
        except FileNotFoundError as error:
            raise _no_model(source, error) from error
    try:
        return _digest(local), functools.partial(_read_unchanged, source, local)
    except OSError as error:
        raise _no_model(source, error) from error


def _read_unchanged(source: ModelSource, local: Path, digest: str) -> LoadedModel:
    """Read a model; refuse it if it has changed since its digest was taken, maybe seconds ago."""
    model = (_read_keras if local.is_file() else _read_saved_model)(source, local, digest)
    try:
        is_same = _digest(local) == digest
    except OSError:
        is_same = False
    if not is_same:
        raise _changed(source, "its digest was taken")
    return model


def _exists(place: Location) -> bool:
    return filesystem_for(str(place)).exists(str(place))


def _read_keras(source: ModelSource, file: Path, digest: str) -> LoadedModel:
    from tfos.keras.export import load_model

    try:
        model = load_model(file, custom_objects=source.custom_objects, compile=False)
    except TFOSError:
        raise  # says its own remedy
    except (OSError, ValueError, TypeError) as error:
        is_keras = zipfile.is_zipfile(file)
        raise (_not_made if is_keras else _no_model)(source, error) from error
    return _of_keras(source, model, digest)


def _find_export(source: ModelSource) -> tuple[str, Callable[[str], LoadedModel]]:
    """Return the digest of an export, and a function that reads its model."""
    from tfos.serving.export_reader import ExportFiles

    files = ExportFiles(source.path)
    manifest = files.manifest
    # Check this before the index of all rows is built.
    if manifest.base is not None:
        raise SettingsError(
            f"the export {source} is a delta of the state {manifest.base} and has only changed "
            "rows. Name a whole export, which is written without since="
        )
    if manifest.model is None:
        raise SettingsError(
            f"the export {source} has only tables, and no model that predicts. Write one with "
            'ctx.export(model, path, tables="beside")'
        )
    return manifest.digest, functools.partial(_read_export, source, files)


def _read_export(source: ModelSource, files: ExportFiles, digest: str) -> LoadedModel:
    """Read the dense model of an export; its layers find their rows in the export's index."""
    from tfos import serving
    from tfos.serving import served_model

    manifest = files.manifest
    try:
        model = served_model.dense_model(files, source.custom_objects)
    except TFOSError:
        raise  # says its own remedy
    except (ValueError, TypeError) as error:
        raise _not_made(source, error) from error
    _refuse_free_inputs(source, model)
    served = serving.load(source.path, progress=False)
    if served.state != manifest.state:
        raise SettingsError(
            f"the export {source} now has the state {served.state}, but its model is of the state "
            f"{manifest.state}. Call again, and write new exports to new paths"
        )
    served_model.bind(model, served)
    return _of_keras(source, model, digest)


def _of_keras(source: ModelSource, model: Any, digest: str) -> LoadedModel:
    import keras
    import tensorflow as tf

    from tfos.keras import lookup_errors

    _refuse_free_inputs(source, model)
    inputs = input_infos(model)
    takes_one = isinstance(model, keras.Sequential)

    def packed(given: tuple[Any, ...]) -> Any:
        if isinstance(model.input, OrderedDict):
            by_name = dict(zip(inputs, given, strict=True))
            given = tuple(by_name[key] for key in model.input)
        return keras.tree.pack_sequence_as(model.input, list(given))

    @tf.function(input_signature=[_spec(each) for each in inputs.values()], autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow is not checked
    def run(*given: Any) -> list[Any]:
        found = model(given[0] if takes_one else packed(given), training=False)
        flat = in_order_of_names(model, "output", keras.tree.flatten(found))
        return list(map(_tensor, flat))

    function = run.get_concrete_function()
    outputs = dict(zip(output_names(model), map(_info, function.structured_outputs), strict=True))
    function.tfos_owner = model  # as below

    def call(tensors: list[Any]) -> list[Any]:
        with lookup_errors.typed_errors():
            found: list[Any] = function(*tensors)
        return found

    return LoadedModel(digest, inputs, outputs, call=call)


def _tensor(output: Any) -> Any:
    import tensorflow as tf

    return output if isinstance(output, tf.RaggedTensor) else tf.convert_to_tensor(output)


def _refuse_free_inputs(source: ModelSource, model: Any) -> None:
    if not getattr(model, "inputs", None):
        raise UnsupportedModel(
            f"the model {source} is a {type(model).__name__} without fixed inputs, so its columns "
            f"are unknown; {EXPORT}"
        )


def _read_saved_model(source: ModelSource, directory: Path, digest: str) -> LoadedModel:
    import tensorflow as tf

    try:
        tags = [tag for tag in source.tags.split(",") if tag]
        model = tf.saved_model.load(str(directory), tags=tags)
    except (OSError, RuntimeError, ValueError) as error:
        raise _no_model(source, error) from error
    if source.name not in model.signatures:
        raise SettingsError(
            f"{source} has no signature {source.name!r}, only {sorted(model.signatures)}; "
            "name one of these"
        )
    function = model.signatures[source.name]
    function.tfos_owner = model  # a signature alone does not keep its variables
    _, keywords = function.structured_input_signature
    order = order_of_arguments(model, keywords)
    # TensorFlow's order differs between processes.
    keywords = {key: keywords[key] for key in order or sorted(keywords)}
    ragged = {each.values: each for each in ragged_arguments(model, keywords)}
    ends = {each.ends for each in ragged.values()}
    arguments = [key for key in keywords if key not in ends]
    inputs = {
        ragged[key].name if key in ragged else key: _info(
            ragged[key].spec if key in ragged else keywords[key]
        )
        for key in arguments
    }
    outputs = {key: _info(spec) for key, spec in sorted(function.structured_outputs.items())}

    def call(tensors: list[Any]) -> list[Any]:
        given: dict[str, Any] = {}
        for key, tensor in zip(arguments, tensors, strict=True):
            given |= ragged[key].tensors(tensor) if key in ragged else {key: tensor}
        found: Mapping[str, Any] = function(**given)
        return [found[name] for name in outputs]

    return LoadedModel(digest, inputs, outputs, is_ordered=order is not None, call=call)


def _no_model(source: ModelSource, error: Exception) -> SettingsError:
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    return SettingsError(
        f"no SavedModel with tags {source.tags!r}, no .keras file and no export is at {source}: "
        f"{reason}. Write one with ctx.export(model, path) to a path that every executor sees"
    )


def _not_made(source: ModelSource, error: Exception) -> SettingsError:
    innermost = str(error).strip().rpartition("Exception encountered: ")[2]
    reason = innermost.partition("\n")[0].partition(" Full object config:")[0].rstrip(".")
    return SettingsError(
        f"Keras cannot make the model of {source} here: {reason}. A SavedModel needs no code of "
        "its program: ctx.export(model, 'directory')"
    )


def _changed(source: ModelSource, since: str) -> SettingsError:
    return SettingsError(
        f"the model {source} has changed since {since}. Make the column or transformer again, or "
        "write new models to new paths"
    )


def _digest(model: Path) -> str:
    """Return the digest of a file or of a SavedModel.

    A SavedModel's covers its graph, the variables' checksums and files such as vocabularies.
    """
    if model.is_file():
        return _file_digest(model).hex()
    digest = hashlib.sha256()
    assets = sorted(path for path in model.glob("assets/**/*") if path.is_file())
    graph = (model / "saved_model.pb", model / "saved_model.pbtxt")
    for path in (*graph, model / "variables/variables.index", *assets):
        digest.update(str(path.relative_to(model)).encode())
        if path.exists():
            digest.update(_file_digest(path))
    return digest.hexdigest()


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def input_infos(model: Any) -> dict[str, TensorInfo]:
    """Return dtype and shape of each input by its name.

    Args:
        model: a functional or Sequential model of Keras 3.
    """
    from tfos.keras.embedding.layer import takes_ids

    infos = [
        TensorInfo(
            "object" if each.dtype == "string" else str(each.dtype),
            tuple(each.shape[1:]),
            bool(getattr(each, "ragged", False)),
            is_id,
        )
        for each, is_id in zip(model.inputs, takes_ids(model), strict=True)
    ]
    return dict(zip(input_names(model), in_order_of_names(model, "input", infos), strict=True))


def input_names(model: Any) -> list[str]:
    """Return the keys of a dict of inputs, or the inputs' own names.

    Args:
        model: a functional or Sequential model of Keras 3.
    """
    names = [str(each.name) for each in model.inputs]
    given = _nested(model, "input")
    return sorted(given) if isinstance(given, dict) else names


def _nested(model: Any, which: str) -> Any:
    return getattr(model, which) if hasattr(model, "output_names") else None  # not of Sequential


def in_order_of_names(model: Any, which: str, flat: list[Any]) -> list[Any]:
    """Return what belongs to inputs or outputs in the order of `input_names` or `output_names`.

    Args:
        model: a functional or Sequential model of Keras 3.
        which: input or output.
        flat: one item each in the order in which Keras flattens them, an OrderedDict in its own.
    """
    tensors = _nested(model, which)
    if not isinstance(tensors, OrderedDict):
        return flat
    by_key = dict(zip(tensors, flat, strict=True))
    return [by_key[key] for key in sorted(by_key)]


def output_names(model: Any) -> list[str]:
    """Return the keys of a dict, or the layers' names, numbered if a layer has several outputs.

    Args:
        model: a functional or Sequential model of Keras 3.
    """
    names = getattr(model, "output_names", None)
    if names is None:
        return [str(model.layers[-1].name)]
    if isinstance(model.output, dict):
        return sorted(model.output)
    taken = {str(name) for name in names}  # also later ones, which keep their names
    unique: list[str] = []
    for name in map(str, names):
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        free = next(each for each in numbered if each not in taken) if name in unique else name
        taken.add(free)
        unique.append(free)
    return unique


def _spec(info: TensorInfo) -> Any:
    import tensorflow as tf

    dtype = tf.string if info.dtype == "object" else tf.as_dtype(info.dtype)
    shape = (None, *info.shape)
    return tf.RaggedTensorSpec(shape, dtype, 1) if info.is_ragged else tf.TensorSpec(shape, dtype)


def _info(spec: Any) -> TensorInfo:
    import tensorflow as tf

    shape = spec.shape.as_list()[1:] if spec.shape.rank else []
    has_rank = spec.shape.rank is not None
    is_ragged = isinstance(spec, (tf.RaggedTensor, tf.RaggedTensorSpec))
    return TensorInfo(
        np.dtype(spec.dtype.as_numpy_dtype).name, tuple(shape), is_ragged, has_rank=has_rank
    )


def _limit_to_task() -> None:
    """Limit TensorFlow to the cores and GPUs of the Spark task, if it is not initialized yet.

    Spark's Python worker keeps the GPU memory that TensorFlow has taken until it ends, and other
    processes use the GPU meanwhile. So TensorFlow takes no more than it needs. Spark then gives
    the worker to other functions, which find the environment as it was.
    """
    from pyspark import TaskContext

    from tfos.node.task import gpus_of

    context = TaskContext.get()
    if context is None:
        return
    import tensorflow as tf

    with contextlib.suppress(RuntimeError, ValueError):  # it is already initialized
        tf.config.threading.set_intra_op_parallelism_threads(context.cpus())
        tf.config.threading.set_inter_op_parallelism_threads(context.cpus())
        with _seeing(gpus_of(context, "gpu")):
            found = tf.config.list_physical_devices("GPU")  # only the first call counts
        for gpu in found:
            tf.config.experimental.set_memory_growth(gpu, True)


@contextlib.contextmanager
def _seeing(gpus: Sequence[str]) -> Iterator[None]:
    """Let CUDA see only these GPUs if it starts meanwhile; all visible ones if none is named.

    Args:
        gpus: Spark's addresses, in bus order.
    """
    order = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    meanwhile = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": order}
    before = {name: os.environ.get(name) for name in meanwhile}
    if gpus:
        os.environ.update(meanwhile)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
